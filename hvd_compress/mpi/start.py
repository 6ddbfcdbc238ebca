"""Whether this run can do without Horovod's collectives, and with which communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.gossip import Node, Transport
from hvd_compress.mpi.root_messages import RootMessages
from hvd_compress.topology import Neighbours

__all__ = ["start_one_sided", "start_root_messages"]

_NO_MPI4PY = -1


def start_one_sided(
    hvd: Any, node: Node, parts: Sequence[Neighbours], gathered: Callable[[int], Sequence[int]]
) -> Transport:
    """The transport "one_sided" among the ranks of a process set; a collective call.

    Args:
        hvd: Horovod for a framework, started.
        node: of this rank.
        parts: of all ranks of the process set.
        gathered: a number of this rank -> those of all ranks of the process set.

    Raises:
        UnsupportedError: Horovod runs without MPI, or MPI without threads; mpi4py is missing on a rank.
    """
    mpi, comm = _communicator(hvd, "one_sided", "alltoall", gathered)

    from hvd_compress.mpi.one_sided import OneSided

    return OneSided(node, parts, mpi, comm)


def start_root_messages(hvd: Any, gathered: Callable[[int], Sequence[int]]) -> RootMessages:
    """The transport "mpi" of `ParameterServer` among the ranks of a process set; a collective call.

    Args:
        hvd: Horovod for a framework, started.
        gathered: a number of this rank -> those of all ranks of the process set.

    Raises:
        UnsupportedError: as `start_one_sided`.
    """
    return RootMessages(*_communicator(hvd, "mpi", "horovod", gathered))


def _communicator(hvd: Any, transport: str, instead: str, gathered: Callable[[int], Sequence[int]]) -> tuple[Any, Any]:
    """The module `mpi4py.MPI` and a new communicator of the ranks of a process set."""
    if not hvd.mpi_enabled():
        raise UnsupportedError(
            f'transport="{transport}" needs MPI, and this run uses Gloo. Start it with mpirun or horovodrun --mpi, or '
            f'use transport="{instead}"'
        )
    if not hvd.mpi_threads_supported():
        raise UnsupportedError(
            f'transport="{transport}" needs an MPI that several threads may call: Horovod calls it from its own '
            f'thread. Use transport="{instead}"'
        )
    # ranks of Horovod are those of MPI only if hvd.init() was given nothing else
    everyone = gathered(_rank_in_world())
    if _NO_MPI4PY in everyone:
        missing = [rank for rank, number in enumerate(everyone) if number == _NO_MPI4PY]
        raise UnsupportedError(
            f'transport="{transport}" needs mpi4py, which ranks {missing} do not have: pip install "hvd_compress[mpi]"'
        )
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return MPI, world.Create_group(world.group.Incl(list(everyone)))


def _rank_in_world() -> int:
    try:
        from mpi4py import MPI
    except ImportError:
        return _NO_MPI4PY
    return int(MPI.COMM_WORLD.rank)
