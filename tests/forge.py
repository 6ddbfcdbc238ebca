"""Payloads as an attacker or a bug would make them: any field changed, and the checksum made right again."""

from __future__ import annotations

import numpy as np

from hvd_compress import wire

# typed from the layout that wire.py documents
OFFSETS = {
    "magic": (0, "<u4"),
    "version": (4, "<u1"),
    "codec": (5, "<u1"),
    "flags": (6, "<u1"),
    "ndim": (7, "<u1"),
    "numel": (8, "<u8"),
    "nbytes": (16, "<u8"),
    "group": (24, "<u4"),
    "parameter": (28, "<u4"),
    "entries": (32, "<u4"),
}
CHECKSUM = slice(36, 40)


def field(payload: np.ndarray, name: str) -> int:
    """The value of a header field."""
    at, dtype = OFFSETS[name]
    return int(payload[at : at + np.dtype(dtype).itemsize].view(dtype)[0])


def sealed(payload: np.ndarray) -> np.ndarray:
    """The payload (a multiple of 8 bytes, changed in place) with the checksum that it should have."""
    payload[CHECKSUM].view("<u4")[0] = wire._actual_checksum(payload)
    return payload


def forge(payload: np.ndarray, body: dict[int, tuple[str, int]] | None = None, **fields: int) -> np.ndarray:
    """A copy with header fields replaced, and numbers of the body at byte offsets from the payload's start."""
    forged = payload.copy()
    for name, value in fields.items():
        at, dtype = OFFSETS[name]
        forged[at : at + np.dtype(dtype).itemsize].view(dtype)[0] = value
    for at, (dtype, value) in (body or {}).items():
        forged[at : at + np.dtype(dtype).itemsize].view(dtype)[0] = value
    return sealed(forged)


def resized(payload: np.ndarray, nbytes: int, **fields: int) -> np.ndarray:
    """A copy cut or zero-filled to `nbytes` that says so itself."""
    forged = np.zeros(nbytes, np.uint8)
    common = min(nbytes, payload.size)
    forged[:common] = payload[:common]
    return forge(forged, nbytes=nbytes, **fields)
