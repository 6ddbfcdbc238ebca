"""Quantize by a threshold (Strom 2015; Dryden et al. 2016, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups
from hvd_compress.compressors.settings import check_choice, check_feedback, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import coded
from hvd_compress.kernels import signs as kernels

__all__ = ["Threshold"]

_INDEX_GROUP = 32768
_TILE = 4096  # elements that one program on a device compares
# beyond so many of them lies 1 in 64 values of a normal distribution
_DEVIATIONS_OF_TAU = 2.42


@dataclass(frozen=True)
class Threshold(TableCompressor):
    """Sends +tau for values greater than tau, -tau for those less than -tau, and nothing for the others.

    Payload: 2 bytes per sent value and 4 bytes per 32768 elements; its size varies from step to step. With
    coding="golomb" a value takes 2 bits where all are sent, about 1.1 bytes where 1 in 64 is. Source: Dryden et al.
    2016, section 3.2. Difference: a word of the paper has 32 bits, 31 of them index; ours has 16, of them 15 index
    within a group of 32768 elements. A tau that is small against the gradients makes the residual grow without bound,
    as the paper found: each element sends at most tau per step.

    Args:
        tau: threshold and reconstruction value, in the units of the gradient.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.
        coding: None, or "golomb" for losslessly coded gaps instead of indices.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Threshold
        >>> compressor = Threshold(tau=0.5)
        >>> compressor.decode(compressor.encode(np.array([0.2, 0.7, -3.0, 0.5], np.float32)))
        array([ 0. ,  0.5, -0.5,  0. ], dtype=float32)
    """

    tau: float
    error_feedback: bool | str = True
    coding: str | None = None

    id: ClassVar[str] = "threshold"
    codec: ClassVar[int] = 2
    coded_codec: ClassVar[int | None] = 130

    def __post_init__(self) -> None:
        # half the least float32 is rounded to 0
        check_real(self, "tau", self.tau, above=2.0**-150, most=float(np.finfo(np.float32).max))
        check_feedback(self, self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    @property
    def fixed_size(self) -> bool:
        """Whether the size follows from the shape: no, it depends on how many values are sent."""
        return False

    @property
    def typical_deviation(self) -> float:
        """The standard deviation at which 1 in 64 values is sent."""
        return self.tau / _DEVIATIONS_OF_TAU

    @classmethod
    def decoder(cls) -> Threshold:
        return cls(tau=1.0)

    def kept_share(self, numel: int) -> float:
        return 0.01

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return _INDEX_GROUP

    def body_bytes(self, numel: int, group: int) -> int:
        return wire.padded(4 * count_groups(numel, group)) + 2 * numel

    def misfit(self, header: wire.Header) -> str | None:
        tau = np.uint32(header.parameter).view(np.float32)
        if 0 < tau < np.inf and header.group <= _INDEX_GROUP:
            return None
        return f"payload of threshold with tau={tau} and groups of {header.group} elements"

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # a coding is for hosts; kernels take whole tiles of groups
        is_taken = self.coding is None and group <= _INDEX_GROUP and group % _TILE == 0
        return _device_kernels(self) if is_taken else None


@cache
def _kernels(compressor: Threshold) -> Kernels:
    encode = partial(kernels.encode_threshold_rows, compressor.codec, np.float32(compressor.tau))
    shorten = partial(coded.shorten_threshold_rows, compressor.coded_codec)
    return Kernels(encode, kernels.decode_threshold_rows, shorten, coded.decode_threshold_rows)


@cache
def _device_kernels(compressor: Threshold) -> DeviceKernels:
    from hvd_compress.kernels.cuda import threshold

    tau = np.float32(compressor.tau)
    encode = partial(threshold.encode, codec=compressor.codec, tau=float(tau), parameter=int(tau.view(np.uint32)))
    return DeviceKernels(encode, threshold.verify, partial(threshold.decode, tau=float(tau)))
