"""Apply gradients of workers as they come, and answer with the parameters. Nothing here waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from hvd_compress import wire
from hvd_compress.async_server.answers import AnswersOfServer
from hvd_compress.async_server.connection import Bytes, Connection
from hvd_compress.async_server.message import HEADER_BYTES, Kind, Message, open_message, seal_message
from hvd_compress.async_server.settings import AsyncServerSettings
from hvd_compress.async_server.stats import ServerTally
from hvd_compress.async_server.values import Array, Values
from hvd_compress.errors import WireError
from hvd_compress.exchange import aligned_empty
from hvd_compress.kernels.common import all_finite
from hvd_compress.tensors import ParameterSpec

__all__ = ["Server"]


class Server:
    """Sends the first parameters to all workers when it is made; a worker is a number among `ranks`.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        values: the parameters.
        connections: to each worker.
        ranks: of the workers.
        clock: returns seconds, as `time.monotonic` does.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        settings: AsyncServerSettings,
        values: Values,
        connections: Sequence[Connection],
        ranks: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.clocks = settings.rule.clocks(len(connections), clock())
        self.tally = ServerTally(ranks)
        self.on_update: Callable[[int], object] | None = None
        """Called with the number of updates after each of them."""
        self._clock = clock
        self._tensors = tensors
        self._values = values
        self._connections = connections
        self._ranks = ranks
        self._patience = settings.patience
        self._compressors = settings.for_gradients(tensors)
        self._gradients = [np.empty(t.numel, t.dtype) for t in tensors]
        # each worker gets a buffer of its own, since its last answer may be under way for long
        compressors = settings.for_answers(tensors)
        self._answers = [AnswersOfServer(tensors, compressors, rank, len(ranks) + 1) for rank in ranks]
        self._buffers = [aligned_empty(settings.answer_bytes(tensors), np.uint8) for _ in connections]
        self._numbers = [0] * len(connections)
        self._outcomes = [Kind.APPLIED] * len(connections)
        self._has_left = [False] * len(connections)
        self._farewell: Kind | None = None
        self._listened_at = clock()
        for worker in range(len(connections)):
            self._answer(worker, Kind.APPLIED)

    @property
    def is_over(self) -> bool:
        """Whether all workers have finished, but for those that were given up."""
        return self.clocks.is_over

    @property
    def is_alone(self) -> bool:
        """Whether each worker has said that it has finished, so that no message is under way."""
        return all(self._has_left)

    def turn(self) -> bool:
        """Do what can be done now; returns whether anything was done.

        Raises:
            WireError: a damaged message, or one that does not follow the last one of its worker.
        """
        self._excuse()
        has_moved = False
        for worker, connection in enumerate(self._connections):
            message = None if self._has_left[worker] else connection.receive()
            if message is not None:
                has_moved = True
                self._read(worker, message)
                self._release()
        if has_moved or self._farewell is not None:
            return has_moved
        # a worker whose message lay here during a long update has not been silent
        given_up = self.clocks.give_up(self._clock())
        for worker in given_up:
            self._tell_of(worker)
        self._release()
        return bool(given_up)

    def _excuse(self) -> None:
        # what arrives while this process stands still, or makes a long update, may need several turns to be seen here
        now = self._clock()
        away = now - self._listened_at
        if away > self._patience / 10:
            self.clocks.excuse(away)
        self._listened_at = now

    def say_farewell(self) -> None:
        """Apply no gradient from now on: tell workers that send one that it is over, or that the server failed."""
        self._farewell = Kind.OVER if self.is_over else Kind.FAILED
        for worker in self.clocks.give_answers():
            self._answer(worker, self._farewell)

    # -- messages of workers -----------------------------------------------------------------------------------------

    def _read(self, worker: int, received: Bytes) -> None:
        self.tally.workers[worker].bytes_received += received.size
        try:
            message = open_message(received, len(self._tensors))
            if message.kind is Kind.FINISHED:
                self._has_left[worker] = True
                self.clocks.finish(worker)
            elif message.kind in (Kind.GRADIENT, Kind.BAD_GRADIENT):
                self._take(worker, message)
            else:
                raise WireError(f"a worker sends no {message.kind.name}")
        except WireError as error:
            raise WireError(f"message of rank {self._ranks[worker]} to the server: {error}") from error

    def _take(self, worker: int, message: Message) -> None:
        expected = self._numbers[worker] + 1
        if message.number != expected or message.version > self.clocks.version:
            raise WireError(
                f"gradient {message.number} of version {message.version} came where gradient {expected} of at most "
                f"version {self.clocks.version} was expected"
            )
        self._numbers[worker] = expected
        if self._farewell is not None:
            self._answer(worker, self._farewell)
            return
        arrival = self.clocks.arrive(worker, message.version, self._clock())
        tally = self.tally.workers[worker]
        tally.returned += arrival.returns
        if not arrival.is_accepted:
            self._outcomes[worker] = Kind.TOO_STALE
            tally.too_stale += 1
            return
        gradients = self._decoded(message)
        if gradients is None:
            self._outcomes[worker] = Kind.NOT_FINITE
            tally.not_finite += 1
            return
        self._outcomes[worker] = Kind.APPLIED
        self._values.update(gradients)
        self.clocks.count_update()
        tally.staleness[arrival.staleness] += 1
        if self.on_update is not None:
            self.on_update(self.clocks.version)

    def _decoded(self, message: Message) -> list[Array | None] | None:
        """Decode the gradients of a message; returns None if one of them is not finite."""
        if message.kind is Kind.BAD_GRADIENT:
            return None
        gradients: list[Array | None] = []
        for tensor, compressor, payload, out in zip(
            self._tensors, self._compressors, message.payloads, self._gradients, strict=True
        ):
            try:
                header, body = wire.open_payload(payload)
                is_finite = compressor.decode_opened(header, body, out)
            except WireError as error:
                raise WireError(f"{tensor.name!r}: {error}") from error
            # half precision overflows without telling
            if not is_finite or not all_finite(out):
                return None
            gradients.append(None if header.absent else out)
        return gradients

    # -- answers -----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        for worker in self.clocks.release(self._clock()):
            self._answer(worker, self._outcomes[worker])

    def _answer(self, worker: int, kind: Kind) -> None:
        connection, buffer = self._connections[worker], self._buffers[worker]
        # a worker that has sent a gradient has got its last answer, but MPI wants to be asked all the same
        connection.flush()
        number, used, payloads = self._numbers[worker], 0, 0
        if kind is not Kind.FAILED:
            used = self._answers[worker].encode(self._values.arrays(), number, buffer[HEADER_BYTES:])
            payloads = len(self._tensors)
        message = seal_message(buffer, HEADER_BYTES + used, kind, number, self.clocks.version, payloads)
        connection.send(message)
        self.tally.workers[worker].bytes_sent += message.size

    def _tell_of(self, worker: int) -> None:
        self.tally.workers[worker].given_up += 1
        warnings.warn(
            f"rank {self._ranks[worker]} has sent no gradient for more than patience={self._patience:g} seconds, and "
            "the others wait for it no longer. It takes part again when it sends one. If its steps take so long, raise "
            "patience",
            RuntimeWarning,
            stacklevel=2,
        )
