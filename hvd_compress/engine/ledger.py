"""All tensors of an optimizer or tape on one rank: which are compressed, what is owed, what it has cost, its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.engine.counters import Counters
from hvd_compress.engine.lane import Lane
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import Plan, make_plan
from hvd_compress.feedback import FORMAT, check_state

__all__ = ["Ledger", "empty_state", "refuse_residuals"]

AnyLane = TypeVar("AnyLane", bound=Lane)
MakeLane = Callable[[str, Plan, Compressor, int], AnyLane]


def empty_state() -> dict[str, Any]:
    """The state where nothing is exchanged."""
    return {"format": FORMAT, "size": 1, "rank": 0, "steps": 0, "residuals": {}, "owner_residuals": {}}


def refuse_residuals(state: dict[str, Any]) -> None:
    """Raise StateError if a state with residuals is loaded where nothing is exchanged."""
    check_state(state)
    if state["residuals"] or state["owner_residuals"]:
        raise StateError(
            "compressor state with residuals, but nothing is exchanged here (one rank): train with as many ranks "
            "as before, or leave the state out, which drops what was still owed"
        )


class Ledger(Generic[AnyLane]):
    """The lanes of the compressed tensors and the counters of the others.

    Args:
        compressor: of all tensors; None if all go dense.
        exchange: "auto", "two_phase" or "allgather".
        min_numel: tensors with fewer elements go dense.
        ranks: that take part.
        position: of this rank among them.
        tensors: (name, shape, bytes per element) of all that may come.
        make_lane: from name, plan, compressor and position.
    """

    def __init__(
        self,
        compressor: Compressor | None,
        exchange: str,
        min_numel: int,
        ranks: int,
        position: int,
        tensors: Iterable[tuple[str, tuple[int, ...], int]],
        make_lane: MakeLane[AnyLane],
    ) -> None:
        self.compressor = compressor
        self.lanes: dict[str, AnyLane] = {}
        self.dense: dict[str, Counters] = {}
        self._steps = 0
        self._loss_scale = 1.0
        self._ranks = ranks
        self._position = position
        for name, shape, itemsize in tensors:
            plan = None
            if compressor is not None and math.prod(shape) >= min_numel:
                plan = make_plan(exchange, compressor, shape, ranks, itemsize)
            if compressor is None or plan is None or plan.exchange == "dense":
                self.dense[name] = Counters()
            else:
                self.lanes[name] = make_lane(name, plan, compressor, position)

    @property
    def is_used(self) -> bool:
        """Whether any tensor goes through an exchange."""
        return bool(self.lanes)

    def compresses(self, name: str) -> bool:
        """Whether the tensor goes through an exchange rather than through Horovod's allreduce."""
        return name in self.lanes

    def abandon(self) -> None:
        """Forget a step in flight."""
        for lane in self.lanes.values():
            if lane.busy:
                lane.abandon()

    def inherit(self, other: Ledger[AnyLane]) -> None:
        """Take over what `other`, a ledger of the same tensors with another compressor, still owes, and its counters.

        Raises:
            UnsupportedError: something is owed of a tensor that is not compressed with error feedback here.
        """
        for name, lane in other.lanes.items():
            if lane.is_owing() and (name not in self.lanes or not self.lanes[name].keeps_residual):
                raise UnsupportedError(
                    f"{self.compressor or NoCompression()!r} keeps no residual of {name!r}, of which "
                    f"{lane.residual_norm():.3g} is still owed: "
                    "take a compressor with error feedback, such as the last one"
                )
        for name, lane in self.lanes.items():
            if name in other.lanes:
                lane.inherit(other.lanes[name])
            elif name in other.dense:
                lane.counters = other.dense[name]
        for name in self.dense:
            self.dense[name] = other.dense.get(name) or other.lanes[name].counters
        self._steps, self._loss_scale = other._steps, other._loss_scale

    def set_loss_scale(self, loss_scale: float) -> None:
        """Convert the residuals, which are in units of the scaled gradients, to another loss scale."""
        factor = loss_scale / self._loss_scale
        self._loss_scale = loss_scale
        if factor != 1.0:
            for lane in self.lanes.values():
                lane.rescale(factor)

    # -- statistics ----------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """A step is complete."""
        self._steps += 1

    def count_dense(self, name: str, sent_bytes: int, gradient_bytes: int) -> None:
        """An uncompressed allreduce of `sent_bytes` that stand for a gradient of `gradient_bytes`."""
        self.dense.setdefault(name, Counters()).count_dense(sent_bytes, gradient_bytes, self._ranks)

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""
        total = Counters(steps=self._steps)
        squares = 0.0
        tensors = {}
        for name, lane in self.lanes.items():
            norm = lane.residual_norm()
            squares += norm**2
            total.add(lane.counters)
            tensors[name] = lane.counters.report(norm) | {"exchange": lane.plan.exchange}
        for name, counters in self.dense.items():
            total.add(counters)
            tensors[name] = counters.report(0.0) | {"exchange": "dense"}
        return {"total": total.report(squares**0.5), "tensors": tensors}

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`; values are NumPy arrays, copied."""
        residuals, owners = {}, {}
        for name, lane in self.lanes.items():
            shape = list(lane.plan.shape)
            if lane.residual is not None:
                residuals[name] = {"shape": shape, "values": lane.residual.copy()}
            owed = lane.transfer.owner_residual
            if owed is not None:
                owners[name] = {"shape": shape, "start": lane.plan.bounds[self._position], "values": owed.copy()}
        return {
            "format": FORMAT,
            "size": self._ranks,
            "rank": self._position,
            "steps": self._steps,
            "loss_scale": self._loss_scale,
            "transfer_steps": {name: lane.transfer.step for name, lane in self.lanes.items()},
            "compressor": None if self.compressor is None else self.compressor.get_config(),
            "residuals": residuals,
            "owner_residuals": owners,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state completely, then take it over.

        Raises:
            StateError: not a compressor state, of another number of ranks or another rank, or of other tensors.
        """
        check_state(state)
        if state["size"] != self._ranks:
            raise StateError(
                f"compressor state of {state['size']} ranks, there are {self._ranks} now: collect the states of all "
                f"ranks and divide them with hvd_compress.feedback.redistribute(states, {self._ranks})"
            )
        if state["rank"] != self._position and self.is_used:
            raise StateError(
                f"compressor state of rank {state['rank']}, this is rank {self._position}: save one per rank"
            )
        for kind in ("residuals", "owner_residuals"):
            for name, entry in state[kind].items():
                self._check_entry(name, entry, kind)
        self.abandon()
        for name, lane in self.lanes.items():
            own, owed = state["residuals"].get(name), state["owner_residuals"].get(name)
            lane.residual = None if own is None else np.asarray(own["values"]).copy()
            lane.transfer.owner_residual = None if owed is None else np.asarray(owed["values"]).copy()
            lane.transfer.step = state.get("transfer_steps", {}).get(name, state["steps"])
        self._steps = state["steps"]
        self._loss_scale = state.get("loss_scale", 1.0)

    def _check_entry(self, name: str, entry: dict[str, Any], kind: str) -> None:
        lane = self.lanes.get(name)
        if lane is None:
            raise StateError(
                f"compressor state has a residual of {name!r}, which is not compressed here; known are "
                f"{', '.join(map(repr, self.lanes)) or 'none'}"
            )
        if tuple(entry["shape"]) != lane.plan.shape:
            raise StateError(f"residual of {name!r} has shape {tuple(entry['shape'])}, the tensor {lane.plan.shape}")
        if self.compressor is None or not self.compressor.feedback:
            raise StateError(f"compressor state has residuals, {self.compressor!r} keeps none")
        if kind == "owner_residuals":
            bounds, position = lane.plan.bounds, self._position
            expected = (bounds[position], bounds[position + 1]) if lane.plan.exchange == "two_phase" else None
            if expected != (entry["start"], entry["start"] + len(entry["values"])):
                raise StateError(
                    f"owner residual of {name!r} covers elements from {entry['start']}, this rank owns {expected}; "
                    "divide the states with hvd_compress.feedback.redistribute to change the exchange"
                )
