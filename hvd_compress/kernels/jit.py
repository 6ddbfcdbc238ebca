"""Say how all kernels are compiled."""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock

_F = TypeVar("_F", bound=Callable[..., object])

_LOCK = "hvd_compress.lock"  # beside the compiled code
_SECONDS_TO_WAIT = 60.0

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
            cache = _SharedCache(function)
        except RuntimeError:  # Numba raises it where it finds no folder
            _tell_unkept("neither the folder of the package nor the home can be written")
        else:
            compiled._cache = cache  # type: ignore[attr-defined]  # what `cache=True` sets, too
            name = f"{function.__module__}.{function.__qualname__}"
            compiled.compile = _in_turn(compiled.compile, cache.cache_path, name)  # type: ignore[attr-defined]
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


class _Turns:
    """Whose turn it is to compile a kernel, among processes that share a folder.

    Ranks of a host begin at once, and each would compile all kernels: with fewer cores than ranks that takes as many
    times longer. One that has waited finds the code of the other.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._waits = True

    @contextmanager
    def taken(self, folder: str, kernel: str) -> Iterator[None]:
        """Keep others from compiling this kernel. Numba's lock is held meanwhile: one thread at a time is in here."""
        # a kernel compiles those that it calls, and never one that calls it: so no two processes wait for each other
        if kernel in self._held or not self._waits:
            yield
            return
        self._held.add(kernel)
        try:
            with _opened(folder, f"{kernel}.turn") as descriptor:
                # a process that is stopped may hold it
                self._waits = descriptor is None or _locks(descriptor, _SECONDS_TO_WAIT)
                yield
        finally:
            self._held.remove(kernel)


_turns = _Turns()


def _in_turn(compile_one: Callable[..., object], folder: str, kernel: str) -> Callable[..., object]:
    def compile_in_turn(signature: object) -> object:
        with global_compiler_lock, _turns.taken(folder, kernel):
            return compile_one(signature)

    return compile_in_turn


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Keep other processes out while this one works in the folder, as far as its file system knows locks."""
    with _opened(folder, _LOCK) as descriptor:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _locks(descriptor: int, seconds: float) -> bool:
    """Lock a file within so many seconds; returns whether nobody else has kept it longer."""
    deadline = time.monotonic() + seconds
    with suppress(OSError):  # a file system without locks
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
    return True


@contextmanager
def _opened(folder: str, name: str) -> Iterator[int | None]:
    """Open a file to be locked, which closing it ends; None where the folder has none and takes none."""
    # errors of the work inside are the caller's
    descriptor = None
    with suppress(OSError):
        # a link that somebody has planted in a shared folder is not followed
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(os.path.join(folder, name), flags, 0o666)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
