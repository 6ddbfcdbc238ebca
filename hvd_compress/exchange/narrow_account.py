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
_MOST_KEPT = 2**26  # bytes that a thread keeps for the next table
_HOPS = {False: 2, True: 3}  # of keys, beside those of payloads: of a sender, and of an owner


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
    def of(cls, values: Array, key: Key) -> _Narrow:
        """Round values."""
        exponents = np.empty(-(-values.size // kernels.BLOCK), np.int16)
        codes = aligned_empty(values.size, np.uint8)
        kernels.pack(values, *kernels.exponents_of(values.dtype), *key.words(), exponents, codes)
        return cls(exponents, codes, values.dtype)

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

    def rest(self) -> None:
        """Give back what is more than a usual table needs."""
        if self._bytes.size > _MOST_KEPT:
            self._bytes = aligned_empty(0, np.uint8)


ROOM = _Room()


class NarrowAccount(Account):
    """An `Account` whose residuals take 8 bits for each element between steps.

    While a payload is made, or taken back, they are floats in memory of the thread: from `open` to `rest`. At all other
    times `residual` and `owner_residual` are new arrays, and what is set is rounded.

    A step that is taken back has to bring back what was there before: what has been rounded with a large gradient in it
    is too coarse for that. So that is kept until the step ends.
    """

    rests = True

    def __init__(self, *arguments: Any, **others: Any) -> None:
        self._now: dict[bool, _Narrow] = {}
        """What is owed, as a sender (False) and as an owner (True)."""
        self._before: dict[bool, _Narrow | None] = {}
        """The same before this step, of what has changed in it."""
        super().__init__(*arguments, **others)

    @property
    def residual(self) -> Any:
        """What this rank owes of the elements in `shard`, or None."""
        return self._floats(False)

    @residual.setter
    def residual(self, values: Any) -> None:
        self._keep(False, values)

    @property
    def owner_residual(self) -> Any:
        """What it owes of the elements in `owned`, or None."""
        return self._floats(True)

    @owner_residual.setter
    def owner_residual(self, values: Any) -> None:
        self._keep(True, values)

    def _floats(self, of_owner: bool) -> Array | None:
        narrow = self._now.get(of_owner)
        return None if narrow is None else narrow.write(aligned_empty(narrow.codes.size, narrow.dtype))

    def _keep(self, of_owner: bool, values: Array | None) -> None:
        self._set(of_owner, None if values is None else _Narrow.of(values, self.key_of(_HOPS[of_owner], 0)))

    def _set(self, of_owner: bool, narrow: _Narrow | None) -> None:
        if narrow is None:
            self._now.pop(of_owner, None)
        else:
            self._now[of_owner] = narrow

    def numel_of(self, of_owner: bool) -> int:
        """Return the number of elements that a residual has."""
        part = (self.owned or slice(0, 0)) if of_owner else self.shard
        return part.stop - part.start

    def open(self, of_owner: bool, out: Array) -> None:
        """Write a residual to an array of its size, where it is to be renewed; zeros if there is none."""
        if of_owner in self._now:
            self._now[of_owner].write(out)
        else:
            out[...] = 0

    def rest(self, of_owner: bool, values: Array) -> None:
        """Round what has become of an array that was opened."""
        self._before.setdefault(of_owner, self._now.get(of_owner))
        self._keep(of_owner, values)

    def go_back(self, of_owner: bool) -> None:
        """Owe what was owed before this step."""
        if of_owner in self._before:
            self._set(of_owner, self._before[of_owner])

    def end_step(self, of_owner: bool) -> None:
        """Note that what has been made is not to be taken back any more."""
        self._before.pop(of_owner, None)


def account_of(name: str, plan: Plan, compressor: Compressor, position: int, *arguments: Any, **others: Any) -> Account:
    """Make the account of a tensor: a `NarrowAccount` where the compressor has residuals of 8 bits.

    The arguments are those of `Account`.
    """
    kind = NarrowAccount if compressor.has_narrow_residuals else Account
    return kind(name, plan, compressor, position, *arguments, **others)
