"""The one place that says how kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

_F = TypeVar("_F", bound=Callable[..., object])


def kernel(function: _F) -> _F:
    """Compile to machine code on first use and keep it on disk; the code runs without the GIL."""
    # `reassoc` lets LLVM keep several partial sums in one vector register. Nothing else of fast-math is safe here:
    # kernels rely on NaN and Inf (0 * x is NaN exactly if x is not finite) and on the sign of zero.
    compiled: _F = numba.njit(nogil=True, cache=True, fastmath={"reassoc"}, error_model="numpy")(function)
    return compiled


def kernel_of_finite(function: _F) -> _F:
    """Like `kernel`, for arrays that are known to hold finite values only: smallest and largest vectorize."""
    fastmath = {"reassoc", "nnan", "nsz"}
    compiled: _F = numba.njit(nogil=True, cache=True, fastmath=fastmath, error_model="numpy")(function)
    return compiled


def kernel_in_order(function: _F) -> _F:
    """Like `kernel`, with every sum in the order that is written, as NumPy computes it."""
    compiled: _F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled
