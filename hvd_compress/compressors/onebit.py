"""Quantize to one bit (Seide et al. 2014; Dryden et al. 2016, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.groups import group_numel
from hvd_compress.compressors.settings import check_feedback, check_group, check_int
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import onebit as kernels

__all__ = ["OneBit"]

_LONGEST_ROW = 65536


@dataclass(frozen=True)
class OneBit(TableCompressor):
    """Sends the sign of each element, decoded to the mean of the non-negative or of the negative values of its group.

    Payload: 1 bit per element and 8 bytes per group. Values >= 0 are sent as 1. Source: Dryden et al. 2016, section
    3.1. Difference: rows shorter than 512 elements share a group. For the paper's AdaGrad inside the exchange see
    `hvd_compress.AdaGrad`, a setting of optimizers for most compressors.

    Args:
        group: "row" (the paper's columns), "tensor", or elements per group.
        sample: entries drawn per group to estimate the two means; None takes all, as Seide et al. do.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> payload = OneBit().encode(np.ones((1024, 1024), np.float32))
        >>> payload.size  # 131072 bytes of bits, 1024 groups of 8 bytes, a header
        139320
    """

    group: str | int = "row"
    sample: int | None = None
    error_feedback: bool | str = True

    id: ClassVar[str] = "onebit"
    codec: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_group(self, self.group)
        check_int(self, "sample", self.sample, 2, 2**31 - 1, none=True)
        check_feedback(self, self.error_feedback)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return group_numel(shape, self.group, _LONGEST_ROW)

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 * count_groups(numel, group) + (numel + 7) // 8

    @property
    def draws(self) -> bool:
        return self.sample is not None

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # what is drawn is scattered, and few draw
        return None if self.sample is not None else _device_kernels(self.codec)


@cache
def _kernels(compressor: OneBit) -> Kernels:
    encode = partial(kernels.encode_rows, compressor.codec, compressor.sample or 0, 2)
    return Kernels(encode, partial(kernels.decode_rows, 2))


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import onebit

    return DeviceKernels(partial(onebit.encode, codec=codec), onebit.verify, onebit.decode)
