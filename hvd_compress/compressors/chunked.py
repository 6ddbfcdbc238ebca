"""Keep the largest values of each chunk, with few bits for each, and with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor, count_groups, top_count
from hvd_compress.compressors.settings import check_choice, check_feedback, check_int, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import chunked as kernels
from hvd_compress.kernels import coded

__all__ = ["ChunkedTopK"]


@dataclass(frozen=True)
class ChunkedTopK(TableCompressor):
    """Sends the values of largest magnitude of each chunk of a tensor, each as a sign and a level of few bits.

    `TopK(chunk=4096, ratio=1/64, value_bits=2)` creates this compressor, too. A tensor is cut into chunks of `chunk`
    elements. Of each chunk, ceil(ratio * its elements) are sent, selected exactly. Among equal magnitudes the lower
    index is sent; zeros are not. Of the b bits of a value, one is the sign. The others are a level l, which stands for
    the magnitude base + l * step. Levels divide the range of what the chunk sends evenly, and base and step are fitted
    by least squares, so that with 2 bits the two magnitudes are means. The rounding error and all that is not sent stay
    in the residual.

    Payload: 12 bits of index and `value_bits` for each entry of a chunk of 4096, and 10 bytes for each chunk (6 with 1
    bit): how many it sends, base, step. With the default settings that is 0.0074 of float32. With coding="golomb" an
    index takes about 8 bits.

    Source: Sarfi et al., SparseLoCo (arXiv 2508.15706, 2025): top-k in chunks with 2-bit values and error feedback.
    Differences: the paper fixes no wire format; the levels and their least-squares fit are ours. A chunk is a run of
    the flattened tensor, not a two-dimensional block.

    Args:
        ratio: share of each chunk to send, in (0, 1]; at least one element is sent.
        chunk: elements, 8 to 32768.
        value_bits: 1 to 8, of sign and level.
        error_feedback: keep what was not sent, and add it to the next gradient; "float8" keeps it in 8 bits.
        coding: None, or "golomb" for losslessly coded gaps instead of indices: fewer bytes, but messages whose size
            varies from step to step.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import ChunkedTopK
        >>> compressor = ChunkedTopK(ratio=0.5, chunk=8, value_bits=2)
        >>> x = np.array([0.1, -5.0, 1.0, 0.2, -0.3, 7.0, 1.0, 0.4], np.float32)
        >>> compressor.decode(compressor.encode(x))
        array([ 0., -6.,  1.,  0.,  0.,  6.,  1.,  0.], dtype=float32)
    """

    ratio: float = 1 / 64
    chunk: int = 4096
    value_bits: int = 2
    error_feedback: bool | str = True
    coding: str | None = None

    id: ClassVar[str] = "chunkedtopk"
    codec: ClassVar[int] = 22
    coded_codec: ClassVar[int | None] = 150

    def __post_init__(self) -> None:
        check_real(self, "ratio", self.ratio, above=0.0, most=1.0)
        check_int(self, "chunk", self.chunk, 8, kernels.MOST_CHUNK)
        check_int(self, "value_bits", self.value_bits, 1, kernels.MOST_BITS)
        check_feedback(self, self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return self.chunk

    def keeping(self, share: float) -> ChunkedTopK:
        return replace(self, ratio=max(self.ratio, share))

    def kept_share(self, numel: int) -> float:
        return self.ratio

    def limit_of(self, numel: int, group: int) -> int:
        rest = numel % group
        return numel // group * top_count(group, self.ratio) + (top_count(rest, self.ratio) if rest else 0)

    def body_bytes(self, numel: int, group: int) -> int:
        chunks = count_groups(numel, group)
        length = (group - 1).bit_length() + self.value_bits
        words = -(-self.limit_of(numel, group) * length // 64)
        return wire.padded(2 * chunks) + wire.padded(4 * min(self.value_bits, 2) * chunks) + 8 * words

    def misfit(self, header: wire.Header) -> str | None:
        if 1 <= header.parameter <= kernels.MOST_BITS and header.group <= kernels.MOST_CHUNK:
            return None
        return f"payload of values of {header.parameter} bits in chunks of {header.group} elements"

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        if self.coding is not None:
            return None
        return _device_kernels(self.codec, self.value_bits, group, top_count(group, self.ratio))


@cache
def _kernels(compressor: ChunkedTopK) -> Kernels:
    return Kernels(
        partial(kernels.encode_rows, compressor.codec, compressor.value_bits, compressor.ratio),
        kernels.decode_rows,
        partial(coded.shorten_chunked_rows, compressor.coded_codec),
        coded.decode_chunked_rows,
    )


@cache
def _device_kernels(codec: int, bits: int, chunk: int, most: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import chunked

    return DeviceKernels(
        partial(chunked.encode, codec=codec, bits=bits, chunk=chunk, most=most),
        partial(chunked.verify, bits=bits, chunk=chunk, most=most),
        partial(chunked.decode, bits=bits, chunk=chunk, most=most),
    )
