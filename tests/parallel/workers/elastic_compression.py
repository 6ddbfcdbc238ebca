"""What a rank of an elastic run with compression does on PyTorch. Arguments: setting, scenario, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, AdaGrad, Auto, OneBit, Policy, PowerSGD, TopK
from hvd_compress.torch import _calls
from tests.parallel.rank import be_strict
from tests.parallel.workers.elastic_stages import Run, die

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
    "signum": {"make": lambda model: hvd.Signum(model.named_parameters(), lr=0.0005)},
    "demo": {"make": lambda model: hvd.DeMo(model.named_parameters(), lr=0.0005, k=4, chunk=16)},
    "dgc": {
        "make": lambda model: hvd.DGC(
            model.named_parameters(), lr=0.02, compression=TopK(0.05), warmup_steps=6, warmup_shares=(0.2, 0.1)
        )
    },
}
_SEED = 5


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


class _Torch(Run):
    def __init__(self, setting: str, scenario: str, folder: Path) -> None:
        settings = SETTINGS[setting]
        super().__init__(hvd, scenario, folder, settings.get("op") == horovod.Sum)
        self.model = model_of(os.getpid())
        self.uses_calls = setting == "calls"
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.01 if "adagrad" in settings else 0.05)
        named = self.model.named_parameters()
        if "make" in settings:
            self.optimizer = settings["make"](self.model)
        else:
            self.optimizer = sgd if self.uses_calls else hvd.DistributedOptimizer(sgd, named, **settings)
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, step=0, stage=0, made=0)

    def values(self) -> list[Any]:
        return [p.detach().numpy() for p in self.model.parameters()]

    def states(self) -> list[dict[str, Any]]:
        return [*_calls.states().values()] if self.uses_calls else [self.optimizer.compression_state_dict()]

    def stats(self) -> dict[str, Any]:
        lost = self.state._calls.lost
        calls = {"lost_norm": lost.norm, "lost_ranks": lost.ranks}
        return calls if self.uses_calls else {**calls, **self.optimizer.compression_stats()}

    def step(self, state: Any) -> float:
        """Make a step."""
        if self.dies(state, "before"):
            die()
        self.optimizer.zero_grad()
        if self.dies(state, "middle"):
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
        while not self.is_over(state):
            self.note("before", state)
            self.count(state, self.step(state))
            state.commit()
        self.end(state)


def main() -> None:
    """Train, and note it."""
    setting, scenario, folder = sys.argv[1:]
    be_strict()
    hvd.init()
    run = _Torch(setting, scenario, Path(folder))
    hvd.elastic.run(run.train)(run.state)


if __name__ == "__main__":
    main()
