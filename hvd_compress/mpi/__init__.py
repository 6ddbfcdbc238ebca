"""Send messages straight over MPI, beside Horovod or without it; nobody has to wait for them."""

from __future__ import annotations

from hvd_compress.mpi.async_server import AsyncParameterServer, join_server
from hvd_compress.mpi.root_messages import Channel
from hvd_compress.mpi.start import communicator, start_one_sided, start_root_messages

__all__ = [
    "AsyncParameterServer",
    "Channel",
    "communicator",
    "join_server",
    "start_one_sided",
    "start_root_messages",
]
