"""Keep AdaGrad's accumulators of all tensors on one rank, and save and load them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import StateError
from hvd_compress.exchange import Account, Accumulator, AdaGrad, Pack

__all__ = ["Accumulators", "refuse_accumulators"]

Array = npt.NDArray[Any]


def refuse_accumulators(state: Mapping[str, Any]) -> None:
    """Raise StateError if a state of a run with AdaGrad is loaded into one without."""
    if "accumulators" in state:
        raise StateError(
            "compressor state with the accumulators of AdaGrad, which is not used here: train with adagrad=AdaGrad() "
            "as before, or leave the state out, which drops them and what was still owed"
        )


class Accumulators:
    """Makes and keeps the accumulators of accounts, packs and dense tensors.

    An account's accumulator covers only the elements that its rank owns; the others are equal on all ranks.

    Args:
        adagrad: settings.
        scale: factor on the sum over ranks; dense tensors come with it already.
        shapes: of all tensors.
        accounts: of those that are compressed.
        packs: of those that travel beside them.
    """

    def __init__(
        self,
        adagrad: AdaGrad,
        scale: float,
        shapes: Mapping[str, tuple[int, ...]],
        accounts: Mapping[str, Account],
        packs: Mapping[str, Pack],
    ) -> None:
        self._adagrad = adagrad
        self._scale = scale
        self._shapes, self._accounts, self._packs = shapes, accounts, packs
        self._dense: dict[str, Accumulator] = {}

    def of_sums(self) -> Accumulator:
        """Make a new accumulator for an account or a pack."""
        return Accumulator(self._adagrad, self._scale)

    # -- steps ---------------------------------------------------------------------------------------------------

    def precondition(self, name: str, combined: Array, loss_scale: float) -> bool:
        """Turn a flat combined gradient that went dense into an update, in place; returns whether it is finite."""
        accumulator = self._dense.setdefault(name, Accumulator(self._adagrad, 1.0))
        accumulator.loss_scale = loss_scale
        finite = accumulator.precondition(combined)
        if loss_scale != 1.0:
            combined *= combined.dtype.type(loss_scale)
        return finite

    def settle(self, keep: bool) -> None:
        """End the step for dense tensors; accounts and packs settle when they finish."""
        for accumulator in self._dense.values():
            accumulator.settle(keep)

    def set_loss_scale(self, loss_scale: float) -> None:
        """Tell accounts and packs by which loss scale the next gradients will be multiplied."""
        for accumulator in (*self._of_accounts().values(), *self._of_packs().values()):
            accumulator.loss_scale = loss_scale

    # -- state ---------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Any]:
        """Return the "accumulators" of a state; see `hvd_compress.feedback`."""
        values: dict[str, tuple[int, Array]] = {}
        for name, accumulator in self._of_accounts().items():
            account = self._accounts[name]
            # a tensor left out of all steps gets zeros: no entry at all would say that other ranks own it
            if account.owned is not None and account.step:
                zeros = np.zeros(account.owned.stop - account.owned.start, np.float32)
                values[name] = account.owned.start, zeros if accumulator.values is None else accumulator.values.copy()
        for name, accumulator in self._of_packs().items():
            if accumulator.values is not None:
                values[name] = 0, accumulator.values[self._packs[name].place(name)].copy()
        for name, accumulator in self._dense.items():
            if accumulator.values is not None:
                values[name] = 0, accumulator.values.copy()
        return {n: {"shape": list(self._shapes[n]), "start": start, "values": v} for n, (start, v) in values.items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise StateError if a state has accumulators of other tensors."""
        for name, entry in state.get("accumulators", {}).items():
            if tuple(entry["shape"]) != self._shapes.get(name):
                raise StateError(f"accumulator of {name!r} with shape {tuple(entry['shape'])}: {self._known(name)}")

    def needed(self, state: Mapping[str, Any], kind: str) -> dict[str, Array]:
        """Copy from a state the values of the elements that this rank owns, or keeps as all ranks do.

        Args:
            state: of a run with AdaGrad, its tensors those that are here.
            kind: "accumulators" or "owner_residuals", which both belong to elements.

        Raises:
            StateError: the state has values of other elements.
        """
        needed = {}
        for name, shape in self._shapes.items():
            wanted = self._accounts[name].owned if name in self._accounts else slice(0, math.prod(shape))
            entry = state[kind].get(name)
            is_elsewhere = kind == "accumulators" and bool(state.get("transfer_steps", {}).get(name))
            if wanted is None or (entry is None and not is_elsewhere):
                continue
            start, values = (0, np.empty(0)) if entry is None else (entry["start"], entry["values"])
            if not start <= wanted.start <= wanted.stop <= start + values.size:
                raise StateError(
                    f"{kind} of {name!r}: this rank needs elements {wanted.start} to {wanted.stop}, its state has "
                    f"{start} to {start + values.size}, since exchange, buckets or compressor have changed. Collect "
                    f"the states of all ranks, use hvd_compress.feedback.redistribute(states, {state['size']}), and "
                    "load what that returns"
                )
            needed[name] = values[wanted.start - start : wanted.stop - start].copy()
        return needed

    def take(self, values: Mapping[str, Array]) -> None:
        """Take over the values that `needed` returned; tensors without an entry begin anew."""
        for name, accumulator in self._of_accounts().items():
            accumulator.values = values.get(name)
        of_packs = self._of_packs()
        for accumulator in of_packs.values():
            accumulator.values = None
        for name, accumulator in of_packs.items():
            if name in values:
                if accumulator.values is None:
                    accumulator.values = np.zeros(self._packs[name].buffer.size, np.float32)
                accumulator.values[self._packs[name].place(name)] = values[name]
        self._dense = {}
        for name in values.keys() - self._accounts.keys() - self._packs.keys():
            self._dense[name] = Accumulator(self._adagrad, 1.0)
            self._dense[name].values = values[name]

    def _of_accounts(self) -> dict[str, Accumulator]:
        return {
            name: account.accumulator for name, account in self._accounts.items() if account.accumulator is not None
        }

    def _of_packs(self) -> dict[str, Accumulator]:
        """Map each packed tensor to the accumulator that it shares with others of its pack."""
        accumulators = {name: pack.accumulator for name, pack in self._packs.items()}
        return {name: accumulator for name, accumulator in accumulators.items() if accumulator is not None}

    def _known(self, name: str) -> str:
        return f"the tensor has {self._shapes[name]}" if name in self._shapes else "there is no such tensor"
