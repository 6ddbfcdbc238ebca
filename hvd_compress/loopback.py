"""N ranks in one process: the same stages as on a cluster, with collectives that are list operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key
from hvd_compress.compressors.base import as_flat_floats
from hvd_compress.exchange import Parcel, Transfer, make_plan

__all__ = ["Loopback"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Loopback:
    """Simulated ranks that average or sum arrays through a compressor, residuals included.

    Args:
        ranks: how many.
        compressor: of every rank.
        exchange: "auto", "two_phase" or "allgather". Where "auto" would go dense (the payload saves nothing) the
            arrays take the two-phase way all the same.
        op: "average" or "sum".

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(4, OneBit())
        >>> results = ranks.allreduce([np.full(8, rank, np.float32) for rank in range(4)], name="w")
        >>> results[0]
        array([1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5], dtype=float32)
    """

    def __init__(self, ranks: int, compressor: Compressor, exchange: str = "auto", op: str = "average") -> None:
        if ranks < 1:
            raise ValueError(f"Loopback(ranks={ranks!r}): must be at least 1")
        if op not in ("average", "sum"):
            raise ValueError(f'Loopback(op={op!r}): must be "average" or "sum"')
        self.ranks = ranks
        self.compressor = compressor
        self.bytes_sent = [0] * ranks
        self._exchange = exchange
        self._scale = 1.0 / ranks if op == "average" else 1.0
        self._transfers: dict[str, list[Transfer]] = {}
        self._residuals: dict[str, list[Array | None]] = {}

    def allreduce(self, arrays: Sequence[npt.ArrayLike], name: str = "tensor") -> list[Array]:
        """Exchange one array of each rank and return what each rank decodes.

        Args:
            arrays: one per rank, of equal shape and dtype (float16, bfloat16, float32 or float64).
            name: of the tensor; residuals are kept under it.

        Returns:
            One array per rank, bit-identical, float64 if the arrays are, else float32.

        Raises:
            ValueError: not one array per rank, or shapes differ, from each other or from the last call of that name.
        """
        grads = [np.asarray(a) for a in arrays]
        self._check(grads, name)
        flat = [as_flat_floats(g) for g in grads]
        transfers = self._transfers_of(name, grads[0].shape)
        residuals = self._residuals[name]
        for rank, x in enumerate(flat):
            if residuals[rank] is None and self.compressor.feedback:
                residuals[rank] = np.zeros_like(x)

        # encode -> alltoall -> reduce -> allgather, or encode -> allgather
        parcels = [t.encode(x, r) for t, x, r in zip(transfers, flat, residuals, strict=True)]
        if transfers[0].plan.exchange == "two_phase":
            received = self._alltoall(parcels)
            parcels = [t.reduce(bytes_) for t, bytes_ in zip(transfers, received, strict=True)]
        gathered = self._allgather(parcels)

        finite = True
        for t in transfers:
            finite = t.arrive(gathered) and finite
        results = []
        for rank, t in enumerate(transfers):
            out, residuals[rank] = t.finish(keep=finite, scale=self._scale)
            results.append(out.reshape(grads[0].shape))
        return results

    def residual(self, name: str, rank: int) -> Array:
        """Copy of a rank's residual of a tensor, flat."""
        value = self._residuals[name][rank]
        return np.zeros(0, np.float32) if value is None else value.copy()

    def owner_residual(self, name: str, rank: int) -> Array:
        """Copy of what a rank owes of the chunk that it owns, flat; empty for `allgather`."""
        value = self._transfers[name][rank].owner_residual
        return np.zeros(0, np.float32) if value is None else value.copy()

    def bounds(self, name: str) -> tuple[int, ...]:
        """Element offsets of the chunks of a tensor."""
        return self._transfers[name][0].plan.bounds

    def _check(self, grads: list[Array], name: str) -> None:
        if len(grads) != self.ranks:
            raise ValueError(f"{len(grads)} arrays for {self.ranks} ranks; give one for each")
        for rank, grad in enumerate(grads):
            if grad.shape != grads[0].shape or grad.dtype != grads[0].dtype:
                raise ValueError(
                    f"array of rank {rank} is {grad.dtype}{grad.shape}, that of rank 0 {grads[0].dtype}{grads[0].shape}"
                )
        known = self._transfers.get(name)
        if known and known[0].plan.shape != grads[0].shape:
            raise ValueError(f"{name!r} had shape {known[0].plan.shape} before, now {grads[0].shape}; use another name")

    def _transfers_of(self, name: str, shape: tuple[int, ...]) -> list[Transfer]:
        if name not in self._transfers:
            plan = make_plan(self._exchange, self.compressor, shape, self.ranks)
            if plan.exchange == "dense":
                plan = make_plan("two_phase", self.compressor, shape, self.ranks)
            seed = self.compressor.seed
            self._transfers[name] = [Transfer(plan, rank, Key(seed, name, rank=rank)) for rank in range(self.ranks)]
            self._residuals[name] = [None] * self.ranks
        return self._transfers[name]

    def _alltoall(self, parcels: list[Parcel]) -> list[Bytes]:
        parts = []
        for rank, parcel in enumerate(parcels):
            sizes = parcel.sizes or (parcel.buffer.size // self.ranks,) * self.ranks
            offsets = np.cumsum((0, *sizes))
            parts.append([parcel.buffer[a:b].copy() for a, b in pairwise(offsets)])
            self.bytes_sent[rank] += sum(sizes) - parcel.own
        return [np.concatenate([parts[sender][rank] for sender in range(self.ranks)]) for rank in range(self.ranks)]

    def _allgather(self, parcels: list[Parcel]) -> Bytes:
        for rank, parcel in enumerate(parcels):
            self.bytes_sent[rank] += (self.ranks - 1) * parcel.own
        return np.concatenate([parcel.buffer for parcel in parcels])
