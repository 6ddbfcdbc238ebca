"""Keep residuals in 8 bits from one step to the next: a quarter of the memory, for rounding them in each step.

Source: Xie et al., LoCo: Low-Bit Communication Adaptor for Large-scale Model Training (arXiv 2407.04480, 2024), where
errors are kept in 8 bits, too. Differences: they are floats, not integers, with an exponent for each block; rounding is
random, so that what is small against its block is not lost for ever; there is no average over steps, and no reset.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key
from hvd_compress.exchange.account import Account
from hvd_compress.exchange.plan import Plan
from hvd_compress.kernels import narrow as kernels
from hvd_compress.memory import aligned_empty

__all__ = ["NarrowAccount", "account_of"]

Array = npt.NDArray[Any]

_ALIGNED = 64
_SENDER, _OWNER = 2, 3  # hops of keys, beside those of payloads


class _Narrow(NamedTuple):
    """A residual in 8 bits.

    Args:
        exponents: of the largest value of each block.
        codes: sign, exponent and mantissa of each element.
        dtype: of the values.
    """

    exponents: npt.NDArray[np.int16]
    codes: npt.NDArray[np.uint8]
    dtype: np.dtype[Any]

    @classmethod
    def empty(cls, numel: int, dtype: np.dtype[Any]) -> _Narrow:
        blocks = -(-numel // kernels.BLOCK)
        return cls(np.empty(blocks, np.int16), aligned_empty(numel, np.uint8), dtype)

    def take(self, values: Array, key: Key) -> None:
        """Take over values, rounded."""
        kernels.pack(values, kernels.least_exponent(self.dtype), *key.words(), self.exponents, self.codes)

    def write(self, out: Array) -> Array:
        """Write the values, and return them."""
        kernels.unpack(self.exponents, self.codes, out)
        return out


class _Room(threading.local):
    """Memory of a thread for the residuals of one table, while they are floats."""

    def __init__(self) -> None:
        self._bytes = aligned_empty(0, np.uint8)

    def cut(self, sizes: list[int], dtype: np.dtype[Any]) -> list[Array]:
        """Return arrays of these sizes, which are valid until the next call on this thread."""
        places, end = [], 0
        for size in sizes:
            places.append(slice(end, end + size * dtype.itemsize))
            end += -(-size * dtype.itemsize // _ALIGNED) * _ALIGNED
        if self._bytes.size < end:
            self._bytes = aligned_empty(end, np.uint8)
        return [self._bytes[place].view(dtype) for place in places]


ROOM = _Room()


class NarrowAccount(Account):
    """An `Account` whose residuals take 8 bits for each element between steps.

    While a payload is made, or taken back, they are floats in memory of the thread: from `open` to `rest`. At all other
    times `residual` and `owner_residual` are new arrays, and what is set is rounded.
    """

    rests = True
    _narrow: _Narrow | None = None
    _owner_narrow: _Narrow | None = None

    @property
    def residual(self) -> Any:
        """What this rank owes of the elements in `shard`, or None."""
        return None if self._narrow is None else _floats(self._narrow)

    @residual.setter
    def residual(self, values: Any) -> None:
        self._narrow = None if values is None else self._rounded(self._narrow, values, _SENDER)

    @property
    def owner_residual(self) -> Any:
        """What it owes of the elements in `owned`, or None."""
        return None if self._owner_narrow is None else _floats(self._owner_narrow)

    @owner_residual.setter
    def owner_residual(self, values: Any) -> None:
        self._owner_narrow = None if values is None else self._rounded(self._owner_narrow, values, _OWNER)

    def numel_of(self, of_owner: bool) -> int:
        """Return the number of elements that a residual has."""
        part = (self.owned or slice(0, 0)) if of_owner else self.shard
        return part.stop - part.start

    def open(self, of_owner: bool, out: Array) -> None:
        """Write a residual to an array of its size, where it is to be renewed; zeros if there is none."""
        narrow = self._owner_narrow if of_owner else self._narrow
        if narrow is None:
            out[...] = 0
        else:
            narrow.write(out)

    def rest(self, of_owner: bool, values: Array) -> None:
        """Keep what has become of an array that was opened."""
        if of_owner:
            self.owner_residual = values
        else:
            self.residual = values

    def _rounded(self, narrow: _Narrow | None, values: Array, hop: int) -> _Narrow:
        if narrow is None or narrow.codes.size != values.size or narrow.dtype != values.dtype:
            narrow = _Narrow.empty(values.size, values.dtype)
        narrow.take(values, self.key_of(hop, 0))
        return narrow


def _floats(narrow: _Narrow) -> Array:
    return narrow.write(aligned_empty(narrow.codes.size, narrow.dtype))


def account_of(name: str, plan: Plan, compressor: Compressor, position: int, *arguments: Any, **others: Any) -> Account:
    """Make the account of a tensor: a `NarrowAccount` where the compressor has residuals of 8 bits.

    The arguments are those of `Account`.
    """
    kind = NarrowAccount if compressor.has_narrow_residuals else Account
    return kind(name, plan, compressor, position, *arguments, **others)
