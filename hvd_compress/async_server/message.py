"""Define the bytes of what a worker and the server tell each other: a header, and payloads of all tensors or none.

The payloads (see `wire`) follow the 40-byte header in the order of the tensors. All numbers are little-endian:

    offset  type    field
    0       char4   magic "hvda"
    4       uint8   version of the layout
    5       uint8   kind
    6       2 × 0
    8       uint64  bytes of the message, header included
    16      uint64  number of the gradient, counted from 1 by its worker; an answer has that of the gradient
    24      uint64  version of the parameters: those that the gradient was computed from, or those in the answer
    32      uint32  number of payloads
    36      uint32  checksum of the header; payloads have their own
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.errors import WireError
from hvd_compress.kernels.checksum import checksum

__all__ = ["HEADER_BYTES", "Kind", "Message", "open_message", "seal_message"]

Bytes = npt.NDArray[np.uint8]

VERSION = 1
_MAGIC = b"hvda"
_LAYOUT = struct.Struct("<4sBB2xQQQII")
HEADER_BYTES = _LAYOUT.size
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 36


class Kind(IntEnum):
    """Says what a message is about; the numbers are on the wire."""

    GRADIENT = 0
    BAD_GRADIENT = 1
    """The worker's gradient is not finite; the message brings none."""
    FINISHED = 2
    """The worker sends no more gradients."""
    APPLIED = 16
    """Answers begin here. The gradient was applied; number 0 brings the first parameters."""
    TOO_STALE = 17
    """The gradient was not applied."""
    NOT_FINITE = 18
    """The gradient was not applied."""
    OVER = 19
    """The gradient was not applied, and none will be any more."""
    FAILED = 20
    """As `OVER`, since the server has failed; the answer brings no parameters."""


class Message(NamedTuple):
    """Holds what a message says, after its checks; payloads are views that are not checked yet."""

    kind: Kind
    number: int
    version: int
    payloads: list[Bytes]


def seal_message(buffer: Bytes, nbytes: int, kind: Kind, number: int, version: int, payloads: int) -> Bytes:
    """Write the header in front of the payloads, which end at `nbytes`, and return the message."""
    message = buffer[:nbytes]
    _LAYOUT.pack_into(message, 0, _MAGIC, VERSION, kind, nbytes, number, version, payloads, 0)
    _CHECKSUM.pack_into(message, _CHECKSUM_AT, _actual_checksum(message))
    return message


def open_message(message: Bytes, tensors: int) -> Message:
    """Check a message and take it apart.

    Raises:
        WireError: truncated, corrupted, of another version, kind or number of tensors.
    """
    if message.size < HEADER_BYTES:
        raise WireError(f"message of {message.size} bytes is shorter than its header of {HEADER_BYTES}")
    magic, layout, kind, nbytes, number, version, count, stated = _LAYOUT.unpack_from(message)
    if magic != _MAGIC or layout != VERSION:
        raise WireError(f"not a message of version {VERSION}: it starts with {bytes(magic)!r}, version {layout}")
    if nbytes != message.size:
        raise WireError(f"message truncated: its header states {nbytes} bytes, {message.size} are there")
    if (found := _actual_checksum(message)) != stated:
        raise WireError(f"message corrupted: checksum {found}, its header states {stated}")
    if kind not in _PAYLOADS or count != _PAYLOADS[kind] * tensors:
        raise WireError(f"message of kind {kind} with {count} payloads: there are {tensors} tensors")
    payloads = wire.frames(message[HEADER_BYTES:], count)
    if HEADER_BYTES + sum(payload.size for payload in payloads) != nbytes:
        raise WireError(f"message of {nbytes} bytes is longer than its {count} payloads")
    return Message(Kind(kind), number, version, payloads)


_WITHOUT_PAYLOADS = (Kind.BAD_GRADIENT, Kind.FINISHED, Kind.FAILED)
_PAYLOADS = {int(kind): kind not in _WITHOUT_PAYLOADS for kind in Kind}


def _actual_checksum(message: Bytes) -> int:
    words = message[:HEADER_BYTES].view(np.uint64)
    return int(checksum(words if words.flags.aligned else words.copy(), _CHECKSUM_AT // 8))
