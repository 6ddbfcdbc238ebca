"""Keep the k largest values, with error feedback."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from hvd_compress import wire
from hvd_compress.compressors import entries
from hvd_compress.compressors.base import TableCompressor, top_count
from hvd_compress.compressors.chunked import ChunkedTopK
from hvd_compress.compressors.settings import check_choice, check_feedback, check_int, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import coded
from hvd_compress.kernels import topk as kernels

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(TableCompressor):
    """Sends the k values of largest magnitude of a tensor with their indices, exactly selected.

    Payload: 6 bytes per sent value (16-bit index, float32 value) and 4 bytes per 65536 elements; with coding="golomb"
    the index takes about 1 byte at a ratio of 0.01. Where a tensor is exchanged in parts, each part sends its share of
    k. Among equal magnitudes the lower index is sent; zeros are not. Source: Aji and Heafield 2017; Stich et al. 2018
    for the error feedback.

    Args:
        ratio: share of the elements to send, in (0, 1]; at least one is sent. From 2/3 on, an optimizer sends the
            tensor uncompressed instead, which takes fewer bytes.
        k: number of elements to send instead of a ratio.
        error_feedback: keep what was not sent and add it to the next gradient; "float8" keeps it in 8 bits.
        coding: None, or "golomb" for losslessly coded gaps instead of indices: fewer bytes, but messages whose size
            varies from step to step.
        chunk: elements per chunk. Creates a `ChunkedTopK`, which sends a share of `ratio` of each chunk, with values of
            few bits. By keyword only, like `value_bits`.
        value_bits: bits of each value, with `chunk`; 2 by default.

    Raises:
        ValueError: a setting out of its range; `value_bits` without `chunk`, or `k` with it.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import TopK
        >>> compressor = TopK(k=2)
        >>> compressor.decode(compressor.encode(np.array([0.2, 0.7, -3.0, 0.5], np.float32)))
        array([ 0. ,  0.7, -3. ,  0. ], dtype=float32)
    """

    ratio: float = 0.01
    k: int | None = None
    error_feedback: bool | str = True
    coding: str | None = None

    id: ClassVar[str] = "topk"
    sends_entries: ClassVar[bool] = True
    codec: ClassVar[int] = 4
    coded_codec: ClassVar[int | None] = 132

    if TYPE_CHECKING:

        def __init__(
            self,
            ratio: float = 0.01,
            k: int | None = None,
            error_feedback: bool | str = True,
            coding: str | None = None,
            *,
            chunk: int | None = None,
            value_bits: int | None = None,
        ) -> None: ...

    # Payloads of chunks are another codec, so another class, whose instances Python does not initialize as TopK.
    def __new__(cls, *args: Any, chunk: int | None = None, value_bits: int | None = None, **settings: Any) -> Any:
        if cls is not TopK or (chunk is None and value_bits is None):
            return super().__new__(cls)
        return _of_chunks(*args, chunk=chunk, value_bits=value_bits, **settings)

    def __post_init__(self) -> None:
        given: Any = self.ratio
        # True and False are refused as what they are
        if type(given) is not bool and isinstance(given, numbers.Integral) and int(given) >= 1:
            raise ValueError(
                f"TopK(ratio={given!r}): ratio must be a finite number greater than 0 and at most 1, such as 0.01; "
                f"for a number of elements give TopK(k={int(given)}). All of them (1.0), each with its "
                "index, take more bytes than dense float32"
            )
        check_real(self, "ratio", self.ratio, above=0.0, most=1.0)
        check_int(self, "k", self.k, 1, 2**31 - 1, none=True)
        check_feedback(self, self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return entries.BLOCK

    def for_part(self, numel: int, total: int) -> TopK:
        if self.k is None or numel == total:
            return self
        return replace(self, k=max(1, -(-self.k * numel // total)))

    def keeping(self, share: float) -> TopK:
        return self if self.k is not None else replace(self, ratio=max(self.ratio, share))

    def kept_share(self, numel: int) -> float:
        return self.ratio if self.k is None else self.k / max(1, numel)

    def _kept(self, numel: int) -> int:
        return min(self.k, numel) if self.k is not None else top_count(numel, self.ratio)

    def body_bytes(self, numel: int, group: int) -> int:
        return entries.body_bytes(numel, group, self._kept(numel))

    def misfit(self, header: wire.Header) -> str | None:
        if header.group <= entries.BLOCK:
            return None
        return f"payload of 16-bit indices in blocks of {header.group} elements; {entries.BLOCK} is the most"

    def limit_of(self, numel: int, group: int) -> int:
        return self._kept(numel)

    def kernels(self, group: int) -> Kernels:
        return _kernels(self.codec, self.coded_codec)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        # coded gaps are for hosts
        return None if self.coding is not None or group > entries.BLOCK else _device_kernels(self.codec)


def _of_chunks(
    ratio: float = 0.01,
    k: int | None = None,
    error_feedback: bool | str = True,
    coding: str | None = None,
    *,
    chunk: int | None,
    value_bits: int | None,
) -> ChunkedTopK:
    if chunk is None:
        raise ValueError(f"TopK(value_bits={value_bits!r}): only with chunk, as in TopK(chunk=4096, value_bits=2)")
    if k is not None:
        raise ValueError(f"TopK(k={k!r}) with chunk={chunk!r}: give a ratio, which each chunk sends of its elements")
    return ChunkedTopK(ratio, chunk, 2 if value_bits is None else value_bits, error_feedback, coding)


@cache
def _kernels(codec: int, coded_codec: int | None) -> Kernels:
    return Kernels(
        partial(kernels.encode_rows, codec),
        kernels.decode_rows,
        partial(coded.shorten_topk_rows, coded_codec),
        coded.decode_topk_rows,
    )


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import topk

    return DeviceKernels(partial(topk.encode, codec=codec), topk.verify, topk.decode)
