"""Allocate buffers that frameworks can take over without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["aligned_empty"]

# a cache line, and the strictest of what TensorFlow's builds ask of memory that is not its own
_ALIGNMENT = 64


def aligned_empty(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocate a flat array that begins on a 64-byte boundary and is not initialized."""
    nbytes = numel * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype)
