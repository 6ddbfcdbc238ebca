"""The byte layout of a payload; beside this module, `kernels.table` alone knows headers, which it writes and checks.

A payload is a 40-byte header, the sizes of its dimensions unless it is flat (8 bytes each), and a body of sections,
each padded to 8 bytes. All numbers are little-endian. The header::

    offset  type    field
    0       char4   magic "hvdc"
    4       uint8   version of the layout
    5       uint8   codec number: of the compressor, or of its form whose body is losslessly coded
    6       uint8   flags: 1 = a value was not finite, there is no body; 2 = the source was float64;
                    4 = there was no gradient, there is no body; 8 = the checksum is that of devices
    7       uint8   number of dimensions
    8       uint64  number of elements
    16      uint64  bytes of the payload, header and padding included
    24      uint32  elements per group
    28      uint32  the codec's parameter
    32      uint32  number of entries in the body
    36      uint32  checksum of all other bytes
"""

from __future__ import annotations

import math
import struct
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import WireError
from hvd_compress.kernels.checksum import checksum, checksum_of_parts
from hvd_compress.kernels.table import ABSENT, CHECKSUM_WORD, FLOAT64, HEADER, NONFINITE, SUMMED, VERSION

__all__ = ["HEADER_BYTES", "VERSION", "Header", "Sections", "frames", "open_payload", "seal"]

HEADER_BYTES = HEADER
_ALL_FLAGS = NONFINITE | FLOAT64 | ABSENT | SUMMED

_MAGIC = b"hvdc"
_LAYOUT = struct.Struct("<4sBBBBQQIIII")
_CHECKSUM = struct.Struct("<I")
_FLAGS_AT = 6
_CHECKSUM_AT = 8 * CHECKSUM_WORD + 4  # the upper half of a word
_MOST_ELEMENTS = 2**40
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32  # of a NumPy array

Bytes = npt.NDArray[np.uint8]


class Header(NamedTuple):
    """What a payload says about itself, after its checks.

    Args:
        codec: number of the compressor, or of its losslessly coded form.
        nonfinite: a value was not finite, and there is no body.
        float64: the source was float64.
        absent: there was no gradient, and there is no body.
        shape: of the tensor.
        numel: elements of the tensor.
        nbytes: bytes of the payload with header and padding.
        group: elements that share reconstruction values.
        parameter: what the codec needs to know, from `Body`.
        entries: what the codec counts in a body, from `Body`.
        body_at: byte at which the body begins.
    """

    codec: int
    nonfinite: bool
    float64: bool
    absent: bool
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    group: int
    parameter: int
    entries: int
    body_at: int


def header_bytes(shape: tuple[int, ...]) -> int:
    """Count the bytes before the body of a payload of `shape`."""
    return HEADER_BYTES + (0 if len(shape) == 1 else 8 * len(shape))


def padded(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of 8."""
    return (nbytes + 7) & ~7


class Sections:
    """Hands out the sections of a body one after the other.

    Args:
        body: uint8, one-dimensional.

    Raises:
        WireError: a section is longer than what is left.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.wire import Sections
        >>> sections = Sections(np.arange(24, dtype=np.uint8))
        >>> # each section begins at a multiple of 8 bytes
        >>> sections.take(3, np.uint8), sections.take(1, "<u2")
        (array([0, 1, 2], dtype=uint8), array([2312], dtype=uint16))
    """

    def __init__(self, body: Bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return the next `count` items as a view."""
        dtype = np.dtype(dtype)
        begin = self._at
        end = begin + count * dtype.itemsize
        if end > self._body.size:
            raise WireError(f"payload too short: its header asks for {end} bytes of body, {self._body.size} are there")
        self._at = padded(end)
        return self._body[begin:end].view(dtype)

    def blank(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Take items for writing, and zero the padding, so that equal content means equal bytes."""
        begin = self._at
        view = self.take(count, dtype)
        if (nbytes := view.nbytes) & 7:
            self._body[begin + nbytes : self._at] = 0
        return view

    def rest(self) -> npt.NDArray[np.uint64]:
        """Return all that is left, as words."""
        view = self._body[self._at :].view(np.uint64)
        self._at = self._body.size
        return view

    @property
    def whole(self) -> Bytes:
        """All of the body, whatever was handed out."""
        return self._body

    @property
    def used(self) -> int:
        """The bytes handed out so far, padding included."""
        return self._at

    def finish(self) -> None:
        """Raise WireError if bytes are left that no section accounts for."""
        if self._at != self._body.size:
            raise WireError(f"payload too long: its header accounts for {self._at} of {self._body.size} bytes of body")


def seal(
    payload: Bytes,
    *,
    codec: int,
    shape: tuple[int, ...],
    group: int,
    parameter: int,
    entries: int,
    float64: bool,
    nonfinite: bool,
    absent: bool = False,
) -> None:
    """Write header and checksum into `payload`, whose body is complete and whose size is a multiple of 8."""
    flags = NONFINITE * nonfinite | FLOAT64 * float64 | ABSENT * absent
    numel = shape[0] if len(shape) == 1 else math.prod(shape)
    _LAYOUT.pack_into(
        payload, 0, _MAGIC, VERSION, codec, flags, len(shape), numel, payload.size, group, parameter, entries, 0
    )
    if len(shape) != 1:
        payload[HEADER_BYTES : HEADER_BYTES + 8 * len(shape)].view("<u8")[:] = shape
    _CHECKSUM.pack_into(payload, _CHECKSUM_AT, _actual_checksum(payload))


def open_payload(buffer: Bytes) -> tuple[Header, Sections]:
    """Check a payload (which may be followed by other bytes) and return its header and body.

    Raises:
        WireError: truncated, corrupted, of another version, or not a payload.
    """
    if sys.byteorder != "little":
        raise WireError("payloads are little-endian and are read in place; this machine is big-endian")
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise WireError(f"a payload is a flat contiguous uint8 array, got {buffer.dtype} of shape {buffer.shape}")
    if buffer.size < HEADER_BYTES:
        raise WireError(f"payload of {buffer.size} bytes is shorter than its header of {HEADER_BYTES}")
    magic, version, codec, flags, ndim, numel, nbytes, group, parameter, entries, stated = _LAYOUT.unpack_from(buffer)
    if magic != _MAGIC:
        raise _no_payload(buffer)
    if version != VERSION:
        raise WireError(f"payload of wire version {version}, this hvd_compress reads version {VERSION}")
    if nbytes > buffer.size or nbytes % 8 or nbytes < HEADER_BYTES + (0 if ndim == 1 else 8 * ndim):
        raise WireError(f"payload truncated: its header states {nbytes} bytes, {buffer.size} are there")
    if (found := _actual_checksum(buffer[:nbytes])) != stated:
        raise WireError(f"payload corrupted: checksum {found}, its header states {stated}")
    if ndim > _MOST_DIMENSIONS:
        raise WireError(f"payload of {ndim} dimensions, an array has at most {_MOST_DIMENSIONS}")
    body_at = HEADER_BYTES
    shape = (numel,)
    too_large = numel > _MOST_ELEMENTS
    if ndim != 1:
        body_at += 8 * ndim
        shape = tuple(buffer[HEADER_BYTES:body_at].view("<u8").tolist())
        # NumPy multiplies the other dimensions even where one is 0
        too_large = math.prod([d or 1 for d in shape]) > _MOST_ELEMENTS or math.prod(shape) != numel
    if flags > _ALL_FLAGS or too_large or (numel and not group):
        raise WireError(f"payload header makes no sense: flags {flags}, shape {shape}, {numel} elements, group {group}")
    kinds = bool(flags & NONFINITE), bool(flags & FLOAT64), bool(flags & ABSENT)
    # in the order of the fields: names would double the time of this call, which every payload needs
    header = Header(codec, *kinds, shape, numel, nbytes, group, parameter, entries, body_at)
    return header, Sections(buffer[body_at:nbytes])


def _no_payload(buffer: Bytes) -> WireError:
    if buffer[:HEADER_BYTES].any():
        return WireError(f"not an hvd_compress payload: it starts with {bytes(buffer[:4])!r}, expected {_MAGIC!r}")
    return WireError(
        "zeros in place of a payload, which Horovod sends for a rank that has called join(): compressed exchanges need "
        "all ranks in each step. Give all ranks the same number of batches, or use Compression.none or Compression.fp16"
    )


def _actual_checksum(payload: Bytes) -> int:
    is_summed = payload[_FLAGS_AT] & SUMMED
    words = payload.view(np.uint32 if is_summed else np.uint64)
    words = words if words.flags.aligned else words.copy()
    # the stored checksum is the upper half of a word
    return int(checksum_of_parts(words, 2 * CHECKSUM_WORD + 1) if is_summed else checksum(words, CHECKSUM_WORD))


def frames(buffer: Bytes, count: int) -> list[Bytes]:
    """Cut `count` payloads that follow one another, by the lengths in their headers.

    Raises:
        WireError: one of them is truncated or no payload.
    """
    parts = []
    at = 0
    for index in range(count):
        if buffer.size - at < HEADER_BYTES:
            raise WireError(f"received {buffer.size} bytes, which end before payload {index} of {count}")
        nbytes = int(buffer[at + 16 : at + 24].view("<u8")[0])
        if not buffer[at : at + HEADER_BYTES].any():
            raise _no_payload(buffer[at:])
        if bytes(buffer[at : at + 4]) != _MAGIC or nbytes < HEADER_BYTES or nbytes > buffer.size - at:
            raise WireError(f"payload {index} of {count}, at byte {at} of {buffer.size}, is truncated or not a payload")
        parts.append(buffer[at : at + nbytes])
        at += nbytes
    return parts
