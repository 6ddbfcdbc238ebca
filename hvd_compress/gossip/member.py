"""Average one rank with its neighbours, and do the few things that all ranks do together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.errors import StateError
from hvd_compress.gossip.alltoall import Alltoall
from hvd_compress.gossip.averager import Averager, Transport
from hvd_compress.gossip.copies import Array
from hvd_compress.gossip.node import Node
from hvd_compress.gossip.settings import GossipSettings
from hvd_compress.ranks import Ranks
from hvd_compress.tensors import ParameterSpec, averaged
from hvd_compress.topology import ALONE, Neighbours

__all__ = ["GossipMember", "LateGossipMember", "OneSided"]

OneSided = Callable[[Ranks, Node, Sequence[Neighbours]], Transport]
"""Makes the transport over MPI's one-sided operations, of this rank's node and the parts of all ranks."""


class GossipMember:
    """The parameters of one rank, flat arrays in the order of `tensors`; creating it is a collective call.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        ranks: that take part; None where this rank is alone.
        one_sided: see `OneSided`.
    """

    def __init__(
        self, tensors: Sequence[ParameterSpec], settings: GossipSettings, ranks: Ranks | None, one_sided: OneSided
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._tensors = list(tensors)
        transport: Transport | None = None
        self.name = ""
        """Of the alltoall, and the beginning of the names of all other collectives."""
        if ranks is None:
            node = settings.node(self._tensors, ALONE)
        else:
            self.name = ranks.numbered("gossip")
            told = {"optimizer": "EventGraDOptimizer", **settings.description(self._tensors)}
            ranks.agree(told, beside=[t.name for t in self._tensors])
            parts = settings.topology.neighbours(ranks.size)
            node = settings.node(self._tensors, parts[ranks.position])
            transport = one_sided(ranks, node, parts) if settings.is_one_sided else Alltoall(node, ranks, self.name)
        self._averager = Averager(node, transport, settings.overlap)

    def begin(self, arrays: Callable[[], Sequence[Array]]) -> None:
        """Before the first `mix`, where some arrays are to be left out of that: take all for what neighbours hold."""
        self._averager.begin(arrays)

    def drain(self) -> None:
        """Take over what is under way."""
        self._averager.drain()

    def mix(self, arrays: Sequence[Array | None]) -> None:
        """Send, receive and average, in place."""
        self._averager.mix(arrays)

    def after_update(self, arrays: Sequence[Array | None]) -> None:
        """Send what the next step will begin with, if `overlap` is set."""
        self._averager.after_update(arrays)

    def average(self, arrays: Sequence[Array], buffers: dict[str, Array]) -> None:
        """Make parameters and buffers their mean, in place, when no rank trains any more; a collective call.

        Raises:
            MismatchError: the ranks have other buffers, or call something else.
        """
        if self._ranks is None:
            return
        self._averager.finish()
        described = [[name, list(b.shape), str(b.dtype)] for name, b in buffers.items()]
        self._ranks.agree({"EventGraD's call": "average_parameters()", "buffers": described})
        means = self._means([*arrays, *buffers.values()])
        for x, mean in zip([*arrays, *buffers.values()], means, strict=True):
            x[...] = mean.reshape(x.shape)
        self._averager.agree(arrays)
        # a rank that trains on must not send before all have taken over what was under way
        self._ranks.barrier(f"{self.name}.barrier")

    def consensus_distance(self, arrays: Sequence[Array]) -> float:
        """Compute the root of the mean over ranks of ‖x - mean of x‖²; a collective call.

        Raises:
            MismatchError: some ranks call something else.
        """
        if self._ranks is None:
            return 0.0
        self._averager.finish()
        self._ranks.agree({"EventGraD's call": "consensus_distance()"})
        exact = [x.astype(np.float64) for x in arrays]
        square = sum(float(np.square(x - mean).sum()) for x, mean in zip(exact, self._means(exact), strict=True))
        return math.sqrt(float(self._ranks.mean(f"{self.name}.consensus", np.array([square]))[0]))

    def _means(self, arrays: Sequence[Array]) -> list[Array]:
        """Average arrays over the ranks, flat, with one collective for all arrays of a dtype."""
        assert self._ranks is not None
        mean = self._ranks.mean
        return averaged(arrays, lambda together: mean(f"{self.name}.mean.{together.dtype}", together))

    def stats(self) -> dict[str, Any]:
        """See `event_stats` of the optimizers."""
        return self._averager.node.report()

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`."""
        return {"settings": self._described(), **self._averager.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank; a collective call where messages are one-sided.

        Raises:
            StateError: not such a state, or of another rank, network or settings.
        """
        refusal: StateError | None = None
        try:
            checked = self._checked(state)
        except StateError as error:
            refusal = error
        waits = self._ranks if self._settings.is_one_sided else None
        if waits is not None:
            # also where the state is refused, or the others would wait there for ever
            everywhere = waits.mean(f"{self.name}.state", np.array([float(refusal is None)]))[0]
            if refusal is None and everywhere < 1.0:
                raise StateError(
                    "the event state of another rank was refused there, so none is taken over here: see that rank's "
                    "error"
                )
        if refusal is not None:
            raise refusal
        if waits is not None:
            # what is under way is of the time before: all ranks have come here, and send nothing
            self._averager.take_what_came()
        self._averager.load(checked)
        if waits is not None:
            waits.barrier(f"{self.name}.barrier")

    def restore(self, state: Any) -> None:
        """Forget what is under way, which will never be complete, and take over what `state_dict` returned here."""
        self._averager.abandon()
        self._averager.load(self._checked(state))

    def watched(self) -> dict[str, Any]:
        """Return thresholds, slopes and the number of passes."""
        return self._averager.node.watch.state_dict()

    def go_on_from(self, watched: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Begin with equal values on all ranks, which then count as sent.

        Args:
            watched: what `watched` returned, here or on another rank.
            arrays: the values.
        """
        watch = self._averager.node.watch
        watch.load(watch.check(watched))
        self._averager.agree(arrays)

    def inherit(self, before: GossipMember) -> None:
        """Go on with the counters of this rank's member among other ranks."""
        self._averager.node.tally.inherit(before._averager.node.tally)

    def _checked(self, state: Any) -> dict[str, Any]:
        of_state = state.get("settings") if isinstance(state, dict) else None
        if of_state is not None and not saved.equal(of_state, self._described()):
            mine, theirs = self._described(), saved.record("settings of an event state", of_state)
            different = sorted(k for k in mine.keys() | theirs.keys() if not saved.equal(theirs.get(k), mine.get(k)))
            raise StateError(
                f"event state of other settings: {', '.join(map(str, different))} differ. Load it with those that it "
                "was saved with"
            )
        return self._averager.check(state)

    def close(self) -> None:
        """Give up windows of one-sided messages; a collective call."""
        if self._ranks is not None and self._settings.is_one_sided:
            self._ranks.agree({"EventGraD's call": "close()"})
        self._averager.close()

    def _described(self) -> dict[str, Any]:
        described = self._settings.description(self._tensors)
        # with or without is the same for a state
        return {key: value for key, value in described.items() if key not in ("overlap", "parameters")}


class LateGossipMember:
    """A member that is made when its variables are known, in the first step; an edge derives from it.

    Args:
        settings: the same on all ranks.
    """

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self._member: GossipMember | None = None
        self._saved: Any = None

    def event_stats(self) -> dict[str, Any]:
        """Return messages and bytes of this rank, as `EventGraDOptimizer.event_stats`; {} before the first step."""
        return {} if self._member is None else self._member.stats()

    def event_state_dict(self) -> dict[str, Any]:
        """Histories, thresholds and copies of this rank, as plain values and NumPy arrays.

        Before the first step it is what was loaded, or {}. To be called between steps, on all ranks after the same one.
        """
        return self._saved or {} if self._member is None else self._member.state_dict()

    def load_event_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `event_state_dict` returned on this rank; before the first step, when that is made.

        Raises:
            StateError: not such a state, or of another rank, network or settings.
        """
        if self._member is None:
            self._saved = saved.record("event state", state)
        else:
            self._member.load_state_dict(state)

    def close(self) -> None:
        """Give up the memory that the transport "one_sided" shares with the neighbours; a collective call."""
        if self._member is not None:
            self._member.close()

    def _made(self, tensors: Sequence[ParameterSpec], ranks: Ranks | None, one_sided: OneSided) -> GossipMember:
        """Make the member and load the waiting state; one that it refuses is refused again in the next step."""
        member = GossipMember(tensors, self._settings, ranks, one_sided)
        if self._saved:
            member.load_state_dict(self._saved)
        self._member = member
        return member
