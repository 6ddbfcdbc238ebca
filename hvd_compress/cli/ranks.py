"""Real ranks, through whichever of horovod.torch and horovod.tensorflow is there."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

from hvd_compress.errors import MissingError, UnsupportedError
from hvd_compress.exchange import Hosts
from hvd_compress.missing import missing_horovod
from hvd_compress.ranks import Ranks

__all__ = ["OpenRanks", "is_launched", "launched", "open_ranks", "ranks_of"]

# what horovodrun with Gloo, mpirun of Open MPI, MPICH and their kin, and srun tell the processes that they start
_VARIABLES = {
    "rank": ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "size": ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "local rank": ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "local size": ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_OF_ANY_STEP = ("PMI_RANK", "PMIX_RANK")
"""A shell that srun started has these, too, and what is typed there is no rank."""
_FRAMEWORKS = {"torch": "TorchRanks", "tensorflow": "TensorFlowRanks"}


def launched(what: str) -> int:
    """What a launcher told this process of itself and the others; without one, what is true of a lone process.

    Args:
        what: "rank", "size", "local rank" or "local size".
    """
    found = next((os.environ[n] for n in _VARIABLES[what] if os.environ.get(n, "").isdigit()), None)
    return int(found) if found is not None else int(what.endswith("size"))


def is_launched() -> bool:
    """Whether horovodrun, mpirun or srun started this process as one of several, or a launcher of one rank did."""
    found = [name for name in _VARIABLES["rank"] if name in os.environ]
    may_be_shell = "SLURM_STEP_NUM_TASKS" in os.environ and launched("size") == 1
    return any(name not in _OF_ANY_STEP for name in found) or (bool(found) and not may_be_shell)


class OpenRanks(NamedTuple):
    """All ranks of a run, as the command line knows them.

    Args:
        framework: "torch" or "tensorflow".
        ranks: their collectives.
        hosts: which of them share a host; None where hosts have different numbers of them, so no hierarchy to speak of.
    """

    framework: str
    ranks: Ranks
    hosts: Hosts | None

    @property
    def per_host(self) -> int:
        """How many ranks share a host; 1 where their numbers differ."""
        return 1 if self.hosts is None else self.hosts.per_host


def ranks_of(framework: str) -> OpenRanks:
    """Start Horovod for a framework; a collective call.

    Raises:
        MissingError: the framework, or Horovod for it.
    """
    try:
        # horovod.torch alone can be imported where it was built without torch
        importlib.import_module(f"horovod.{framework}.mpi_ops")
        hvd: Any = importlib.import_module(f"horovod.{framework}")
    except Exception as error:
        raise missing_horovod(framework, error) from error
    hvd.init()
    ranks: Ranks = getattr(importlib.import_module(f"hvd_compress.{framework}._ranks"), _FRAMEWORKS[framework])()
    try:
        return OpenRanks(framework, ranks, Hosts.of_names(ranks.host_numbers()))
    except UnsupportedError:
        return OpenRanks(framework, ranks, None)


def open_ranks() -> OpenRanks:
    """Start Horovod; a collective call.

    Raises:
        MissingError: Horovod is there for neither framework.
    """
    reasons = []
    for framework in _FRAMEWORKS:
        try:
            return ranks_of(framework)
        except MissingError as error:
            reasons.append(str(error))
    raise MissingError(
        "real ranks need Horovod, built for PyTorch or TensorFlow; `hvd-compress check` says what is missing. "
        + "; or ".join(reasons)
    )
