"""Run an asynchronous parameter server on NumPy arrays: workers send gradients and do not wait for each other.

A worker sends a gradient, goes on with the parameters it has, and waits only for the answer to its last gradient
before it sends the next. The server applies each gradient as it comes, and holds back the answers of workers that are
too far ahead (`schedules.BoundedStaleness`). A `Connection` carries messages between the server and one worker; nothing
here knows MPI.
"""

from __future__ import annotations

from hvd_compress.async_server.connection import Connection, QueueConnection, queue_connections
from hvd_compress.async_server.member import ServerMember, wait_until
from hvd_compress.async_server.server import Server
from hvd_compress.async_server.settings import AsyncServerSettings
from hvd_compress.async_server.values import Array, Values
from hvd_compress.async_server.worker import Worker

__all__ = [
    "Array",
    "AsyncServerSettings",
    "Connection",
    "QueueConnection",
    "Server",
    "ServerMember",
    "Values",
    "Worker",
    "queue_connections",
    "wait_until",
]
