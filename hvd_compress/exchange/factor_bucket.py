"""Take tensors of `PowerSGD` that share an exchange through its stages on one rank.

Each of the two sums is an exchange of its own, of one flat array without compression: so payloads are checked, sums
are made in the order of the ranks, and a value that is not finite is told to all, as everywhere. Between them lies an
alltoall in which everybody sends the same to all, since each collective of a step has its own name.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, PowerSGD
from hvd_compress.compressors.tables import array_at
from hvd_compress.errors import MismatchError
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.bucket import Bucket
from hvd_compress.exchange.factors import SumOfFactors
from hvd_compress.exchange.inside import Parcel
from hvd_compress.exchange.named import plan_together
from hvd_compress.exchange.outbox import NARROW, computed_in
from hvd_compress.exchange.pack import Pack
from hvd_compress.exchange.raw import CheckedRaw, Raw
from hvd_compress.exchange.tally import BucketTally
from hvd_compress.kernels import common
from hvd_compress.kernels import lowrank as kernels
from hvd_compress.memory import HOST, aligned_empty

__all__ = ["FactorBucket", "bucket_of"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_LARGE = 2**18  # elements from which on a tensor's P is computed as soon as its gradient is there
_CHECKS = 2  # numbers beside the factors, by which ranks find out whether they began with the same Q


class _Matrix:
    """One tensor: its place in the flat arrays that are summed, and what it sends in this step.

    Args:
        account: of the tensor.
        left_at: where its P begins.
        right_at: where its Q begins.
    """

    def __init__(self, account: Account, left_at: int, right_at: int) -> None:
        self.account = account
        self.compressor = cast(PowerSGD, account.plan.chunk_compressors[0])
        self.n, self.m, self.r = self.compressor.matrix_of(account.plan.shape)
        self.left = slice(left_at, left_at + self.r * self.n)
        self.right = slice(right_at, right_at + self.r * self.m)

    def begin(self) -> Floats:
        """Return the Q (r, m) that this step begins with."""
        account, compressor = self.account, self.compressor
        if account.factor is None or not compressor.warm_start:
            q = compressor.first_q(account.plan.shape, account.name, account.step)
            account.factor = aligned_empty(q.size, np.float32).reshape(q.shape)
            account.factor[...] = q
        return account.factor

    def renew(self, q: Floats) -> None:
        """Keep the sum of Q (r, m) for the next step."""
        if self.account.factor is not None and self.compressor.warm_start:
            has_lost = not q.any(axis=1).all()
            step = self.account.step + 1
            fresh = self.compressor.first_q(self.account.plan.shape, self.account.name, step) if has_lost else q
            kernels.normalize(q, fresh, self.account.factor)


class FactorBucket(Bucket):
    """Runs the stages of tensors whose factors are summed; what it does is what `Bucket` says.

    Args:
        accounts: of the tensors by name, with plans that were made together; the same order on all ranks.
        pack: of small tensors, which are summed with all P.
    """

    def __init__(self, accounts: Mapping[str, Account], pack: Pack | None = None) -> None:
        self.accounts, self.pack = dict(accounts), pack
        self._all = [*self.accounts.values(), *([] if pack is None else [pack.account])]
        self.tensors = [*self.accounts, *([] if pack is None else pack.members)]
        self._numbers = {account.name: i for i, account in enumerate(self._all)}
        first = self._all[0]
        self.exchange, self.ranks, self.position = first.plan.exchange, first.plan.ranks, first.position
        self.memory, self.root = HOST, None
        self.collectives = first.plan.collectives
        self.tally = BucketTally(self._all)
        self._matrices: list[_Matrix] = []
        left, right = _CHECKS, 0
        for account in self.accounts.values():
            self._matrices.append(_Matrix(account, left, right))
            left, right = self._matrices[-1].left.stop, self._matrices[-1].right.stop
        self._large = {i for i, a in enumerate(self.accounts.values()) if a.plan.numel >= _LARGE}
        self._left: Floats = aligned_empty(left, np.float32)
        self._right: Floats = aligned_empty(right, np.float32)
        self._total: Floats = aligned_empty(right, np.float32)
        """The sums of all Q."""
        small = {} if pack is None else {"small": (pack.buffer, Raw())}
        self._first = self._summing({"P": (self._left, CheckedRaw()), **small})
        self._second = self._summing({"Q": (self._right, CheckedRaw())})
        self._forget()

    def _summing(self, arrays: Mapping[str, tuple[Array, Compressor]]) -> Bucket:
        """Make the exchange that sums flat arrays."""
        exchange: Any = self.exchange
        together = {f"{self.name}, {what}": ((a.size,), compressor) for what, (a, compressor) in arrays.items()}
        plans = plan_together(exchange.sums, together, self.ranks)
        return Bucket(
            {name: Account(name, plans[name], compressor, self.position) for name, (_, compressor) in together.items()}
        )

    def _forget(self) -> None:
        count = len(self._all)
        self._given: dict[int, Any] = {}
        self._moved: dict[int, Any] = {}
        self._skipped: set[int] = set()
        self._waiting: list[int] = []
        self._kinds: dict[int, str] = {}
        self._lost = np.zeros(count, bool)
        self._gradients_at, self._outs_at = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._bad: set[int] = set()
        """The tensors of this rank with a value that is not finite: their residuals are as before the step."""
        self._corrected: set[int] = set()
        """Those whose residuals have the gradient in them."""
        self._is_finite = True
        self._has_sums = False
        self._source: Bucket | None = None
        """Whose message is the next one."""
        self._to_all = False
        """Whether that is sent to everybody by an alltoall."""

    @property
    def answer_bytes(self) -> int:
        return self._second.answer_bytes

    def expected(self, collective: str) -> list[int] | None:
        if collective in ("alltoall", "scatter_right"):
            return (self._first if collective == "alltoall" else self._second).expected("alltoall")
        return (self._first if collective == "gather_left" else self._second).expected("allgather")

    # -- the first sum -------------------------------------------------------------------------------------------

    def _encode(self, numbers: Any) -> None:
        """Add gradients to residuals, and compute P of the sums; a small tensor is summed as it is."""
        begin = time.perf_counter()
        for i in numbers:
            if i < len(self._matrices):
                self._compute_left(i)
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin

    def _compute_left(self, number: int) -> None:
        matrix, kind = self._matrices[number], self._kinds.get(number, NARROW)
        residual = matrix.account.fit_residual(computed_in(kind))
        gradient = array_at(self._gradients_at[number], residual.size, kind)
        p = self._left[matrix.left].reshape(matrix.r, matrix.n)
        if common.correct(residual, gradient) != 0:
            common.take_back(residual, gradient)
            self._bad.add(number)
            p[...] = np.nan
            return
        self._corrected.add(number)
        with np.errstate(over="ignore", invalid="ignore"):
            _product(matrix.begin(), residual.reshape(matrix.n, matrix.m).T, p)

    def _encode_rest(self) -> None:
        self._encode(self._waiting)
        for i in self._skipped:
            self._left[self._matrices[i].left] = 0
        self._left[:_CHECKS] = self._check()
        self._source, self._to_all = self._first, not self._first.exchange.has_owners
        name = self.name
        self._first.give(f"{name}, P", self._left)
        if self.pack is not None:
            self._first.give(f"{name}, small", self.pack.buffer)

    def _is_complete(self) -> bool:
        if len(self._given) + len(self._skipped) < len(self._all):
            return False
        if not self._given:
            self._skipped = set()
            return False
        self._encode_rest()
        return True

    def _check(self) -> tuple[int, int]:
        """Return a checksum of all Q that this step begins with, and its square; sums of few ranks are exact."""
        crc = 0
        for i in sorted(self._corrected):
            crc = zlib.crc32(self._matrices[i].begin().tobytes(), crc)
        # a rank that sends nothing finite ends the step whatever this is
        mixed = crc % (255 if self.ranks <= 128 else 15)
        return mixed, mixed * mixed

    def _compare(self) -> None:
        """Find out from the sums of checksums whether all ranks began with the same Q.

        Raises:
            MismatchError: on all ranks.
        """
        if not self._is_finite:
            return
        total, squares = (int(number) for number in self._left[:_CHECKS])
        if self.ranks * squares != total * total:
            raise MismatchError(
                f"the ranks began this step with different factors of {self.name!r} and the tensors with it: all ranks "
                "must load states of the same step, or none"
            )

    # -- between -------------------------------------------------------------------------------------------------

    def is_loaded(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: all is on the host."""

    def parcel(self) -> Parcel:
        if self._source is None:
            raise RuntimeError(f"parcel() of {self.name!r}, of which nothing is to be sent")
        parcel = self._source.parcel()
        if not self._to_all:
            return parcel
        size = parcel.buffer.size
        return Parcel(np.tile(parcel.buffer, self.ranks), (size,) * self.ranks)

    def proceed(self, collective: str, received: Bytes) -> None:
        if collective == "gather_left":
            self._turn(received)
            return
        source = self._first if collective == "alltoall" else self._second
        source.proceed("alltoall", received)
        self._source, self._to_all = source, source is self._first

    def _turn(self, received: Bytes) -> None:
        """Make the second factors of the sums of the first ones."""
        self._is_finite = self._first.arrive(received)
        self._first.finish(keep=True, scale=1.0)
        if self.pack is not None:
            pack_is_finite = self.pack.arrive()
        self._compare()
        begin = time.perf_counter()
        for i, matrix in enumerate(self._matrices):
            q = self._right[matrix.right].reshape(matrix.r, matrix.m)
            p = self._left[matrix.left].reshape(matrix.r, matrix.n)
            if self._is_finite:
                kernels.orthonormalize(p)
            if i in self._corrected and self._is_finite:
                _product(p, matrix.account.residual.reshape(matrix.n, matrix.m), q)
            else:
                q[...] = 0 if self._is_finite else np.nan
        self._has_sums = True
        if self.pack is not None:
            self._is_finite = pack_is_finite() and self._is_finite
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin
        self._second.give(f"{self.name}, Q", self._right)
        self._second.move(f"{self.name}, Q", self._total)
        self._source, self._to_all = self._second, False

    # -- the end -------------------------------------------------------------------------------------------------

    def arrive(self, received: Bytes) -> bool:
        self._is_finite = self._second.arrive(received) and self._is_finite
        return self._is_finite

    def finish(self, keep: bool, scale: float) -> dict[str, Array | None]:
        if not self._has_sums:
            raise RuntimeError(f"finish() of {self.name!r} before arrive()")
        begin = time.perf_counter()
        # wherever it fails, nothing is final yet
        self._second.finish(keep=True, scale=1.0)
        if not keep:
            self._take_back()
        for i, matrix in enumerate(self._matrices):
            if i in self._given:
                self._rebuild(i, matrix, keep, scale)
        if self.pack is not None:
            self.pack.finish(keep, scale)
        self.tally.seconds["decode_seconds"] += time.perf_counter() - begin
        for account in self._all:
            account.step += 1
        self.tally.end_step(self._given)
        memory = {**self._given, **self._moved}
        results = {name: memory.get(self._numbers[name]) for name in self.accounts}
        skipped = {self._all[i].name for i in self._skipped}
        self._forget()
        return {name: result for name, result in results.items() if result is not None or name in skipped}

    def _rebuild(self, number: int, matrix: _Matrix, keep: bool, scale: float) -> None:
        """Write the result, and take what was sent out of the residual."""
        p = self._left[matrix.left].reshape(matrix.r, matrix.n)
        total = self._total[matrix.right].reshape(matrix.r, matrix.m)
        if keep:
            mine = self._right[matrix.right].reshape(matrix.r, matrix.m)
            kernels.leave_out(p, mine, matrix.account.residual)
            matrix.renew(total)
        out = array_at(self._outs_at[number], matrix.n * matrix.m, self._kinds.get(number, NARROW))
        kernels.rebuild(p, total, np.float32(scale), out)

    def abandon(self) -> None:
        self._take_back()
        self._first.abandon()
        self._second.abandon()
        if self.pack is not None:
            self.pack.abandon()
        self._forget()

    def _take_back(self) -> None:
        for i in self._corrected:
            # a gradient that was overwritten stays owed
            if not self._lost[i]:
                residual, kind = self._matrices[i].account.residual, self._kinds.get(i, NARROW)
                common.take_back(residual, array_at(self._gradients_at[i], residual.size, kind))
        self._corrected = set()

    def settle_counts(self) -> None:
        self.tally.settle()
        for bucket in (self._first, self._second):
            bucket.settle_counts()
            for account in bucket.accounts.values():
                self._divide(account)

    def _divide(self, summed: Account) -> None:
        """Let each tensor bear its share of what a sum has cost."""
        name, counters = self.name, summed.counters
        if summed.name == f"{name}, small" and self.pack is not None:
            shares = [(self.pack.account, 1.0)]
        else:
            sizes = [matrix.n if summed.name == f"{name}, P" else matrix.m for matrix in self._matrices]
            of_rank = [matrix.r * size for matrix, size in zip(self._matrices, sizes, strict=True)]
            shares = [(x.account, size / sum(of_rank)) for x, size in zip(self._matrices, of_rank, strict=True)]
        for account, share in shares:
            part = counters.scaled(share)
            part.steps, part.dense_bytes = 0, 0.0
            account.counters.add(part)
        summed.counters = type(counters)()


def _product(a: Floats, b: Array, out: Floats) -> None:
    """Write the product of two matrices, of which the second may be float64, to `out`, float32."""
    if b.dtype == np.float32:
        np.matmul(a, b, out=out)
    else:
        out[...] = a @ b


def bucket_of(accounts: Mapping[str, Account], pack: Pack | None = None) -> Bucket:
    """Make the bucket that runs the exchange of these tensors."""
    first = next(iter(accounts.values()))
    kind = FactorBucket if isinstance(first.plan.exchange, SumOfFactors) else Bucket
    return kind(accounts, pack)
