"""What goes straight over MPI, beside Horovod: messages that the receiver takes no part in."""

from __future__ import annotations

from hvd_compress.mpi.collectives import HorovodRanks

__all__ = ["HorovodRanks"]
