"""Run one rank, server or worker, and wait where it has to."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_compress import feedback
from hvd_compress.async_server.connection import Connection
from hvd_compress.async_server.server import Server
from hvd_compress.async_server.settings import AsyncServerSettings
from hvd_compress.async_server.values import Array, Values
from hvd_compress.async_server.worker import Worker
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.tensors import ParameterSpec

__all__ = ["ServerMember", "wait_until"]

# naps last about as long as a message between hosts: MPI itself would spin on a core that others want
_NAP_SECONDS = 1e-4


class ServerMember:
    """Runs a rank of an asynchronous parameter server; on workers it waits for the server's parameters.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        values: the parameters of this rank.
        connections: by position: to all workers, or to the server.
        position: of this rank.
        size: number of ranks.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        settings: AsyncServerSettings,
        values: Values,
        connections: Mapping[int, Connection],
        position: int,
        size: int,
    ) -> None:
        server = settings.server
        self.is_server = position == server
        self._settings = settings
        self._position, self._size = position, size
        self._ahead = settings.staleness > 0
        self.is_closed = False
        self._server: Server | None = None
        self._worker: Worker | None = None
        if self.is_server:
            workers = sorted(connections)
            self._connections = [connections[worker] for worker in workers]
            self._server = Server(tensors, settings, values, self._connections, workers, time.monotonic)
        else:
            self._connections = [connections[server]]
            self._worker = Worker(tensors, settings, values, connections[server], position)
            wait_until(self._worker.poll)

    @property
    def is_over(self) -> bool:
        """Whether gradients no longer count, since all workers, or all but this one, have finished."""
        return (self._server or self._the_worker).is_over

    @property
    def version(self) -> int:
        """The number of updates that the parameters of this rank contain."""
        return self._server.clocks.version if self._server else self._the_worker.version

    def serve(self, on_update: Callable[[int], object] | None = None) -> None:
        """Apply gradients, on the server, until all workers have finished that were not given up.

        Args:
            on_update: called with the number of updates after each of them.

        Raises:
            UnsupportedError: this rank is a worker.
            WireError: a damaged message.
        """
        server = self._server
        if server is None:
            raise UnsupportedError(
                f"serve() on rank {self._position}, which is a worker: call it where is_server is True, and step() here"
            )
        server.on_update = on_update
        while not server.is_over:
            if not server.turn():
                time.sleep(_NAP_SECONDS)

    def step(self, gradients: Callable[[], Sequence[Array | None]]) -> None:
        """Send a gradient, on a worker, once the last one is answered; the answer may bring newer parameters.

        Args:
            gradients: returns flat arrays, which are not changed; None where there is no gradient.

        Raises:
            UnsupportedError: this rank is the server.
            HvdCompressError: the server has failed.
        """
        if self._worker is None:
            raise UnsupportedError(
                f"step() on rank {self._position}, which is the server: call serve() where is_server is True, and "
                "train on the other ranks"
            )
        if self.is_closed:
            raise UnsupportedError(f"step() on rank {self._position} after close(): nobody takes gradients any more")
        if self._worker.is_over or self._exchanges(self._worker, gradients):
            return
        warnings.warn(
            f"rank {self._position} was silent for more than patience={self._settings.patience:g} seconds, and the "
            "other workers have finished since: its gradients are not applied any more",
            RuntimeWarning,
            stacklevel=3,
        )

    def close(self) -> None:
        """Say that this rank has finished; on the server, wait until all have said so.

        A worker that was given up is waited for here too: MPI cannot end without it.

        Raises:
            HvdCompressError: the server has failed.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self._server is not None:
                self._close_server(self._server)
            else:
                self._the_worker.finish()
                wait_until(self._the_worker.poll)
        finally:
            # an answer may say that the server has failed
            for connection in self._connections:
                connection.flush()

    def stats(self) -> dict[str, Any]:
        """See `server_stats` of the optimizer."""
        if self._server is not None:
            return self._server.tally.report(self._server.clocks.version, self._server.clocks.clocks)
        return self._the_worker.tally.report()

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank owes, in the form of `feedback`; a gradient under way counts as applied."""
        return {
            "format": feedback.FORMAT,
            "size": self._size,
            "rank": self._position,
            "steps": 0 if self._worker is None else self._worker.encoder.steps,
            "compressor": self._settings.compression.get_config(),
            "residuals": {} if self._worker is None else self._worker.encoder.state_dict(),
            "owner_residuals": {},
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: not such a state, or of another rank or other tensors.
        """
        state = feedback.check_state(state)
        if (state["size"], state["rank"]) != (self._size, self._position):
            raise StateError(
                f"state of rank {state['rank']} of {state['size']} given to rank {self._position} of {self._size}: a "
                "residual belongs to its worker. Load it there, or leave it out, which only drops what was owed"
            )
        if self._worker is not None:
            self._worker.encoder.load_state_dict(state["residuals"])
            self._worker.encoder.steps = state["steps"]

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _the_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def _exchanges(self, worker: Worker, gradients: Callable[[], Sequence[Array | None]]) -> bool:
        """Send a gradient and take answers; returns False if the others have finished."""
        # whatever comes now, the gradient was computed from what was there before
        computed_from = worker.version
        self._wait_for_answer(worker)
        if not worker.is_over:
            worker.send(gradients(), computed_from)
            if self._ahead:
                worker.poll()
            else:
                self._wait_for_answer(worker)
        return not worker.is_over

    def _wait_for_answer(self, worker: Worker) -> None:
        if worker.poll():
            return
        begin = time.perf_counter()
        wait_until(worker.poll)
        worker.tally.waited_steps += 1
        worker.tally.waited_seconds += time.perf_counter() - begin

    @staticmethod
    def _close_server(server: Server) -> None:
        server.say_farewell()

        def is_alone() -> bool:
            server.turn()
            return server.is_alone

        wait_until(is_alone)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, with naps between the tests."""
    while not holds():
        time.sleep(_NAP_SECONDS)
