"""Run N ranks in one process and one thread: the stages of a cluster, with collectives on lists of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor
from hvd_compress.compressors.base import as_flat_floats
from hvd_compress.exchange import (
    Account,
    Accumulator,
    AdaGrad,
    Bucket,
    Dense,
    Exchange,
    Hosts,
    Parcel,
    account_of,
    bucket_of,
    checked,
    checked_exchange,
    exchange_with,
    fitted,
    make_plan,
    plan_together,
    suited,
)
from hvd_compress.policy import meant, refuse_class
from hvd_compress.thread_ranks import delivered

__all__ = ["Loopback"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Loopback:
    """Simulated ranks that average or sum arrays through a compressor, residuals included.

    Args:
        ranks: how many.
        compressor: of every rank, or its name.
        exchange: "auto", "two_phase", "allgather", "hierarchical", or an `Exchange`. Where "auto" would send an array
            uncompressed, since its payload saves nothing, "two_phase" compresses it all the same.
        op: "average" or "sum".
        ranks_per_host: for exchange="hierarchical"; ranks are counted host by host.
        adagrad: makes the results AdaGrad's updates; "auto" is then "two_phase".

    Raises:
        TypeError: `compressor` is not a single compressor.
        ValueError: an argument out of its range.
        UnsupportedError: `adagrad` with "allgather", `PowerSGD` or `SignSGD`.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(4, OneBit())
        >>> results = ranks.allreduce([np.full(8, rank, np.float32) for rank in range(4)], name="w")
        >>> results[0]
        array([1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5], dtype=float32)
    """

    def __init__(
        self,
        ranks: int,
        compressor: Compressor | str,
        exchange: str | Exchange = "auto",
        op: str = "average",
        ranks_per_host: int = 1,
        adagrad: AdaGrad | None = None,
    ) -> None:
        refuse_class("compressor", compressor)
        compressor = meant(compressor)
        if not isinstance(compressor, Compressor):
            raise TypeError(
                f"Loopback(compressor={compressor!r}): give one compressor for all tensors, such as OneBit()"
            )
        if ranks < 1:
            raise ValueError(f"Loopback(ranks={ranks!r}): must be at least 1")
        if op not in ("average", "sum"):
            raise ValueError(f'Loopback(op={op!r}): must be "average" or "sum"')
        if ranks_per_host < 1 or ranks % ranks_per_host:
            raise ValueError(f"Loopback(ranks_per_host={ranks_per_host!r}): must divide the {ranks} ranks")
        self.ranks = ranks
        self._exchange = suited(exchange_with(adagrad, checked_exchange(exchange), [compressor]), [compressor])
        hosts = Hosts.of_names([rank // ranks_per_host for rank in range(ranks)])
        self._hosts = hosts if self._exchange.uses_hosts else None
        self.compressor = checked(compressor) if self._exchange.takes_all else compressor
        self.bytes_sent = [0] * ranks
        self._adagrad = adagrad
        self._scale = 1.0 / ranks if op == "average" else 1.0
        self._accounts: dict[str, list[Account]] = {}
        self._kinds: dict[str, Compressor] = {}
        """What tensors are sent as, which their type may decide."""
        self._buckets: dict[tuple[str, ...], list[Bucket]] = {}

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
        return [results[name] for results in self.grouped_allreduce([{name: array} for array in arrays])]

    def grouped_allreduce(self, arrays: Sequence[Mapping[str, npt.ArrayLike]]) -> list[dict[str, Array]]:
        """Exchange several tensors together, as a bucket of an optimizer does; see `allreduce`.

        Args:
            arrays: {name: array} of each rank, with the same names in the same order.

        Returns:
            {name: array} of each rank.

        Raises:
            ValueError: as `allreduce`.
        """
        grads = [{name: np.asarray(array) for name, array in of_rank.items()} for of_rank in arrays]
        self._check(grads)
        if not grads[0]:
            return [{} for _ in grads]
        flat = [{name: as_flat_floats(grad) for name, grad in of_rank.items()} for of_rank in grads]
        buckets = self._buckets_of(grads[0])
        try:
            sums = self._exchanged(buckets, flat)
        except BaseException:
            for bucket in buckets:
                bucket.abandon()
            raise
        # every tensor was encoded, so every one has a sum; the buffers are ours, and used again
        return [
            {name: np.array(of_rank[name]).reshape(grad.shape) for name, grad in grads[0].items()} for of_rank in sums
        ]

    def _exchanged(self, buckets: Sequence[Bucket], flat: Sequence[Mapping[str, Array]]) -> list[dict[str, Any]]:
        """What each rank decodes, in memory of its bucket."""
        for bucket, of_rank in zip(buckets, flat, strict=True):
            for name, grad in of_rank.items():
                bucket.give(name, grad)
        # parcel -> collective -> advance -> collective -> ... -> arrive
        parcels = [bucket.parcel() for bucket in buckets]
        *earlier, last = buckets[0].collectives
        for collective in earlier:
            received = self._run(collective, parcels)
            parcels = [b.advance(collective, bytes_) for b, bytes_ in zip(buckets, received, strict=True)]
        received = self._run(last, parcels, buckets[0].root)

        finite = [bucket.arrive(bytes_) for bucket, bytes_ in zip(buckets, received, strict=True)]
        return [bucket.finish(keep=all(finite), scale=self._scale) for bucket in buckets]

    def residual(self, name: str, rank: int) -> Array:
        """Return a flat copy of a rank's residual of a tensor."""
        value = self._accounts[name][rank].residual
        return np.zeros(0, np.float32) if value is None else value.copy()

    def owner_residual(self, name: str, rank: int) -> Array:
        """Return a flat copy of a rank's residual for the sums of the chunk that it owns; empty for `allgather`."""
        value = self._accounts[name][rank].owner_residual
        return np.zeros(0, np.float32) if value is None else value.copy()

    def pending(self, name: str, rank: int) -> Array:
        """Return a flat copy of a rank's residual for messages inside its host, of all elements; empty if there is
        none.
        """
        value = self._accounts[name][rank].pending
        return np.zeros(0, np.float32) if value is None else value.copy()

    def accumulator(self, name: str, rank: int) -> Array:
        """Return a flat copy of AdaGrad's sums of squares of the chunk that a rank owns."""
        of_rank = self._accounts[name][rank].accumulator
        return np.zeros(0, np.float32) if of_rank is None or of_rank.values is None else of_rank.values.copy()

    def bounds(self, name: str) -> tuple[int, ...]:
        """Return the element offsets of the chunks of a tensor."""
        return self._accounts[name][0].plan.bounds

    def _accumulator(self) -> Accumulator | None:
        return None if self._adagrad is None else Accumulator(self._adagrad, self._scale)

    def _check(self, grads: list[dict[str, Array]]) -> None:
        if len(grads) != self.ranks:
            raise ValueError(f"{len(grads)} arrays for {self.ranks} ranks; give one for each")
        for rank, of_rank in enumerate(grads):
            if list(of_rank) != list(grads[0]):
                raise ValueError(f"rank {rank} has tensors {list(of_rank)}, rank 0 has {list(grads[0])}")
            for name, grad in of_rank.items():
                first = grads[0][name]
                if grad.shape != first.shape or grad.dtype != first.dtype:
                    raise ValueError(
                        f"array of rank {rank} is {grad.dtype}{grad.shape}, that of rank 0 {first.dtype}{first.shape}"
                    )
        for name, grad in grads[0].items():
            known = self._accounts.get(name)
            if known and known[0].plan.shape != grad.shape:
                raise ValueError(f"{name!r} had shape {known[0].plan.shape} before, now {grad.shape}; use another name")
            if known and (before := self._kinds[name]) != fitted(self.compressor, grad.dtype.name):
                raise ValueError(f"{name!r} was sent as {before!r} before, which rounds {grad.dtype}; use another name")

    def _buckets_of(self, grads: Mapping[str, Array]) -> list[Bucket]:
        names = tuple(grads)
        if names not in self._buckets:
            if known := [name for name in names if name in self._accounts]:
                raise ValueError(f"{known[0]!r} went with other tensors before; use another name")
            exchange = self._exchange.of_bucket(len(self._buckets), self.ranks)
            if len(names) == 1:
                exchange = make_plan(exchange, self.compressor, grads[names[0]].shape, self.ranks).exchange
            if isinstance(exchange, Dense):
                exchange = self._exchange.with_owners()
            together = {name: (grad.shape, fitted(self.compressor, grad.dtype.name)) for name, grad in grads.items()}
            plans = plan_together(exchange, together, self.ranks)
            self._kinds.update({name: kind for name, (_, kind) in together.items()})
            for name, plan in plans.items():
                self._accounts[name] = [
                    account_of(name, plan, self.compressor, rank, self._hosts, accumulator=self._accumulator())
                    for rank in range(self.ranks)
                ]
            self._buckets[names] = [
                bucket_of({name: self._accounts[name][rank] for name in names}) for rank in range(self.ranks)
            ]
        return self._buckets[names]

    def _run(self, collective: str, parcels: list[Parcel], root: int | None = None) -> list[Bytes]:
        """Run a collective; returns what each rank receives."""
        for rank, parcel in enumerate(parcels):
            if collective == "allgather" or (collective == "broadcast" and rank == root):
                self.bytes_sent[rank] += (self.ranks - 1) * parcel.buffer.size
            elif collective != "broadcast":
                sizes = parcel.sizes or (parcel.buffer.size // self.ranks,) * self.ranks
                self.bytes_sent[rank] += sum(sizes) - sizes[rank]
        buffers, sizes_of_all = [parcel.buffer for parcel in parcels], [parcel.sizes for parcel in parcels]
        return delivered(collective, buffers, sizes_of_all, root or 0)
