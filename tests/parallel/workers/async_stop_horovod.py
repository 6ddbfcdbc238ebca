"""`async_stop` beside Horovod, whose own thread waits in MPI for a worker that is stopped."""

from __future__ import annotations

from tests.parallel.workers.async_stop import main

__all__ = ["main"]
