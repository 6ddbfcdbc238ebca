"""Start the ranks of units, and do what a rank does for one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.system import terminated_as_exit
from places import UNLIMITED, Place, Progress, local, place, rates_to_be_had

from .experiments import EXPERIMENTS
from .store import Store
from .unit import Unit

__all__ = ["run", "started", "work"]


def run(
    name: str, units: Sequence[Unit], store: Store, command: Sequence[str], fresh: bool = False, jobs: int = 1
) -> list[str]:
    """Make the records that are missing; each is written when its unit ends.

    Args:
        name: of the experiment.
        units: of the experiment.
        store: keeps the records.
        command: the command that records name.
        fresh: whether to make all records anew.
        jobs: how many units are started at the same time; those on links with a rate follow one by one.

    Returns:
        What has failed, in words, with what its ranks wrote last; the other units are made nevertheless.
    """
    units = [_possible(unit) for unit in units]
    if fresh:
        for unit in units:
            store.forget(unit)
            shutil.rmtree(_scratch(unit), ignore_errors=True)
    missing = store.missing(units)
    if len(missing) < len(units):
        print(f"{name}: {len(units) - len(missing)} of {len(units)} are recorded; --fresh makes them again", flush=True)
    here, on_links = ([unit for unit in missing if _is_local(unit) == wanted] for wanted in (True, False))
    with Progress(name, sum(unit.marks for unit in missing)) as progress:

        def made(unit: Unit) -> str | None:
            begin = time.monotonic()
            try:
                result = started(unit, progress.part(_said(unit)))
            except Exception as error:
                # whatever it is, other units are not to be lost
                progress.say(f"{_said(unit)}: failed after {time.monotonic() - begin:.0f} s")
                return f"{name}, {_said(unit)}: {error}"
            seconds = time.monotonic() - begin
            store.write(unit, result, seconds, command)
            shutil.rmtree(_scratch(unit), ignore_errors=True)
            if jobs > 1:
                progress.say(f"{_said(unit)}: recorded after {seconds:.0f} s")
            return None

        problems = [*_at_once(made, here, jobs, progress), *map(made, on_links)]
    return [problem for problem in problems if problem is not None]


def _at_once(
    made: Callable[[Unit], str | None], units: Sequence[Unit], jobs: int, progress: Progress
) -> list[str | None]:
    if jobs == 1:
        return list(map(made, units))
    with terminated_as_exit(), ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(made, units))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            progress.end()
            raise


def _said(unit: Unit) -> str:
    """Name a unit as progress and failures do."""
    seed = unit.settings.get("seed", 0)
    return f"{unit.label}, seed {seed}" if seed else unit.label


def started(unit: Unit, progress: Progress) -> Any:
    """Return what the ranks of a unit deliver.

    Raises:
        RunError: a rank failed.
    """
    task = {
        "experiment": unit.experiment, "settings": dict(unit.settings), "ranks": unit.ranks,
        "scratch": str(_scratch(unit)),
    }  # fmt: skip

    def ranks_of(here: Place) -> Any:
        # settings of Open MPI, which mpirun hands on to all ranks
        mpi = {f"OMPI_MCA_{name}": str(value) for name, value in unit.settings.get("mpi", {}).items()}
        return here.run(str(Path(__file__).parent), task, unit.rate or UNLIMITED, env=mpi)

    if _is_local(unit):
        return ranks_of(local(unit.ranks, progress))
    with place(unit.ranks, progress) as here:
        return ranks_of(here)


def work(task: dict[str, Any]) -> None:
    """Do a rank's part of a unit."""
    import ranks

    import hvd_compress.torch as hvd

    from .checkpoint import Checkpoint

    hvd.init()
    if hvd.size() != task["ranks"]:
        raise RuntimeError(
            f"{hvd.size()} ranks have met, of {task['ranks']}: a Horovod without MPI cannot be started by mpirun; take "
            "mpirun off PATH, and ranks are started over Gloo"
        )
    result = EXPERIMENTS[task["experiment"]].work(task["settings"], Checkpoint(Path(task["scratch"])))
    ranks.deliver(task, result)


def _is_local(unit: Unit) -> bool:
    return unit.rate in (None, UNLIMITED)


def _possible(unit: Unit) -> Unit:
    """Return the unit as this machine can run it, whose links may be unlimited only."""
    if unit.rate is None or rates_to_be_had([unit.rate]):
        return unit
    return unit.with_rate(UNLIMITED)


def _scratch(unit: Unit) -> Path:
    """Return where the ranks of a unit keep what they need to go on after an interruption."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hvd_compress" / "reproduce" / unit.key
