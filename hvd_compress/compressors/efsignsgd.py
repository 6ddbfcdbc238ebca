"""Quantize to one bit and one magnitude per group: EF-SignSGD (Karimireddy et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.groups import group_numel
from hvd_compress.compressors.settings import check_feedback, check_group
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import onebit as kernels

__all__ = ["EFSignSGD"]

_LONGEST_ROW = 65536


@dataclass(frozen=True)
class EFSignSGD(TableCompressor):
    """Sends the sign of each element, decoded to plus or minus the mean magnitude of its group.

    Payload: 1 bit per element and 4 bytes per group. Values >= 0 are sent as 1, so a zero becomes the positive
    magnitude, and error feedback takes it back in the next step. The mean of the magnitudes makes the error smaller
    than the source for every source. Their root mean square, which some libraries take, does not do so where values are
    sparse. Source: Karimireddy et al. 2019, algorithm 1. Differences: groups are rows by default ("tensor" is the
    paper's whole layer); the rank that owns a sum has error feedback, too. `OneBit` sends two means instead of one
    magnitude, so it represents positive and negative values of different size better, for 4 more bytes per group.

    Args:
        group: "row" (as `OneBit` groups), "tensor", or elements per group.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import EFSignSGD
        >>> EFSignSGD().decode(EFSignSGD().encode(np.array([0.5, -1.0, 2.0, -2.5], np.float32)))
        array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)
    """

    group: str | int = "row"
    error_feedback: bool | str = True

    id: ClassVar[str] = "efsignsgd"
    codec: ClassVar[int] = 12

    def __post_init__(self) -> None:
        check_group(self, self.group)
        check_feedback(self, self.error_feedback)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return group_numel(shape, self.group, _LONGEST_ROW)

    def body_bytes(self, numel: int, group: int) -> int:
        return wire.padded(4 * count_groups(numel, group)) + (numel + 7) // 8

    def kernels(self, group: int) -> Kernels:
        return _kernels(self.codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self.codec)


@cache
def _kernels(codec: int) -> Kernels:
    return Kernels(partial(kernels.encode_rows, codec, 0, 1), partial(kernels.decode_rows, 1))


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import onebit

    return DeviceKernels(
        partial(onebit.encode, codec=codec, per_group=1),
        partial(onebit.verify, per_group=1),
        partial(onebit.decode, per_group=1),
    )
