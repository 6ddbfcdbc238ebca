"""What users write in a file of their own: a compressor, an exchange, a topology, a trigger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import hvd_compress
from hvd_compress.compressors import NOT_FINITE, Body, add_gradient
from hvd_compress.schedules import Watch
from hvd_compress.wire import Sections


@hvd_compress.register
@dataclass(frozen=True)
class SignSum(hvd_compress.Compressor):
    """The signs, and the mean magnitude times a factor."""

    factor: float = 1.0
    error_feedback: bool = True
    id: ClassVar[str] = "signsum"
    codec: ClassVar[int] = 200

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 + (numel + 7) // 8

    def encode_body(self, x: Any, gradient: Any, body: Any, group: int, key: Any) -> Body:
        if not add_gradient(x, gradient):
            return NOT_FINITE
        sections = Sections(body)
        scale = np.float32(self.factor * np.abs(x).mean(dtype=np.float64))
        sections.blank(1, np.float32)[0] = scale
        is_positive = x >= 0
        sections.blank((x.size + 7) // 8, np.uint8)[:] = np.packbits(is_positive)
        if gradient.size:
            x -= np.where(is_positive, scale, -scale)
        return Body(sections.used)

    def decode_body(self, header: Any, body: Any, out: Any, scale: Any, add: bool) -> bool:
        (size,) = body.take(1, np.float32) * scale
        is_positive = np.unpackbits(body.take((out.size + 7) // 8, np.uint8), count=out.size)
        values = np.where(is_positive, size, -size)
        out[:] = out + values if add else values
        return True


class EveryOther(hvd_compress.TwoPhase):
    """Of two ranks next to each other, such as those of a host with one link, one sums up."""

    id = "every_other"

    def owners(self, ranks: int) -> range:
        return range(0, ranks, 2)


@dataclass(frozen=True)
class Star(hvd_compress.Topology):
    """All talk with rank 0 only."""

    id: ClassVar[str] = "star"

    def matrix(self, size: int) -> Any:
        weights = np.eye(size)
        weights[0, 1:] = weights[1:, 0] = 1 / size
        return weights - np.diag(weights.sum(axis=1) - 1)


class _Relative(Watch):
    def end_pass(self, due: Any, moved: Any) -> None:
        self.thresholds[due] = self.trigger.share * self.norms[due]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RelativeThreshold(hvd_compress.Trigger):
    """Sends a tensor when its norm has changed by a share of itself."""

    share: float = 0.1
    id: ClassVar[str] = "relative"

    def watch(self, count: int) -> Watch:
        return _Relative(self, count)
