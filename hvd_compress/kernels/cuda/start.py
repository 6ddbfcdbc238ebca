"""Launch kernels without what Triton does in each launch to find their code."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

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
    # a product is rounded before it is added, as on the host: decoded bits must be the same
    compiled = kernel[(programs,)](*arguments, **options, enable_fp_fusion=False)
    # the interpreter compiles nothing
    if compiled is not None:
        _compiled[key] = compiled


@triton.jit
def _one(place):
    tl.store(place, 1)


def probe(place: Any) -> None:
    """Compile a kernel and launch it; writes 1 to an array of int32 on the device.

    Raises:
        Exception: what Triton raises where it cannot, as where it finds no C compiler.
    """
    start(_one, 1, place)
