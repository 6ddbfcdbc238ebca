"""Real ranks, through whichever of horovod.torch and horovod.tensorflow is there."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.cost import HorovodCollectives
from hvd_compress.errors import MissingError, UnsupportedError
from hvd_compress.exchange import Hosts
from hvd_compress.missing import missing_horovod

__all__ = ["Ranks", "is_launched", "launched", "open_ranks"]

Array = npt.NDArray[Any]

# what horovodrun with Gloo, and mpirun of Open MPI, MPICH and their kin, tell the processes that they start
_VARIABLES = {
    "rank": ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "size": ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local rank": ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "local size": ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_FRAMEWORKS = ("torch", "tensorflow")


def launched(what: str) -> int:
    """What a launcher told this process of itself and the others; without one, what is true of a lone process.

    Args:
        what: "rank", "size", "local rank" or "local size".
    """
    found = next((os.environ[n] for n in _VARIABLES[what] if os.environ.get(n, "").isdigit()), None)
    return int(found) if found is not None else int(what.endswith("size"))


def is_launched() -> bool:
    """Whether horovodrun or mpirun started this process."""
    return any(name in os.environ for name in _VARIABLES["rank"])


class Ranks(HorovodCollectives):
    """Blocking collectives on NumPy arrays, and those of `hvd_compress.cost.Collectives` for measuring.

    Args:
        framework: "torch" or "tensorflow".

    Raises:
        MissingError: the framework, or Horovod for it.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework
        try:
            # horovod.torch alone can be imported where it was built without torch
            importlib.import_module(f"horovod.{framework}.mpi_ops")
            hvd: Any = importlib.import_module(f"horovod.{framework}")
        except Exception as error:
            raise missing_horovod(framework, error) from error
        module: Any = importlib.import_module(framework)
        hvd.init()
        super().__init__(hvd, module.from_numpy if framework == "torch" else module.constant)
        self.local_size: int = hvd.local_size()
        self.hosts = self._found_hosts()
        """Which ranks share a host; None where hosts have different numbers of them, so no hierarchy to speak of."""

    @property
    def ranks_per_host(self) -> int:
        """How many ranks share a host; 1 where their numbers differ."""
        return 1 if self.hosts is None else self.hosts.per_host

    def _found_hosts(self) -> Hosts | None:
        try:
            return Hosts.of_names(self.host_numbers())
        except UnsupportedError:
            return None

    def allgather(self, array: Array, name: str) -> Array:
        """All ranks' arrays, joined along the first axis."""
        gathered: Array = self._hvd.allgather(self._tensor(array), name=f"hvd_compress.cli.{name}").numpy()
        return gathered

    def alltoall(self, array: Array, splits: list[int], name: str) -> Array:
        """The parts of all ranks for this one; `splits` are the sizes of this rank's parts."""
        sizes = self._tensor(np.array(splits, np.int32))
        received = self._hvd.alltoall(self._tensor(array), splits=sizes, name=f"hvd_compress.cli.{name}")
        joined: Array = received[0].numpy()
        return joined


def open_ranks() -> Ranks:
    """Start Horovod; a collective call.

    Raises:
        MissingError: Horovod is there for neither framework.
    """
    reasons = []
    for framework in _FRAMEWORKS:
        try:
            return Ranks(framework)
        except MissingError as error:
            reasons.append(str(error))
    raise MissingError(
        "real ranks need Horovod, built for PyTorch or TensorFlow; `hvd-compress check` says what is missing. "
        + "; or ".join(reasons)
    )
