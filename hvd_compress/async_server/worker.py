"""Run a worker of an asynchronous parameter server; nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.async_server.answers import AnswersOfWorker
from hvd_compress.async_server.connection import Connection
from hvd_compress.async_server.gradient_encoder import GradientEncoder
from hvd_compress.async_server.message import HEADER_BYTES, Kind, Message, open_message, seal_message
from hvd_compress.async_server.settings import AsyncServerSettings
from hvd_compress.async_server.stats import WorkerTally
from hvd_compress.async_server.values import Array, Values
from hvd_compress.errors import HvdCompressError, WireError
from hvd_compress.exchange import aligned_empty
from hvd_compress.tensors import ParameterSpec

__all__ = ["Worker"]


class Worker:
    """Sends gradients and takes answers, one of each under way at a time; the first answer comes without a gradient.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        values: the parameters of this rank.
        connection: to the server.
        position: of this rank.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        settings: AsyncServerSettings,
        values: Values,
        connection: Connection,
        position: int,
    ) -> None:
        self.encoder = GradientEncoder(tensors, settings.for_gradients(tensors), position)
        self.tally = WorkerTally()
        self.version = 0
        """The version of the parameters that this rank has."""
        self.number = 0
        """The number of the last gradient that was sent; 0 before the first."""
        self.is_waiting = True
        """Whether an answer is to come."""
        self.is_over = False
        """Whether the others have finished without this rank."""
        self._answers = AnswersOfWorker(tensors, settings.for_answers(tensors))
        self._values = values
        self._connection = connection
        self._position, self._server = position, settings.server
        self._count = len(tensors)
        self._dense_bytes = settings.answer_bytes(tensors)
        self._buffer = aligned_empty(settings.gradient_bytes(tensors), np.uint8)
        self._farewell = aligned_empty(HEADER_BYTES, np.uint8)

    def send(self, gradients: Sequence[Array | None], computed_from: int) -> None:
        """Send gradients; no answer may be outstanding.

        Args:
            gradients: flat, not changed; None where there is none.
            computed_from: `version` as it was then.
        """
        # the answer to the last gradient means that it has arrived, but MPI wants to be asked all the same
        self._connection.flush()
        self.number += 1
        used = self.encoder.encode(gradients, self._buffer[HEADER_BYTES:])
        kind = Kind.BAD_GRADIENT if used is None else Kind.GRADIENT
        payloads = 0 if used is None else self._count
        message = seal_message(self._buffer, HEADER_BYTES + (used or 0), kind, self.number, computed_from, payloads)
        self._connection.send(message)
        self.is_waiting = True
        self.tally.steps += 1
        self.tally.bytes_sent += message.size
        self.tally.dense_bytes_sent += self._dense_bytes

    def poll(self) -> bool:
        """Take over the answer if it has come; returns True if none is outstanding any more.

        Raises:
            WireError: a damaged answer.
            HvdCompressError: the server has failed.
        """
        if not self.is_waiting:
            return True
        received = self._connection.receive()
        if received is None:
            return False
        self.is_waiting = False
        try:
            self._take(open_message(received, self._count))
        except WireError as error:
            raise WireError(f"rank {self._position}, answer of the server, rank {self._server}: {error}") from error
        self.tally.bytes_received += received.size
        self.tally.dense_bytes_received += self._dense_bytes
        return True

    def finish(self) -> None:
        """Say that no gradient follows; the server then sends an outstanding answer at once."""
        self._connection.send(seal_message(self._farewell, HEADER_BYTES, Kind.FINISHED, self.number, self.version, 0))

    def _take(self, answer: Message) -> None:
        if answer.number != self.number or answer.kind < Kind.APPLIED or answer.version < self.version:
            raise WireError(
                f"{answer.kind.name} of number {answer.number} and version {answer.version} after gradient "
                f"{self.number} and version {self.version}"
            )
        if answer.kind is Kind.FAILED:
            self.is_over = True
            raise HvdCompressError(
                f"the parameter server, rank {self._server}, has ended before its workers: either it has failed and "
                "says why, or close() was called there before serve() had returned"
            )
        arrays = self._values.arrays()
        self._answers.decode(answer.payloads, arrays)
        self._values.take(arrays)
        self.version = answer.version
        self._settle(answer.kind)

    def _settle(self, kind: Kind) -> None:
        """Renew residuals, depending on what has become of the gradient."""
        if kind is Kind.NOT_FINITE:
            self.tally.not_finite += 1
            self.encoder.take_back()
        elif kind in (Kind.TOO_STALE, Kind.OVER):
            self.tally.too_stale += 1
            self.encoder.owe()
        self.is_over = kind is Kind.OVER
