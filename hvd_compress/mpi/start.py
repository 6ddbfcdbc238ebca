"""Find out whether this run can do without Horovod's collectives, and with which communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.errors import UnsupportedError
from hvd_compress.gossip import Node, Transport
from hvd_compress.mpi.root_messages import RootMessages
from hvd_compress.mpi.session import Session, session
from hvd_compress.ranks import Ranks
from hvd_compress.topology import Neighbours

__all__ = ["communicator", "start_one_sided", "start_root_messages"]

_NO_MPI4PY = -1

_messages: dict[tuple[int, ...], RootMessages] = {}
"""By the ranks, as MPI's world numbers them, that they go between."""


def start_one_sided(hvd: Any, ranks: Ranks, node: Node, parts: Sequence[Neighbours]) -> Transport:
    """Make the transport "one_sided" among the ranks of a process set; a collective call.

    Args:
        hvd: Horovod for a framework, started.
        ranks: of the process set.
        node: of this rank.
        parts: of all ranks of the process set.

    Raises:
        UnsupportedError: Horovod runs without MPI, or MPI without threads; mpi4py is missing on a rank.
    """
    mpi, comm = communicator(hvd, ranks, 'transport="one_sided"', "one-sided operations", 'transport="alltoall"')

    from hvd_compress.mpi.one_sided import OneSided

    return OneSided(node, parts, mpi, comm)


def start_root_messages(hvd: Any, ranks: Ranks) -> RootMessages:
    """Make the transport "mpi" of `ParameterServer` among the ranks of a process set; a collective call.

    Args:
        hvd: Horovod for a framework, started.
        ranks: of the process set.

    Raises:
        UnsupportedError: as `start_one_sided`.
    """
    mpi, comm = communicator(hvd, ranks, 'transport="mpi"', "messages between two ranks", 'transport="horovod"')
    with mpi:
        in_world = tuple(comm.group.Translate_ranks(range(comm.size), mpi.mpi.COMM_WORLD.group))
        # optimizers come and go, communicators are few, and freeing one would have to wait for all ranks
        if in_world in _messages:
            comm.Free()
        else:
            _messages[in_world] = RootMessages(mpi, comm)
    return _messages[in_world]


def communicator(hvd: Any, ranks: Ranks, asked: str, lacking: str, instead: str) -> tuple[Session, Any]:
    """Return MPI's session, and a communicator of the ranks of a process set alone; a collective call.

    Args:
        hvd: Horovod for a framework, started.
        ranks: of the process set.
        asked: what the user wants, for errors.
        lacking: what Gloo does not have.
        instead: what can be used without MPI.

    Raises:
        UnsupportedError: Horovod runs without MPI, or MPI without threads; mpi4py is missing on a rank.
    """
    if not hvd.mpi_enabled():
        raise UnsupportedError(
            f"{asked} needs MPI, and this run uses Gloo, which has no {lacking}. Start it with mpirun or horovodrun "
            f"--mpi, or use {instead}"
        )
    if not hvd.mpi_threads_supported():
        raise UnsupportedError(
            f"{asked} needs an MPI that several threads may call: Horovod calls it from its own thread. Use {instead}"
        )
    # ranks of Horovod are those of MPI only if hvd.init() was given nothing else; every rank has a session before any
    # goes on
    everyone = ranks.run("allgather", "hvd_compress.mpi", np.array([_rank_in_world()], np.int64)).tolist()
    if _NO_MPI4PY in everyone:
        missing = [rank for rank, number in enumerate(everyone) if number == _NO_MPI4PY]
        raise UnsupportedError(
            f"{asked} needs mpi4py with the MPI that Horovod uses, which ranks {missing} cannot load: "
            'pip install "hvd_compress[mpi]"'
        )
    mpi = session()
    with mpi:
        world = mpi.mpi.COMM_WORLD
        return mpi, world.Create_group(world.group.Incl(everyone))


def _rank_in_world() -> int:
    try:
        mpi = session()
    except (ImportError, RuntimeError):  # RuntimeError if it finds no MPI
        return _NO_MPI4PY
    with mpi:
        return int(mpi.mpi.COMM_WORLD.rank)
