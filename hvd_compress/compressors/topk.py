"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.coding import golomb
from hvd_compress.compressors.base import Array, Bytes, Compressor, count_groups, top_count
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import check_choice, check_flag, check_int, check_real
from hvd_compress.errors import WireError
from hvd_compress.kernels import topk as kernels

__all__ = ["TopK"]

_BLOCK = 65536  # what 16 bits of index reach
_SAMPLE = 8192


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the k values of largest magnitude of a tensor with their indices, exactly selected.

    Payload: 6 bytes per sent value (16-bit index, float32 value) and 4 bytes per 65536 elements; with coding="golomb"
    the index takes about 1 byte at a ratio of 0.01. Where a tensor is
    exchanged in parts, each part sends its share of k. Among equal magnitudes the lower index is sent; zeros are not.
    Source: Aji and Heafield 2017; Stich et al. 2018 for the error feedback.

    Args:
        ratio: share of the elements to send, in (0, 1]; at least one is sent.
        k: number of elements to send instead of a ratio.
        error_feedback: keep what was not sent and add it to the next gradient.
        coding: None, or "golomb" for losslessly coded gaps instead of indices: fewer bytes, but messages whose size
            varies from step to step.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import TopK
        >>> compressor = TopK(k=2)
        >>> compressor.decode(compressor.encode(np.array([0.2, 0.7, -3.0, 0.5], np.float32)))
        array([ 0. ,  0.7, -3. ,  0. ], dtype=float32)
    """

    ratio: float = 0.01
    k: int | None = None
    error_feedback: bool = True
    coding: str | None = None

    id: ClassVar[str] = "topk"
    codec: ClassVar[int] = 4
    coded_codec: ClassVar[int | None] = 132

    def __post_init__(self) -> None:
        check_real(self, "ratio", self.ratio, above=0.0, most=1.0)
        check_int(self, "k", self.k, 1, 2**31 - 1, none=True)
        check_flag(self, "error_feedback", self.error_feedback)
        check_choice(self, "coding", self.coding, (None, "golomb"))

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return _BLOCK

    def for_part(self, numel: int, total: int) -> TopK:
        """The compressor for a part of `numel` of a tensor's `total` elements."""
        if self.k is None or numel == total:
            return self
        return replace(self, k=max(1, -(-self.k * numel // total)))

    def _kept(self, numel: int) -> int:
        return min(self.k, numel) if self.k is not None else top_count(numel, self.ratio)

    def body_bytes(self, numel: int, group: int) -> int:
        kept = self._kept(numel)
        return wire.padded(4 * count_groups(numel, group)) + wire.padded(2 * kept) + 4 * kept

    def _encode(self, x: Array, r: Array, body: Bytes, group: int, key: Key) -> tuple[int, int, int] | None:
        kept = self._kept(x.size)
        sections = wire.Sections(body)
        counts = sections.blank(count_groups(x.size, group), np.uint32)
        at = sections.used
        indices = sections.blank(kept, np.uint16)
        values = sections.blank(kept, np.float32)
        count = kernels.encode(x, r, kept, _SAMPLE, group, counts, indices, values)
        if count < 0:
            return None
        if count < kept:
            # zeros are not sent: what there is moves together
            sent = values[:count].copy()
            sections = wire.Sections(body[at:])
            sections.blank(count, np.uint16)
            sections.blank(count, np.float32)[...] = sent
            return at + sections.used, count, 0
        return sections.used, count, 0

    def _shorten(
        self, body: Bytes, entries: int, parameter: int, numel: int, group: int
    ) -> tuple[int, int, int] | None:
        sections = wire.Sections(body)
        counts = sections.take(count_groups(numel, group), np.uint32)
        table = sections.used
        words = golomb.encode(counts, sections.take(entries, np.uint16), group, numel, 0)
        if words is None:
            return None
        values = sections.take(entries, np.float32)
        # the stream comes last, so that its length need not be stated
        shorter = wire.Sections(body[table:])
        shorter.blank(entries, np.float32)[...] = values.copy()
        shorter.take(words.size, np.uint64)[...] = words
        return table + shorter.used, entries, parameter

    def _decode(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        if header.group > _BLOCK:
            raise WireError(f"payload of topk with blocks of {header.group} elements")
        counts = body.take(count_groups(out.size, header.group), np.uint32)
        if header.codec == self.coded_codec:
            values = body.take(header.entries, np.float32)
            indices = golomb.decode(body.rest(), counts, header.entries, np.uint16, header.group, out.size, 0)
        else:
            indices = body.take(header.entries, np.uint16)
            values = body.take(header.entries, np.float32)
        return bool(kernels.decode(counts, indices, values, header.group, scale, out, add))
