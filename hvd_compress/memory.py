"""Where gradients, residuals and payloads lie: `Memory` says what a kind of memory does, `HostMemory` is the first.

An exchange asks the memory of a bucket for arrays, for their addresses, and to run tables of payloads on them. What
another kind of memory needs is in one class, such as `DeviceMemory` of the edge for PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor, Key, tables
from hvd_compress.kernels import table as kernels
from hvd_compress.kernels.common import all_finite, norm

__all__ = ["HOST", "ITEMSIZE", "HostMemory", "Memory", "Payloads", "Slots", "Verdict", "aligned", "aligned_empty"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

# a cache line, and the strictest of what TensorFlow's builds ask of memory that is not its own
_ALIGNMENT = 64

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of the types of gradients, by their names."""


_KINDS = {np.dtype(kind): kind for kind in ("float16", "float32", "float64")}


def aligned_empty(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocate a flat array that begins on a 64-byte boundary and is not initialized."""
    nbytes = numel * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def aligned(received: Bytes) -> Bytes:
    """Return bytes that have come, copied if they do not begin on an 8-byte boundary, as payloads must."""
    if kernels.address_of(received) & 7 == 0:
        return received
    copy = aligned_empty(received.size, np.uint8)
    copy[...] = received
    return copy


Verdict = tuple[int, Numbers]
"""What a check of payloads has found: the first row that is not as expected, or -1; and the flags of the headers."""


class Payloads(Protocol):
    """A table of payloads that are made or read by kernels of one kind, see `exchange.table.Table`."""

    compressor: Compressor
    kernels: tables.Kernels | None
    slots: Numbers
    """The most bytes of each payload."""
    rows: Numbers
    """Filled for this call, with addresses of the memory that the call is made of."""
    prepared: dict[Any, Any]
    """What a memory keeps of this table from one step to the next."""


class Slots(ABC):
    """The place of the payloads of a message that is sent: kernels write there, a collective reads `buffer`."""

    buffer: Bytes
    """On the host."""
    address: int
    """Where kernels write."""

    @abstractmethod
    def clear(self) -> None:
        """Begin a step. On devices the memory is zeros afterwards."""

    @abstractmethod
    def fetch(self) -> None:
        """Begin to bring what kernels have written, so far, into `buffer`; never waits."""

    @abstractmethod
    def is_here(self) -> bool:
        """Tell whether it is there; never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is there."""


class Memory(ABC):
    """A kind of memory, and the kernels that work on it."""

    is_host: bool = False
    """Whether payloads are made where collectives read them."""

    # -- arrays --------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, numel: int, kind: str) -> Any:
        """Allocate a flat array of `numel` elements of a type, given by name, which is not initialized."""

    @abstractmethod
    def zeros(self, numel: int, kind: str) -> Any:
        """Allocate a flat array of zeros."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """Return where an array begins."""

    @abstractmethod
    def kind_of(self, array: Any) -> str:
        """Return the name of the type of an array's elements."""

    @abstractmethod
    def to_host(self, array: Any) -> Array:
        """Return the values of an array as a NumPy array; of host memory it is that array itself."""

    @abstractmethod
    def from_host(self, values: Array) -> Any:
        """Return an array with these values; in host memory it is `values` itself."""

    @abstractmethod
    def norm(self, array: Any) -> float:
        """Compute the Euclidean norm."""

    @abstractmethod
    def multiply(self, array: Any, factor: float) -> None:
        """Multiply an array by a number that is rounded to its type, in place."""

    @abstractmethod
    def clear(self, array: Any) -> None:
        """Make all elements zero."""

    @abstractmethod
    def copy_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copy flat arrays into others of the same sizes."""

    @abstractmethod
    def all_finite(self, array: Any) -> Callable[[], bool]:
        """Return what tells whether no element is NaN or infinite; it may wait."""

    # -- messages ------------------------------------------------------------------------------------------------

    @abstractmethod
    def slots(self, nbytes: int, places: Numbers | None = None) -> Slots:
        """Allocate the place of a message that is sent; `places` of payloads, where these have no fixed size."""

    @abstractmethod
    def receive(self, received: Bytes, places: Numbers, nbytes: int, kept: dict[str, Any]) -> Numbers:
        """Bring a message that has come to where kernels read it; returns the addresses of its payloads there.

        Args:
            received: on the host, from an 8-byte boundary on.
            places: addresses of the payloads in it.
            nbytes: the most that any message has.
            kept: for the memory that is used, which stays the same.
        """

    # -- tables --------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, payloads: Payloads, kind: str, key_of: Callable[[int], Key]) -> None:
        """Encode the rows of a table, of gradients of this type; see `tables.encode`."""

    @abstractmethod
    def check(self, payloads: Payloads, kind: str) -> Verdict | Callable[[], Verdict]:
        """Check payloads that have come; returns the verdict, or what waits for it and tells it.

        Where the verdict comes later, `decode` skips payloads that are bad.
        """

    @abstractmethod
    def decode(self, payloads: Payloads, kind: str, scale: float) -> int:
        """Decode payloads that `check` has passed; returns the number of a row whose body is damaged, or -1."""

    @abstractmethod
    def take_back(self, payloads: Payloads, kind: str) -> None:
        """Make residuals what they were before `encode`; see `tables.take_back`."""


class _HostSlots(Slots):
    def __init__(self, nbytes: int) -> None:
        self.buffer = aligned_empty(nbytes, np.uint8)
        self.address = int(kernels.address_of(self.buffer))

    def clear(self) -> None:
        """Leave it as it is: what is not written is zeroed when the message is complete."""

    def fetch(self) -> None:
        """Do nothing: it is there."""

    def is_here(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing."""


class HostMemory(Memory):
    """Memory of the host: NumPy arrays, and kernels of Numba.

    Example:
        >>> from hvd_compress.memory import HOST
        >>> HOST.zeros(3, "float32")
        array([0., 0., 0.], dtype=float32)
    """

    is_host = True

    def empty(self, numel: int, kind: str) -> Any:
        return aligned_empty(numel, kind)

    def zeros(self, numel: int, kind: str) -> Any:
        new = aligned_empty(numel, kind)
        new[...] = 0
        return new

    address = staticmethod(kernels.address_of)

    def kind_of(self, array: Any) -> str:
        return _KINDS[array.dtype]

    def to_host(self, array: Any) -> Array:
        values: Array = array
        return values

    def from_host(self, values: Array) -> Any:
        return values

    def norm(self, array: Any) -> float:
        return float(norm(array))

    def multiply(self, array: Any, factor: float) -> None:
        array *= array.dtype.type(factor)

    def clear(self, array: Any) -> None:
        array[...] = 0

    def copy_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source

    def all_finite(self, array: Any) -> Callable[[], bool]:
        is_finite = bool(all_finite(array))
        return lambda: is_finite

    def slots(self, nbytes: int, places: Numbers | None = None) -> Slots:
        return _HostSlots(nbytes)

    def receive(self, received: Bytes, places: Numbers, nbytes: int, kept: dict[str, Any]) -> Numbers:
        return places

    def encode(self, payloads: Payloads, kind: str, key_of: Callable[[int], Key]) -> None:
        tables.encode(payloads.compressor, payloads.kernels, payloads.rows, tables.LIKE[np.dtype(kind)], key_of)

    def check(self, payloads: Payloads, kind: str) -> Verdict:
        return tables.check(payloads.compressor, payloads.rows), payloads.rows[:, kernels.FLAGS]

    def decode(self, payloads: Payloads, kind: str, scale: float) -> int:
        return tables.decode(payloads.compressor, payloads.kernels, payloads.rows, tables.LIKE[np.dtype(kind)], scale)

    def take_back(self, payloads: Payloads, kind: str) -> None:
        tables.take_back(payloads.compressor, payloads.kernels, payloads.rows, tables.LIKE[np.dtype(kind)])


HOST = HostMemory()
