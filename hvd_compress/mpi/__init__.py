"""What goes straight over MPI, beside Horovod or without it: messages that nobody has to wait for."""

from __future__ import annotations

from hvd_compress.mpi.async_server import AsyncParameterServer, join_server
from hvd_compress.mpi.collectives import HorovodRanks

__all__ = ["AsyncParameterServer", "HorovodRanks", "join_server"]
