"""What goes straight over MPI, beside Horovod: messages that the receiver takes no part in, or that go to one root."""

from __future__ import annotations

from hvd_compress.mpi.collectives import HorovodRanks
from hvd_compress.mpi.root_messages import Pending, RootMessages
from hvd_compress.mpi.start import start_root_messages

__all__ = ["HorovodRanks", "Pending", "RootMessages", "start_root_messages"]
