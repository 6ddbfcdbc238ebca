"""Round blocks to integers of 8 or 4 bits: the gradients of ZeRO++ (Wang et al. 2023), SDP4Bit and LoCo."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.settings import check_feedback, check_flag, check_int
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import blockwise as kernels

__all__ = ["Blockwise"]

_MOST_BLOCK = 32768


@dataclass(frozen=True)
class Blockwise(TableCompressor):
    """Rounds each value to the nearest level of its block: largest * l / s, with l = -s … s and s = 127 or 7.

    Payload: 8 or 4 bits per element and 4 bytes per block, which are its largest magnitude. Rounding to nearest is
    biased; error feedback carries what it leaves out into the next step. A zero stays a zero, and the largest value of
    a block arrives exactly, so that the error is always smaller than the source.

    With `hadamard`, a block is multiplied by the Hadamard matrix before it is rounded, and after it is decoded. That
    spreads one large value over all of its block, so that it does not make the levels of the others coarse. The matrix
    is the same in each step and on each rank. A shorter last block, and a block whose largest magnitude is below 2**-80
    or above 2**100, are rounded without it.

    Source: Wang et al. 2023 (ZeRO++), section 3.3; Jia et al. 2024 (SDP4Bit), which has the rotation; Xie et al. 2024
    (LoCo), which has error feedback. Differences: residuals are in float32, where LoCo has 8 bits; the rank that owns a
    sum keeps a residual, too; levels lie symmetrically around zero, where ZeRO++ also offers a minimum and a maximum.

    Args:
        bits: 8 or 4.
        block: elements that share a scale, a multiple of 8 up to 32768; with `hadamard` a power of 2.
        hadamard: multiply blocks by the Hadamard matrix before rounding.
        error_feedback: keep the rounding error and add it to the next gradient; "float8" keeps it in 8 bits.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Blockwise
        >>> x = np.array([7.0, -0.4, 2.6, 0.0], np.float32)
        >>> Blockwise(bits=4, block=8).decode(Blockwise(bits=4, block=8).encode(x))
        array([7., 0., 3., 0.], dtype=float32)
    """

    bits: int = 8
    block: int = 256
    hadamard: bool = False
    error_feedback: bool | str = True

    id: ClassVar[str] = "blockwise"
    codec: ClassVar[int] = 15

    def __post_init__(self) -> None:
        check_int(self, "bits", self.bits, 4, 8)
        if self.bits not in (4, 8):
            raise ValueError(f"Blockwise(bits={self.bits!r}): bits must be 4 or 8")
        check_int(self, "block", self.block, 8, _MOST_BLOCK)
        check_flag(self, "hadamard", self.hadamard)
        if self.block % 8:
            raise ValueError(f"Blockwise(block={self.block!r}): block must be a multiple of 8")
        if self.hadamard and self.block & (self.block - 1):
            raise ValueError(f"Blockwise(block={self.block!r}): block must be a power of 2 with hadamard=True")
        check_feedback(self, self.error_feedback)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return self.block

    def body_bytes(self, numel: int, group: int) -> int:
        return wire.padded(4 * count_groups(numel, group)) + (numel + 7) // 8 * self.bits

    def misfit(self, header: wire.Header) -> str | None:
        if header.parameter not in (4, 8) or header.group % 8 or header.group > _MOST_BLOCK:
            return f"payload of blockwise with {header.parameter} bits and blocks of {header.group} elements"
        return None

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self.codec, self.bits, self.hadamard, group)


@cache
def _kernels(compressor: Blockwise) -> Kernels:
    encode = partial(kernels.encode_rows, compressor.codec, compressor.bits, compressor.hadamard)
    return Kernels(encode, kernels.decode_rows)


@cache
def _device_kernels(codec: int, bits: int, hadamard: bool, block: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import blockwise, qsgd

    encode = partial(blockwise.encode, codec=codec, bits=bits, hadamard=hadamard, block=block)
    verify = partial(qsgd.verify, bits=bits, bucket=block)
    return DeviceKernels(encode, verify, partial(blockwise.decode, bits=bits, block=block))
