"""All ranks hold the same bits after 200 steps of a real network on real data, whatever compresses the gradients."""

from __future__ import annotations

import horovod.torch as horovod
import torch

import hvd_compress.torch as hvd
from hvd_compress import BF16, QSGD, Adaptive, OneBit, Percentile, Threshold, TopK
from hvd_compress.compressors import Compressor
from tests.parallel.cases import Cases
from tests.parallel.workers.common import check_equal_on_all_ranks

cases = Cases()
STEPS = 200
COMPRESSORS = {
    "onebit": OneBit(),
    "threshold": Threshold(0.01),
    "adaptive": Adaptive(pi=16),
    "qsgd": QSGD(bits=4),
    "topk": TopK(0.02),
    "percentile": Percentile(90),
    "bf16": BF16(),
    "adaptive-golomb": Adaptive(pi=16, coding="golomb"),
    "qsgd-elias": QSGD(bits=4, coding="elias"),
}


def run(compressor: Compressor, exchange: str, steps: int) -> tuple[torch.nn.Module, float, float]:
    """Train a small classifier; the loss on all data before and after."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(50, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    x = torch.randn(256, 50)
    y = x[:, :4].argmax(dim=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compressor, exchange=exchange, min_numel=1000)
    loss = torch.nn.functional.cross_entropy
    before = loss(model(x), y).item()
    for step in range(steps):
        batch = torch.arange(8) * horovod.size() + horovod.rank() + 8 * horovod.size() * step
        optimizer.zero_grad()
        loss(model(x[batch % 256]), y[batch % 256]).backward()
        optimizer.step()
    return model, before, loss(model(x), y).item()


@cases.each(
    {**{c: (COMPRESSORS[c], "two_phase") for c in COMPRESSORS}, "onebit-allgather": (OneBit(), "allgather")},
    witnesses=["onebit", "qsgd-elias"],
)
def stay_equal_and_learn(setting: tuple[Compressor, str]) -> None:
    compressor, exchange = setting
    model, before, after = run(compressor, exchange, STEPS)
    check_equal_on_all_ranks(model)
    assert after < 0.6 * before, f"loss went from {before} to {after}"
