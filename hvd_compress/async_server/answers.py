"""Send the server's parameters to a worker: whole, or as the compressed difference to what the worker has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.compressors.base import NOT_FINITE_WITHOUT_A_WORD
from hvd_compress.errors import WireError
from hvd_compress.gossip.copies import Copies
from hvd_compress.kernels.common import all_finite
from hvd_compress.tensors import ParameterSpec

__all__ = ["AnswersOfServer", "AnswersOfWorker"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_RAW = NoCompression()


class AnswersOfServer:
    """Encodes the parameters for one worker; of tensors with a compressor it keeps what that worker has.

    Args:
        tensors: the same on all ranks.
        compressors: of each tensor.
        position: of the worker, which keys randomness.
        size: number of ranks.
    """

    def __init__(
        self, tensors: Sequence[ParameterSpec], compressors: Sequence[Compressor], position: int, size: int
    ) -> None:
        # beyond all ranks: the worker's gradients are keyed by its own position
        self._copies = Copies(tensors, compressors, senders=0, position=size + position, keeps_own=False)

    def encode(self, parameters: Sequence[Array], number: int, buffer: Bytes) -> int:
        """Write the payloads into the start of `buffer`, the first ones whole, and return the number of bytes used."""
        at = 0
        for i, x in enumerate(parameters):
            at += self._copies.encode(i, x, number, buffer[at:])
        self._copies.needs_whole[:] = False
        return at


class AnswersOfWorker:
    """Decodes what `AnswersOfServer` has encoded.

    Args:
        tensors: the same on all ranks.
        compressors: of each tensor.
    """

    def __init__(self, tensors: Sequence[ParameterSpec], compressors: Sequence[Compressor]) -> None:
        self._tensors = tensors
        self._compressors = compressors
        # not the parameters themselves, which may have 16 bits, and which the user may change
        self._copies = [
            None if c == _RAW else np.zeros(t.numel, t.dtype) for t, c in zip(tensors, compressors, strict=True)
        ]

    def decode(self, payloads: Sequence[Bytes], parameters: Sequence[Array]) -> None:
        """Write the server's parameters into flat arrays.

        Raises:
            WireError: a damaged payload, or one of another compressor or size; then nothing is written, unless it is
                the values that are wrong.
        """
        opened = [self._open(i, payload) for i, payload in enumerate(payloads)]
        for i, ((header, body), x) in enumerate(zip(opened, parameters, strict=True)):
            compressor, copy = self._compressors[i], self._copies[i]
            try:
                if copy is None:
                    _RAW.decode_opened(header, body, x)
                    continue
                if header.codec == _RAW.codec:
                    says_finite = _RAW.decode_opened(header, body, copy)
                else:
                    factor = compressor.contraction(copy.size)
                    says_finite = compressor.decode_opened(header, body, copy, factor, add=True)
                # values that travel as they are replace the copy; a difference would never mend it
                if header.codec != _RAW.codec and says_finite and not all_finite(copy):
                    raise WireError(NOT_FINITE_WITHOUT_A_WORD)
            except WireError as error:
                raise WireError(f"{self._tensors[i].name!r}: {error}") from error
            x[...] = copy

    def _open(self, i: int, payload: Bytes) -> tuple[wire.Header, wire.Sections]:
        try:
            return wire.open_payload(payload)
        except WireError as error:
            raise WireError(f"{self._tensors[i].name!r}: {error}") from error
