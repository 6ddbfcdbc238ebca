"""Optimizers that average parameters, when ranks of an elastic run come and go.

Ranks train on their own between averagings, so each that stays has moved elsewhere. They make their parameters the mean
of those that stay, and all go on from there with what rank 0 knows of what all had agreed on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from hvd_compress._torch.parameters import Buffers, Parameters
from hvd_compress.engine import Carried, Lost, Seen
from hvd_compress.errors import UnsupportedError
from hvd_compress.tensors import averaged
from hvd_compress.torch._ranks import TorchRanks
from hvd_compress.torch._state import values_of_root

__all__ = ["Averaging", "CarriedAveraging", "refuse_before_sync"]

Array = np.ndarray[Any, Any]


class Averaging(ABC):
    """What the state of an elastic run does with an optimizer that averages parameters; it has this as `_averaging`."""

    kind: ClassVar[str]
    """What the user calls the optimizer."""
    parameters: Parameters
    buffers: Buffers
    """To be averaged with them."""
    moves_frozen: ClassVar[bool] = False
    """Whether ranks may differ in parameters that take no gradients any more."""
    has_met = False
    """Whether it was made for the ranks that there are."""
    lost: Lost | None = None

    @abstractmethod
    def save(self) -> Any:
        """Wait for what is under way, and return what `restore` takes."""

    @abstractmethod
    def restore(self, saved: Any) -> None:
        """Go back to what `save` returned, without a wait for what is under way; None if it was never called."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many were made, if all ranks make equally many; else 0."""

    @abstractmethod
    def owed(self) -> dict[str, Array]:
        """What this rank has not told the others, by names; in units of the sum over ranks, after `save`."""

    @abstractmethod
    def land(self, state: Any) -> None:
        """Let what is under way arrive, with nobody's help; `state` is that of the optimizer."""

    def pay(self, arrays: Sequence[Array], count: int) -> None:  # noqa: B027, most go on owing it
        """Add what is owed to flat arrays of the parameters, so that their mean over `count` ranks has it."""

    @abstractmethod
    def agreed(self) -> Any:
        """What is the same on all ranks: plain values, tensors and arrays."""

    @abstractmethod
    def begin_again(self, label: str, agreed: Any, is_kept: bool) -> None:
        """Begin among the ranks that there are, which all have equal parameters; a collective call.

        Args:
            label: of collectives.
            agreed: of rank 0; None at the beginning of the run.
            is_kept: whether what this rank knows and owes is of the same commit.
        """

    def stats(self) -> dict[str, Any]:
        """What was lost with ranks that were lost, for the optimizer's statistics."""
        return {} if self.lost is None else {"lost_ranks": self.lost.ranks, "lost_norm": self.lost.norm}


def refuse_before_sync(averaging: Averaging | None) -> None:
    """Raise UnsupportedError if no state of an elastic run has synced an optimizer; None is in no elastic run."""
    if averaging is not None and not averaging.has_met:
        raise UnsupportedError(
            f"{averaging.kind} in an elastic run, and no hvd.elastic.TorchState has synced this optimizer: it is made "
            "there for the ranks that there are. Give the wrapped optimizer to "
            "hvd.elastic.TorchState(model, optimizer) of hvd_compress.torch, and train inside of a function that is "
            "decorated with hvd.elastic.run"
        )


class CarriedAveraging(Carried):
    """Of an optimizer that averages parameters.

    Args:
        optimizer: it has an `Averaging`.
        label: see `Carried`.
    """

    def __init__(self, optimizer: Any, label: str) -> None:
        super().__init__(label, TorchRanks)
        self._optimizer = optimizer
        self._averaging: Averaging = optimizer._averaging
        self._saved: Any = None
        self._kept: Any = None
        """Of `share`, for the `save` after it: a copy as large as the parameters."""
        self._keeps = False
        self._seen: Sequence[Seen] = ()

    def save(self) -> None:
        self._saved = self._averaging.save() if self._kept is None else self._kept
        self._kept = None

    def restore(self) -> None:
        self._kept = None
        self._averaging.restore(self._saved)

    def _state(self) -> dict[str, Any]:
        owed = {name: {"shape": [x.size], "values": x} for name, x in self._averaging.owed().items()}
        return {"steps": self._averaging.steps, "residuals": owed, "owner_residuals": {}}

    def share(self) -> Callable[[], None]:
        # what is under way has arrived then
        self._kept = self._averaging.save()
        return self._tell([self._state()])

    def gather(self, commits: int) -> None:
        """Make parameters and buffers the mean of the ranks that stay; a collective call.

        Raises:
            MismatchError: ranks have wrapped other parameters; raised on all of them.
        """
        averaging, ranks = self._averaging, TorchRanks()
        ranks.agree({"optimizer": averaging.kind, "parameters": [list(t) for t in averaging.parameters.tensors]})
        self._keeps, self._seen = self._meet(commits, [self._state()])
        if self._keeps:
            averaging.land(self._optimizer.state)
        with torch.no_grad():
            self._average(ranks)

    def _average(self, ranks: TorchRanks) -> None:
        parameters, buffers = self._averaging.parameters, self._averaging.buffers
        arrays = parameters.arrays()
        everything = [*arrays, *buffers.arrays().values()]
        # a rank that has diverged would spoil the others
        counts = self._keeps and all(np.isfinite(x).all() for x in everything)
        count = int(ranks.run("allgather", f"{self._label}.counting", np.array([counts], np.int64)).sum())
        if count == 0:
            return
        if counts:
            self._averaging.pay(arrays, count)
        if ranks.size == 1:
            parameters.write(arrays)
            return
        mine = everything if counts else [np.zeros_like(x) for x in everything]

        def mean(together: Array) -> Array:
            total = ranks.run("allreduce", f"{self._label}.mean.{together.dtype}", together)
            return total / together.dtype.type(count)

        means = averaged(mine, mean)
        # what is frozen is equal already, but for rounding
        frozen = [] if self._averaging.moves_frozen else parameters.frozen()
        names = [tensor.name for tensor in parameters.tensors] + [""] * (len(everything) - len(arrays))
        for name, x, found in zip(names, everything, means, strict=True):
            if name not in frozen:
                x[...] = found.reshape(x.shape)
        parameters.write(arrays)
        buffers.take()

    def sync(self, commits: int) -> None:
        """Begin among the ranks that there are, with what rank 0 knows; a collective call.

        Raises:
            MismatchError: ranks have wrapped their optimizers differently; raised on all of them.
        """
        averaging = self._averaging
        self._from_root(None)
        self._count(self._seen)
        is_root = TorchRanks().position == 0
        agreed = values_of_root(averaging.agreed() if is_root and commits >= 0 else None, f"{self._label}.agreed")
        averaging.begin_again(self._label, agreed, self._keeps)
        averaging.has_met, averaging.lost = True, self.lost
