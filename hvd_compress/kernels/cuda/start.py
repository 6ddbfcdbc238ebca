"""Launch kernels without what Triton does in each launch to find their code."""

from __future__ import annotations

from typing import Any

_compiled: dict[Any, Any] = {}


def start(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the current stream.

    Triton takes some 30 microseconds to find the code for the arguments of a launch. Here it is found by what it
    depends on: the constants and the device. All arrays begin on 16-byte boundaries, since they are whole allocations.

    Args:
        kernel: made by `triton.jit`.
        programs: how many run.
        arguments: of the kernel; numbers that are not floats are taken for constants.
        options: of Triton.
    """
    constants = [a for a in arguments if not (isinstance(a, float) or hasattr(a, "data_ptr"))]
    key = (kernel, arguments[0].get_device(), *constants, *options.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*arguments)
        return
    compiled = kernel[(programs,)](*arguments, **options)
    # the interpreter compiles nothing
    if compiled is not None:
        _compiled[key] = compiled
