"""The course of an elastic run with compression, by stages: how many ranks, for how many steps, and how it came.

Each process writes a file of lines: when it enters the training, before each step, and after it, with a digest of the
parameters and what it owes.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DOOMED", "SCENARIOS", "Run", "Stage", "change_hosts", "die"]

DOOMED = "127.0.0.1"


class Stage(NamedTuple):
    """Until `steps` were made by `ranks`; when it begins, hosts change, and the rank on `DOOMED` may end."""

    ranks: int
    steps: int
    here: int  # slots of localhost
    doomed: int = 0  # slots of `DOOMED`
    dies: str = ""  # when: "before" a step, or in the "middle" of its backward pass


SCENARIOS = {
    # one dies and another joins at once
    "replace": [Stage(2, 4, 1, 1), Stage(2, 5, 2, 1, "before")],
    # the same, with two that stay
    "three": [Stage(3, 4, 2, 1), Stage(3, 5, 3, 1, "middle")],
    # one dies, the other goes on alone, and is joined
    "alone": [Stage(2, 4, 1, 1), Stage(1, 4, 1, 1, "middle"), Stage(2, 5, 2, 1)],
    # one joins, and one is told to go
    "asked": [Stage(2, 4, 2), Stage(3, 4, 3), Stage(2, 4, 2)],
}
_STEP_SECONDS = 0.02


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def change_hosts(folder: Path, stage: Stage) -> None:
    """Tell the driver, which looks each second, of the hosts of a stage."""
    text = f"{DOOMED}:{stage.doomed}\n" * bool(stage.doomed) + f"localhost:{stage.here}\n" * bool(stage.here)
    new = folder / f"hosts.{os.getpid()}"
    new.write_text(text)
    new.replace(folder / "hosts")


class Run:
    """One process of a run; workers fill in how their framework trains.

    Args:
        hvd: the package under test, for a framework.
        scenario: of `SCENARIOS`.
        folder: for the file of this process, and that of the hosts.
        sums: whether gradients are summed up, and not averaged.
    """

    def __init__(self, hvd: Any, scenario: str, folder: Path, sums: bool = False) -> None:
        self.hvd, self.stages, self.folder, self._sums = hvd, SCENARIOS[scenario], folder, sums
        self.lines = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self._is_doomed = os.environ["HOROVOD_HOSTNAME"] == DOOMED

    # -- of a framework ----------------------------------------------------------------------------------------------

    def values(self) -> list[Any]:
        """The parameters, as NumPy arrays."""
        raise NotImplementedError

    def states(self) -> list[dict[str, Any]]:
        """What this rank owes."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Of compression, with what was lost."""
        raise NotImplementedError

    # -- notes -------------------------------------------------------------------------------------------------------

    def note(self, at: str, state: Any, **more: Any) -> None:
        """Write a line."""
        states, stats = self.states(), self.stats()
        digest = zlib.crc32(b"".join(value.tobytes() for value in self.values()))
        line = {
            "at": at, "step": state.step, "ranks": self.hvd.size(), "rank": self.hvd.rank(), "digest": digest,
            "worth": _worth(states, self._sums), "norm": float(np.hypot.reduce([0.0, *map(_norm, states)])),
            "lost_norm": stats["lost_norm"], "lost_ranks": stats["lost_ranks"],
            "squares": _squares(states), "compresses": _compresses(stats), **more,
        }  # fmt: skip
        self.lines.write(json.dumps(line) + "\n")

    def end(self, state: Any) -> None:
        """Write the last line."""
        self.lines.write(json.dumps({"at": "end", "step": state.step}) + "\n")
        self.lines.close()

    # -- the course --------------------------------------------------------------------------------------------------

    def is_over(self, state: Any) -> bool:
        """Whether all stages are over."""
        return bool(state.stage >= len(self.stages))

    def dies(self, state: Any, when: str) -> bool:
        """Whether this process is to end at this point of a step."""
        return self._is_doomed and not self.is_over(state) and self.stages[state.stage].dies == when

    def count(self, state: Any, loss: float) -> None:
        """A step was made; the next one may be of another stage."""
        time.sleep(_STEP_SECONDS)
        state.step += 1
        stage = self.stages[state.stage]
        state.made += self.hvd.size() == stage.ranks
        if state.made >= stage.steps:
            state.stage, state.made = state.stage + 1, 0
            if self.hvd.rank() == 0 and not self.is_over(state):
                change_hosts(self.folder, self.stages[state.stage])
        self.note("made", state, loss=loss)


def _worth(states: list[dict[str, Any]], sums: bool) -> list[float]:
    """What this rank owes, as three numbers that add up over ranks: in units of the update."""
    numbers = np.zeros(3)
    for state in states:
        for kind in ("residuals",) if "accumulators" in state else ("residuals", "owner_residuals"):
            for name, entry in sorted(state[kind].items()):
                values, start = np.asarray(entry["values"], np.float64), entry.get("start", 0)
                random = np.random.default_rng(zlib.crc32(name.encode()))
                looks = random.normal(size=(int(np.prod(entry["shape"])), 3))[start : start + values.size]
                # a state that was not taken up yet is still in units of the ranks that were there before
                numbers += values @ looks / (1 if sums else state["size"])
    return [float(number) for number in numbers]


def _norm(state: dict[str, Any]) -> float:
    kinds = ("residuals",) if "accumulators" in state else ("residuals", "owner_residuals")
    values = [np.asarray(e["values"], np.float64) for kind in kinds for e in state[kind].values()]
    return float(np.sqrt(sum(np.square(v).sum() for v in values)))


def _squares(states: list[dict[str, Any]]) -> float:
    """With AdaGrad, the sum over the accumulators that this rank keeps of the compressed tensors."""
    entries = [e for state in states for e in state.get("accumulators", {}).values() if len(e["shape"]) == 2]
    return float(sum(np.asarray(e["values"], np.float64).sum() for e in entries))


def _compresses(stats: dict[str, Any]) -> bool:
    """Whether something is owed after a step; of what `Auto` has found faster uncompressed, nothing is."""
    buckets = stats.get("auto", {}).get("buckets", [])
    return not buckets or any(bucket["choice"] not in ("none", "fp16") for bucket in buckets)
