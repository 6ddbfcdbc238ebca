"""Keep every element: not compressed at all, or rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import Array, TableCompressor, framework_of
from hvd_compress.compressors.settings import check_flag
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import cast

__all__ = ["BF16", "FP16", "NoCompression"]


@dataclass(frozen=True)
class NoCompression(TableCompressor):
    """Sends every element as it is; training does exactly what Horovod without compression does.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import NoCompression
        >>> NoCompression().decode(NoCompression().encode(np.array([0.5, 1e-40], np.float64))).tolist()
        [0.5, 1e-40]
    """

    id: ClassVar[str] = "none"
    codec: ClassVar[int] = 6
    is_dense: ClassVar[bool] = True
    reducible: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 * numel

    def _most_bytes(self, gradient: Array, group: int, shape: tuple[int, ...]) -> int:
        return wire.header_bytes(shape) + wire.padded(gradient.nbytes)

    def kernels(self, group: int) -> Kernels:
        return _raw(self.codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _raw_on_device(self.codec)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as it is, as Horovod's `Compression.none` does."""
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it is."""
        return tensor


@dataclass(frozen=True)
class BF16(TableCompressor):
    """Rounds to bfloat16, nearest even: 2 bytes per element, the range of float32, 8 bits of precision.

    Horovod's allreduce has no bfloat16, so the rank that owns a chunk makes its sum in float32.

    Args:
        error_feedback: keep the rounding error and add it to the next gradient.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import BF16
        >>> BF16().decode(BF16().encode(np.array([1.0, 1.001, 1.01], np.float32))).tolist()
        [1.0, 1.0, 1.0078125]
    """

    error_feedback: bool = True

    id: ClassVar[str] = "bf16"
    codec: ClassVar[int] = 7
    is_dense: ClassVar[bool] = True
    can_overflow: ClassVar[bool] = True  # the largest values of float32 are rounded up

    def __post_init__(self) -> None:
        check_flag(self, "error_feedback", self.error_feedback)

    def body_bytes(self, numel: int, group: int) -> int:
        return 2 * numel

    def kernels(self, group: int) -> Kernels:
        return _bf16(self.codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _bf16_on_device(self.codec)


@dataclass(frozen=True)
class FP16(TableCompressor):
    """Rounds to IEEE half precision: 2 bytes per element, summed by Horovod's own allreduce as `Compression.fp16` is.

    Magnitudes beyond 65504 become infinite, as in Horovod.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import FP16
        >>> FP16().decode(FP16().encode(np.array([1.0, 1.001, 7e4], np.float32))).tolist()
        [1.0, 1.0009765625, inf]
    """

    id: ClassVar[str] = "fp16"
    codec: ClassVar[int] = 8
    is_dense: ClassVar[bool] = True
    can_overflow: ClassVar[bool] = True
    reducible: ClassVar[bool] = True

    def body_bytes(self, numel: int, group: int) -> int:
        return 2 * numel

    def kernels(self, group: int) -> Kernels:
        return _fp16(self.codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _fp16_on_device(self.codec)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and the type to return to."""
        framework = framework_of(tensor)
        if framework.__name__ == "torch":
            return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype
        if framework.__name__ == "tensorflow":
            return (framework.cast(tensor, framework.float16) if tensor.dtype.is_floating else tensor), tensor.dtype
        raise TypeError(f"FP16().compress takes a torch or TensorFlow tensor, got {type(tensor)!r}")

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the type it had."""
        framework = framework_of(tensor)
        return tensor.to(ctx) if framework.__name__ == "torch" else framework.cast(tensor, ctx)


@cache
def _raw(codec: int) -> Kernels:
    return Kernels(partial(cast.encode_raw_rows, codec, 0, False), partial(cast.decode_raw_rows, 0))


@cache
def _bf16(codec: int) -> Kernels:
    return Kernels(partial(cast.encode_bf16_rows, codec), cast.decode_bf16_rows)


@cache
def _fp16(codec: int) -> Kernels:
    return Kernels(partial(cast.encode_fp16_rows, codec, False), cast.decode_fp16_rows)


@cache
def _raw_on_device(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import cast

    encode = partial(cast.encode_raw, codec=codec, is_checked=False)
    return DeviceKernels(encode, partial(cast.verify_raw, may_be_wide=True), cast.decode_raw)


@cache
def _bf16_on_device(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import cast

    return DeviceKernels(partial(cast.encode_bfloat16, codec=codec), cast.verify_halves, cast.decode_bfloat16)


@cache
def _fp16_on_device(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import cast

    encode = partial(cast.encode_float16, codec=codec, is_checked=False)
    return DeviceKernels(encode, cast.verify_halves, cast.decode_float16)
