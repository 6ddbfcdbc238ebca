"""Check what the user asks of an asynchronous parameter server, and describe it for ranks to compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_compress import wire
from hvd_compress.async_server.message import HEADER_BYTES
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.compressors.settings import check_int, check_real
from hvd_compress.errors import UnsupportedError
from hvd_compress.gossip.copies import smaller
from hvd_compress.policy import compressor_for, compressors_in, given_compression
from hvd_compress.schedules import BoundedStaleness
from hvd_compress.tensors import ParameterSpec

__all__ = ["AsyncServerSettings"]

_MOST = 2**31 - 1


@dataclass(frozen=True)
class AsyncServerSettings:
    """Holds the arguments of `AsyncParameterServerOptimizer` that do not depend on a framework.

    Raises:
        TypeError: not a compressor.
        ValueError: a setting out of its range.
        UnsupportedError: an elastic run.
    """

    staleness: int = 4
    compression: Any = NoCompression()
    answer: Any = NoCompression()
    patience: float = 60.0
    server: int = 0

    def __post_init__(self) -> None:
        for argument in ("compression", "answer"):
            object.__setattr__(self, argument, given_compression(argument, getattr(self, argument)))
        given = [*compressors_in(self.compression), *compressors_in(self.answer)]
        if narrow := [c for c in given if c.has_narrow_residuals]:
            raise UnsupportedError(
                f"an asynchronous server with {narrow[0]!r}: its workers keep residuals as floats, to take a gradient "
                "back, and answers have none. Use error_feedback=True"
            )
        check_int(self, "staleness", self.staleness, 0, _MOST)
        check_real(self, "patience", self.patience, above=0.0, most=float(_MOST))
        check_int(self, "server", self.server, 0, _MOST)
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise UnsupportedError("an asynchronous server in an elastic run: start with a fixed number of ranks")

    @property
    def rule(self) -> BoundedStaleness:
        """The rule that says which worker is answered when."""
        return BoundedStaleness(self.staleness, self.patience)

    def description(self, tensors: Sequence[ParameterSpec]) -> dict[str, Any]:
        """Describe the settings for ranks to compare."""
        return {
            "wire version": wire.VERSION,
            "server": self.server,
            "staleness": self.staleness,
            "patience": self.patience,
            "compression": self.compression.get_config(),
            "answer": self.answer.get_config(),
            "parameters": [[t.name, list(t.shape), t.dtype] for t in tensors],
        }

    def for_gradients(self, tensors: Sequence[ParameterSpec]) -> list[Compressor]:
        """List the compressor of each tensor's gradients; none where a payload would not be smaller than the tensor."""
        return [smaller(compressor_for(self.compression, t.name), t) for t in tensors]

    def for_answers(self, tensors: Sequence[ParameterSpec]) -> list[Compressor]:
        """List the compressor of each tensor's answers; see `for_gradients`."""
        return [smaller(compressor_for(self.answer, t.name), t) for t in tensors]

    def gradient_bytes(self, tensors: Sequence[ParameterSpec]) -> int:
        """Compute the most bytes of a message with a gradient."""
        return HEADER_BYTES + sum(
            min(t.raw_bytes, c.capacity(t.numel, c.group_numel(t.shape)))
            for t, c in zip(tensors, self.for_gradients(tensors), strict=True)
        )

    def answer_bytes(self, tensors: Sequence[ParameterSpec]) -> int:
        """Compute the most bytes of an answer; the first one is whole."""
        return HEADER_BYTES + sum(t.raw_bytes for t in tensors)
