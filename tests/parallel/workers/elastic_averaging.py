"""What a rank of an elastic run does whose optimizer averages parameters, by stages, as in `elastic_compression`.

Arguments: setting, folder. Each process writes a file of lines: when it enters the training, and after each step, with
numbers of its parameters, of what ranks agreed on, and of what it owes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import SlopeThreshold, TopK
from tests.parallel.rank import be_strict
from tests.parallel.workers.elastic_compression import gradients, model_of
from tests.parallel.workers.elastic_stages import DOOMED, Stage, change_hosts, die

STAGES = [
    Stage(3, 6, 2, 1),
    # one dies, two go on
    Stage(2, 6, 2, 1, "middle"),
    # one is told to go, and the last one is joined
    Stage(1, 6, 1, 1),
    Stage(2, 10, 2, 1),
]
_STEP_SECONDS = 0.02


def diloco(model: torch.nn.Module) -> Any:
    """Fragments, an average that is under way for a step, and a compressor that owes most of a change."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return hvd.DiLoCo(inner, model.named_parameters(), sync_every=4, fragments=2, delay=1, compression=TopK(0.2))


def eventgrad(model: torch.nn.Module) -> Any:
    """Differences between neighbours, compressed, which keep the mean; most of them are not sent."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return hvd.EventGraDOptimizer(
        inner, model.named_parameters(), trigger=SlopeThreshold(horizon=2.0), compression=TopK(0.2), overlap=True
    )


def daso(model: torch.nn.Module) -> Any:
    """Nodes of one rank, parameters that are under way for a step, and a compressor that owes most of a change."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return hvd.DASO(
        inner, model.named_parameters(), global_skips=2, batches_to_wait=1, compression=TopK(0.2), patience=None,
        ranks_per_node=1,
    )  # fmt: skip


def of_diloco(optimizer: Any) -> dict[str, Any]:
    """What is compared of it: checksums of what ranks agreed on."""
    member = optimizer._local_steps.member
    return {"agreed": [f.checksum() for f in member._fragments], "under_way": member.stats()["under_way"]}


def of_eventgrad(optimizer: Any) -> dict[str, Any]:
    """What is compared of it."""
    stats = optimizer.event_stats()
    thresholds = [counters["threshold"] for counters in stats["tensors"].values()]
    return {"thresholds": thresholds, "passes": stats["total"]["passes"], "messages": stats["total"]["messages"]}


def of_daso(optimizer: Any) -> dict[str, Any]:
    """What is compared of it: the clock, and what the mean of parameters has of what this rank owes."""
    stats, member = optimizer.daso_stats(), optimizer._daso.member
    paid = [np.zeros(tensor.numel, tensor.dtype) for tensor in optimizer._daso.parameters.tensors]
    member.pay(paid, 1)
    return {
        "under_way": member.clock.sent_at, "batches": stats["batches"], "nodes": stats["nodes"], "paid": looks(paid),
        "sent": stats["synchronizations"]["sent"], "bytes": stats["bytes_between_nodes"],
    }  # fmt: skip


SETTINGS: dict[str, tuple[Callable[[torch.nn.Module], Any], Callable[[Any], dict[str, Any]]]] = {
    "diloco": (diloco, of_diloco),
    "eventgrad": (eventgrad, of_eventgrad),
    "daso": (daso, of_daso),
}


def looks(arrays: Iterable[Any], seed: int = 0) -> list[float]:
    """Three numbers of arrays that add up and average as these do."""
    numbers = np.zeros(3)
    for i, array in enumerate(arrays):
        values = np.asarray(array, np.float64).reshape(-1)
        numbers += values @ np.random.default_rng((i, seed)).normal(size=(values.size, 3))
    return [float(number) for number in numbers]


class _Run:
    """One process of the run.

    Args:
        setting: of `SETTINGS`.
        folder: for the file of this process, and that of the hosts.
    """

    def __init__(self, setting: str, folder: Path) -> None:
        self.folder = folder
        self.lines = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.model = model_of(os.getpid())
        make, self.told = SETTINGS[setting]
        self.optimizer = make(self.model)
        self.is_doomed = os.environ["HOROVOD_HOSTNAME"] == DOOMED

    def note(self, at: str, state: Any, **more: Any) -> None:
        """Write a line."""
        averaging = self.optimizer._averaging
        values = [p.detach().numpy() for p in self.model.parameters()]
        owed = averaging.owed()
        line = {
            "at": at, "step": state.step, "ranks": hvd.size(), "rank": hvd.rank(), "looks": looks(values),
            "digest": zlib.crc32(b"".join(value.tobytes() for value in values)),
            "worth": [sum(numbers) / hvd.size() for numbers in zip(
                [0.0] * 3, *(looks([x], zlib.crc32(name.encode())) for name, x in owed.items()), strict=True)],
            "norm": float(np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in owed.values()))),
            **averaging.stats(), **self.told(self.optimizer), **more,
        }  # fmt: skip
        self.lines.write(json.dumps(line) + "\n")

    def step(self, state: Any) -> float:
        """Make a step."""
        self.optimizer.zero_grad()
        if self.is_doomed and STAGES[state.stage].dies == "middle":
            self.model[0].weight.register_hook(lambda gradient: die())
        loss = gradients(self.model, state.step)
        self.optimizer.step()
        return loss

    def train(self, state: Any) -> None:
        """Train until all stages are over."""
        self.note("enter", state)
        while state.stage < len(STAGES):
            loss = self.step(state)
            time.sleep(_STEP_SECONDS)
            state.step += 1
            state.made += hvd.size() == STAGES[state.stage].ranks
            if state.made >= STAGES[state.stage].steps:
                state.stage, state.made = state.stage + 1, 0
                if hvd.rank() == 0 and state.stage < len(STAGES):
                    change_hosts(self.folder, STAGES[state.stage])
            self.optimizer._averaging.save()
            self.note("made", state, loss=loss)
            state.commit()
        if hasattr(self.optimizer, "epoch_end"):
            self.optimizer.epoch_end()
        else:
            self.optimizer.average_parameters()
        self.note("end", state)
        self.lines.close()


def main() -> None:
    """Train, and note it."""
    setting, folder = sys.argv[1:]
    be_strict()
    if setting == "daso":
        # an odd number: nothing is under way at the commit that those who are left go back to
        STAGES[0] = STAGES[0]._replace(steps=7)
    hvd.init()
    run = _Run(setting, Path(folder))
    state = hvd.elastic.TorchState(run.model, run.optimizer, step=0, stage=0, made=0)
    hvd.elastic.run(run.train)(state)


if __name__ == "__main__":
    main()
