"""Start the ranks of units, and do what a rank does for one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import RunError
from places import UNLIMITED, Place, Progress, local, place, rates_to_be_had

from .experiments import EXPERIMENTS
from .store import Store
from .unit import Unit

__all__ = ["run", "started", "work"]


def run(name: str, units: Sequence[Unit], store: Store, command: Sequence[str], fresh: bool = False) -> list[str]:
    """Make the records that are missing.

    Args:
        name: of the experiment.
        units: of the experiment.
        store: keeps the records.
        command: the command that records name.
        fresh: whether to make all records anew.

    Returns:
        What has failed, in words; the other units are made nevertheless.
    """
    units = [_possible(unit) for unit in units]
    if fresh:
        for unit in units:
            store.forget(unit)
            shutil.rmtree(_scratch(unit), ignore_errors=True)
    missing = store.missing(units)
    if len(missing) < len(units):
        print(f"{name}: {len(units) - len(missing)} of {len(units)} are recorded; --fresh makes them again", flush=True)
    failed = []
    with Progress(name, sum(unit.marks for unit in missing)) as progress:
        for unit in missing:
            begin = time.monotonic()
            try:
                result = started(unit, progress)
            except RunError as error:
                failed.append(f"{name}, {unit.label}: {error}")
                continue
            store.write(unit, result, time.monotonic() - begin, command)
            shutil.rmtree(_scratch(unit), ignore_errors=True)
    return failed


def started(unit: Unit, progress: Progress) -> Any:
    """Return what the ranks of a unit deliver.

    Raises:
        RunError: a rank failed.
    """
    task = {"experiment": unit.experiment, "settings": dict(unit.settings), "scratch": str(_scratch(unit))}

    def ranks_of(here: Place) -> Any:
        # settings of Open MPI, which mpirun hands on to all ranks
        mpi = {f"OMPI_MCA_{name}": str(value) for name, value in unit.settings.get("mpi", {}).items()}
        return here.run(str(Path(__file__).parent), task, unit.rate or UNLIMITED, env=mpi)

    if unit.rate in (None, UNLIMITED):
        return ranks_of(local(unit.ranks, progress))
    with place(unit.ranks, progress) as here:
        return ranks_of(here)


def work(task: dict[str, Any]) -> None:
    """Do a rank's part of a unit."""
    import ranks

    import hvd_compress.torch as hvd

    from .checkpoint import Checkpoint

    hvd.init()
    result = EXPERIMENTS[task["experiment"]].work(task["settings"], Checkpoint(Path(task["scratch"])))
    ranks.deliver(task, result)


def _possible(unit: Unit) -> Unit:
    """Return the unit as this machine can run it, whose links may be unlimited only."""
    if unit.rate is None or rates_to_be_had([unit.rate]):
        return unit
    return unit.with_rate(UNLIMITED)


def _scratch(unit: Unit) -> Path:
    """Return where the ranks of a unit keep what they need to go on after an interruption."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hvd_compress" / "reproduce" / unit.key
