"""What a rank of an elastic run with compression does, by stages: how many ranks, for how many steps, and how it came.

Arguments: setting, scenario, folder. Each process writes a file of lines: when it enters the training, before each
step, and after it, with a digest of the parameters and what it owes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, AdaGrad, Auto, OneBit, Policy, PowerSGD, TopK
from hvd_compress.torch._calls import CarriedCalls
from tests.parallel.rank import be_strict

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
SETTINGS: dict[str, dict[str, Any]] = {
    "onebit": {"compression": OneBit()},
    "topk": {"compression": TopK(0.1), "exchange": "allgather"},
    "sum": {"compression": OneBit(), "op": horovod.Sum},
    "policy": {"compression": Policy([("0.*", QSGD(bits=2)), ("*", OneBit())])},
    "auto": {"compression": Auto()},
    "adagrad": {"compression": OneBit(), "adagrad": AdaGrad()},
    "server": {"compression": OneBit(), "exchange": "parameter_server"},
    "powersgd": {"compression": PowerSGD(2)},
    "calls": {},
    # optimizers that exchange momentum
    "adam": {"make": lambda model: hvd.CompressedAdam(model.named_parameters(), lr=0.002, warmup_steps=2)},
    "demo": {"make": lambda model: hvd.DeMo(model.named_parameters(), lr=0.0005, k=4, chunk=16)},
    "dgc": {
        "make": lambda model: hvd.DGC(
            model.named_parameters(), lr=0.02, compression=TopK(0.05), warmup_steps=6, warmup_shares=(0.2, 0.1)
        )
    },
}
_SEED = 5
_STEP_SECONDS = 0.02


def model_of(seed: int) -> torch.nn.Module:
    """The network, of initial values that each process may have for itself."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 100))


def gradients(model: torch.nn.Module, step: int) -> float:
    """Those of this rank, of a function that all of them learn; returns the loss on numbers that all share."""
    random = np.random.default_rng((_SEED, step, hvd.rank()))
    inputs = torch.from_numpy(random.normal(size=(32, 64)).astype(np.float32))
    (model(inputs) - inputs[:, :1].sin()).square().mean().backward()
    shared = torch.from_numpy(np.random.default_rng(_SEED).normal(size=(64, 64)).astype(np.float32))
    with torch.no_grad():
        return float((model(shared) - shared[:, :1].sin()).square().mean())


def _worth(states: list[dict[str, Any]], ranks: float) -> list[float]:
    """What this rank owes, as three numbers that add up over ranks: in units of the update."""
    numbers = np.zeros(3)
    for state in states:
        for kind in ("residuals",) if "accumulators" in state else ("residuals", "owner_residuals"):
            for name, entry in sorted(state[kind].items()):
                values, start = np.asarray(entry["values"], np.float64), entry.get("start", 0)
                random = np.random.default_rng(zlib.crc32(name.encode()))
                looks = random.normal(size=(int(np.prod(entry["shape"])), 3))[start : start + values.size]
                numbers += values @ looks / ranks
    return [float(number) for number in numbers]


def _times(entries: dict[str, Any], factor: float) -> dict[str, Any]:
    return {name: {**entry, "values": np.asarray(entry["values"]) * factor} for name, entry in entries.items()}


def _norm(state: dict[str, Any]) -> float:
    kinds = ("residuals",) if "accumulators" in state else ("residuals", "owner_residuals")
    values = [np.asarray(e["values"], np.float64) for kind in kinds for e in state[kind].values()]
    return float(np.sqrt(sum(np.square(v).sum() for v in values)))


def _squares(states: list[dict[str, Any]]) -> float:
    """With AdaGrad, the sum over the accumulators that this rank keeps of the compressed tensors."""
    entries = [e for state in states for e in state.get("accumulators", {}).values() if len(e["shape"]) == 2]
    return float(sum(np.asarray(e["values"], np.float64).sum() for e in entries))


def die() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def change_hosts(folder: Path, stage: Stage) -> None:
    """Tell the driver, which looks each second, of the hosts of a stage."""
    text = f"{DOOMED}:{stage.doomed}\n" * bool(stage.doomed) + f"localhost:{stage.here}\n" * bool(stage.here)
    new = folder / f"hosts.{os.getpid()}"
    new.write_text(text)
    new.replace(folder / "hosts")


class _Run:
    """One process of the run.

    Args:
        setting: of `SETTINGS`.
        scenario: of `SCENARIOS`.
        folder: for the file of this process, and that of the hosts.
    """

    def __init__(self, setting: str, scenario: str, folder: Path) -> None:
        self.stages, self.folder = SCENARIOS[scenario], folder
        self.settings = SETTINGS[setting]
        self.lines = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.model = model_of(os.getpid())
        self.uses_calls = setting == "calls"
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.01 if "adagrad" in self.settings else 0.05)
        named = self.model.named_parameters()
        if "make" in self.settings:
            self.optimizer = self.settings["make"](self.model)
        else:
            self.optimizer = sgd if self.uses_calls else hvd.DistributedOptimizer(sgd, named, **self.settings)
        self.is_doomed = os.environ["HOROVOD_HOSTNAME"] == DOOMED
        self.divisor = 1 if self.settings.get("op") == horovod.Sum else None

    def note(self, at: str, state: Any, **more: Any) -> None:
        """Write a line."""
        states = self._states()
        values = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        stats = {} if self.uses_calls else self.optimizer.compression_stats()
        lost = state._calls.lost
        line = {
            "at": at, "step": state.step, "ranks": hvd.size(), "rank": hvd.rank(), "digest": zlib.crc32(values),
            "worth": _worth(states, self.divisor or hvd.size()),
            "norm": float(np.hypot.reduce([0.0, *map(_norm, states)])),
            "lost_norm": stats.get("lost_norm", lost.norm), "lost_ranks": stats.get("lost_ranks", lost.ranks),
            "squares": _squares(states), "compresses": self._compresses(stats), **more,
        }  # fmt: skip
        self.lines.write(json.dumps(line) + "\n")

    @staticmethod
    def _compresses(stats: dict[str, Any]) -> bool:
        """Whether something is owed after a step; of what `Auto` has found faster uncompressed, nothing is."""
        buckets = stats.get("auto", {}).get("buckets", [])
        return not buckets or any(bucket["choice"] not in ("none", "fp16") for bucket in buckets)

    def _states(self) -> list[dict[str, Any]]:
        if self.uses_calls:
            # what is owed of calls among other ranks is multiplied when they are made again
            states = [(s, hvd.size() / s["size"]) for s in CarriedCalls._states().values()]
            return [
                {kind: _times(s[kind], factor) for kind in ("residuals", "owner_residuals")} for s, factor in states
            ]
        return [self.optimizer.compression_state_dict()]

    def step(self, state: Any) -> float:
        """Make a step."""
        stage = self.stages[state.stage]
        ends = stage.dies if self.is_doomed else ""
        if ends == "before":
            die()
        self.optimizer.zero_grad()
        if ends == "middle":
            # the gradients of the last layer are on their way
            self.model[0].weight.register_hook(lambda gradient: die())
        loss = gradients(self.model, state.step)
        if self.uses_calls:
            for name, p in self.model.named_parameters():
                p.grad = hvd.allreduce(p.grad, name=name, compression=OneBit())
        self.optimizer.step()
        return loss

    def train(self, state: Any) -> None:
        """Train until all stages are over."""
        self.note("enter", state)
        while state.stage < len(self.stages):
            self.note("before", state)
            loss = self.step(state)
            time.sleep(_STEP_SECONDS)
            state.step += 1
            stage = self.stages[state.stage]
            state.made += hvd.size() == stage.ranks
            if state.made >= stage.steps:
                state.stage, state.made = state.stage + 1, 0
                if hvd.rank() == 0 and state.stage < len(self.stages):
                    change_hosts(self.folder, self.stages[state.stage])
            self.note("made", state, loss=loss)
            state.commit()
        self.lines.write(json.dumps({"at": "end", "step": state.step}) + "\n")
        self.lines.close()


def main() -> None:
    """Train, and note it."""
    setting, scenario, folder = sys.argv[1:]
    be_strict()
    hvd.init()
    run = _Run(setting, scenario, Path(folder))
    state = hvd.elastic.TorchState(run.model, run.optimizer, step=0, stage=0, made=0)
    hvd.elastic.run(run.train)(state)


if __name__ == "__main__":
    main()
