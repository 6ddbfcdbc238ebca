"""Say how all kernels are compiled."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import numba
from numba.core.caching import FunctionCache

_F = TypeVar("_F", bound=Callable[..., object])

_LOCK = "hvd_compress.lock"  # beside the compiled code

unkept: list[str] = []
"""Why compiled code is not kept on disk; empty where it is."""


def kernel(function: _F) -> _F:
    """Compile a function on first use and keep the machine code on disk; it runs without the GIL."""
    # `reassoc` lets LLVM keep several partial sums in one vector register. Nothing else of fast-math is safe here:
    # kernels rely on NaN and Inf (0 * x is NaN exactly if x is not finite) and on the sign of zero.
    return _compiled(function, fastmath={"reassoc"})


def kernel_of_finite(function: _F) -> _F:
    """Compile like `kernel`, for arrays that hold finite values only, so that minimum and maximum vectorize."""
    return _compiled(function, fastmath={"reassoc", "nnan", "nsz"})


def kernel_in_order(function: _F) -> _F:
    """Compile like `kernel`, with every sum in the order that is written, as NumPy computes it."""
    return _compiled(function, fastmath=False)


def _compiled(function: _F, fastmath: set[str] | bool) -> _F:
    compiled: _F = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    if not numba.config.DISABLE_JIT:
        try:
            compiled._cache = _SharedCache(function)  # type: ignore[attr-defined]  # what `cache=True` sets, too
        except RuntimeError:  # Numba raises it where it finds no folder
            _tell_unkept("neither the folder of the package nor the home can be written")
    return compiled


def _tell_unkept(reason: str) -> None:
    """Warn once: the first step takes longer, and nothing else says why."""
    if not unkept:
        warnings.warn(
            f"compiled kernels cannot be kept on disk ({reason}), so each process compiles them anew: "
            "set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
    unkept.append(reason)


class _SharedCache(FunctionCache):
    """A cache of Numba's for ranks that share a folder.

    Numba reads which files there are, chooses the name of another one, and writes both. Where two ranks do so at once
    for different types of arrays or processors, they choose the same name, and one of them finds the other's code under
    it from then on.
    """

    def save_overload(self, sig: object, data: object) -> None:
        try:
            with _alone(self.cache_path):
                super().save_overload(sig, data)
        except OSError as error:  # a full disk does not end a training: the code is in memory
            _tell_unkept(str(error))


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Keep other processes out while this one works in the folder, as far as its file system knows locks."""
    # errors of the work inside are the caller's
    descriptor = None
    with suppress(OSError):
        # a link that somebody has planted in a shared folder is not followed
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(os.path.join(folder, _LOCK), flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
