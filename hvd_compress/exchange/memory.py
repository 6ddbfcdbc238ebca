"""Allocate buffers that frameworks can take over without a copy, and tell kernels where residuals lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_compress.kernels.table import address_of

if TYPE_CHECKING:
    from hvd_compress.exchange.account import Account

__all__ = ["Addresses", "aligned", "aligned_empty"]

# a cache line, and the strictest of what TensorFlow's builds ask of memory that is not its own
_ALIGNMENT = 64


def aligned_empty(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocate a flat array that begins on a 64-byte boundary and is not initialized."""
    nbytes = numel * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def aligned(received: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return bytes that have come, copied if they do not begin on an 8-byte boundary, as payloads must."""
    if address_of(received) & 7 == 0:
        return received
    copy = aligned_empty(received.size, np.uint8)
    copy[...] = received
    return copy


class Addresses:
    """Tells where the residuals of tensors lie; looks again only where there is another array than in the last step.

    Args:
        accounts: of the tensors.
        of_owners: look at what ranks owe as owners of sums, and not as senders.
    """

    def __init__(self, accounts: Sequence[Account], of_owners: bool) -> None:
        self._accounts = accounts
        self._of_owners = of_owners
        self._keeps = [a.owner_keeps_residual if of_owners else a.keeps_residual for a in accounts]
        self._arrays: list[npt.NDArray[Any] | None] = [None] * len(accounts)
        self._at = np.zeros(len(accounts), np.int64)

    def of(self, numbers: Iterable[int], dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
        """Return an array of addresses, right for those of these tensors that keep a residual; makes new ones."""
        for i in numbers:
            if not self._keeps[i]:
                continue
            account = self._accounts[i]
            array = account.owner_residual if self._of_owners else account.residual
            if array is None or array.dtype != dtype or array is not self._arrays[i]:
                fitted = account.fit_owner_residual(dtype) if self._of_owners else account.fit_residual(dtype)
                self._arrays[i] = fitted
                self._at[i] = address_of(fitted)
        return self._at
