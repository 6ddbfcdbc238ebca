"""Send messages straight over MPI, beside Horovod or without it; nobody has to wait for them."""

from __future__ import annotations

from hvd_compress.mpi.async_server import AsyncParameterServer, join_server
from hvd_compress.mpi.collectives import HorovodRanks
from hvd_compress.mpi.root_messages import Channel, Pending

__all__ = [
    "AsyncParameterServer",
    "Channel",
    "HorovodRanks",
    "Pending",
    "join_server",
]
