"""The byte layout of what one rank tells its neighbours in a step: which tensors it sends, and their payloads.

A message is a 40-byte header, one bit for each tensor (least significant first, padded to 8 bytes), and the payloads
(see `wire`) of the tensors whose bit is set, in order. All numbers are little-endian. The header:

    offset  type    field
    0       char4   magic "hvdn"
    4       uint8   version of the layout
    5       3 × 0
    8       uint64  bytes of the message, header included
    16      uint64  number of the message, counted from 0 by its sender
    24      uint32  number of tensors
    28      uint32  idle rounds: see `Node.is_over`
    32      uint32  0
    36      uint32  checksum of header and bits; payloads have their own
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.errors import WireError
from hvd_compress.kernels.checksum import checksum

__all__ = ["Message", "cut_message", "open_message", "payloads_at", "seal_message"]

Bytes = npt.NDArray[np.uint8]

VERSION = 1
_MAGIC = b"hvdn"
_LAYOUT = struct.Struct("<4sB3xQQIIII")
_HEADER_BYTES = _LAYOUT.size
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 36


class Message(NamedTuple):
    """Holds what a message says, after its checks.

    Args:
        number: counted by its sender.
        idle: rounds of which the sender knows that no rank within reach of them has trained.
        payloads: by the number of the tensor.
    """

    number: int
    idle: int
    payloads: dict[int, Bytes]


def payloads_at(tensors: int) -> int:
    """Count the bytes before the first payload."""
    return _HEADER_BYTES + wire.padded(-(-tensors // 8))


def seal_message(buffer: Bytes, nbytes: int, sent: npt.NDArray[np.bool_], number: int, idle: int) -> None:
    """Write header and bits in front of the payloads, which end at `nbytes`."""
    bits = buffer[_HEADER_BYTES : payloads_at(sent.size)]
    packed = np.packbits(sent, bitorder="little")
    bits[: packed.size] = packed
    bits[packed.size :] = 0
    _LAYOUT.pack_into(buffer, 0, _MAGIC, VERSION, nbytes, number, sent.size, idle, 0, 0)
    _CHECKSUM.pack_into(buffer, _CHECKSUM_AT, _actual_checksum(buffer, sent.size))


def cut_message(buffer: Bytes, at: int) -> Bytes:
    """Cut out the message that begins at byte `at` of `buffer`.

    Raises:
        WireError: it is truncated or no message.
    """
    left = buffer.size - at
    if left < _HEADER_BYTES or bytes(buffer[at : at + 4]) != _MAGIC:
        raise WireError(f"no message of a neighbour at byte {at} of {buffer.size}")
    nbytes = int(buffer[at + 8 : at + 16].view("<u8")[0])
    if not _HEADER_BYTES <= nbytes <= left or nbytes % 8:
        raise WireError(f"message truncated: its header states {nbytes} bytes, {left} are there")
    return buffer[at : at + nbytes]


def open_message(buffer: Bytes, tensors: int) -> Message:
    """Check a message and take it apart; payloads are views that are not checked yet.

    Raises:
        WireError: truncated, corrupted, of another version or number of tensors.
    """
    if buffer.size < payloads_at(tensors):
        raise WireError(f"message of {buffer.size} bytes is shorter than its header of {payloads_at(tensors)}")
    magic, version, nbytes, number, count, idle, _, stated = _LAYOUT.unpack_from(buffer)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"not a message of version {VERSION}: it starts with {bytes(magic)!r}, version {version}")
    if nbytes != buffer.size or count != tensors:
        raise WireError(
            f"message of {nbytes} bytes about {count} tensors: expected {buffer.size} bytes about {tensors}"
        )
    if (found := _actual_checksum(buffer, tensors)) != stated:
        raise WireError(f"message corrupted: checksum {found}, its header states {stated}")
    bits = np.unpackbits(buffer[_HEADER_BYTES : payloads_at(tensors)], bitorder="little")
    if bits[tensors:].any():
        raise WireError(f"message about tensors beyond the {tensors} that there are")
    indices = np.flatnonzero(bits[:tensors]).tolist()
    rest = buffer[payloads_at(tensors) :]
    parts = wire.frames(rest, len(indices))
    if sum(part.size for part in parts) != rest.size:
        raise WireError(f"message of {nbytes} bytes is longer than its {len(parts)} payloads")
    return Message(number, idle, dict(zip(indices, parts, strict=True)))


def _actual_checksum(buffer: Bytes, tensors: int) -> int:
    words: npt.NDArray[Any] = buffer[: payloads_at(tensors)].view(np.uint64)
    return int(checksum(words if words.flags.aligned else words.copy(), _CHECKSUM_AT // 8))
