"""Time training steps on a GPU: alone, with stock Horovod's allreduce, and with compressed gradients.

    horovodrun -np 2 python benchmarks/gpu_steps.py [--width 1024 4096] [--steps 40] [--only onebit] [--out FILE]

A network 784-W-W-W-10 and 64 images per rank; all ranks of a host that has one GPU share it. Each step ends with a wait
for the device; medians are shown, and how many times as long as a step alone they take. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import QSGD, Adaptive, OneBit, Percentile, Threshold, TopK

COMPRESSORS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "onebit": OneBit(),
    "adaptive": Adaptive(pi=64),
    "topk": TopK(0.01),
    "qsgd4": QSGD(bits=4),
    "threshold": Threshold(0.001),
    "percentile": Percentile(90, error_feedback=True),
}
_WARM_UP = 8


def network(width: int, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = [784, width, width, width, 10]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).to(device)


def timed(model: torch.nn.Module, optimizer: Any, steps: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each step."""
    generator = torch.Generator(device=device).manual_seed(hvd.rank())
    found = []
    for _ in range(steps + _WARM_UP):
        x = torch.randn(64, 784, device=device, generator=generator)
        y = x[:, :10].argmax(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - begin))
    return found[_WARM_UP:]


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


def run(width: int, steps: int, only: list[str], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time all settings of one width; returns a record of each."""
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = network(width, device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # ranks that share a GPU compute at the same time in the other settings, too
    hvd.barrier()
    alone = statistics.median(timed(model, sgd, steps, device))
    say(f"width {width}: a step without exchange takes {alone:.2f} ms")
    records = [{"width": width, "compression": "alone", "milliseconds": alone}]
    for name, compressor in COMPRESSORS.items():
        if only and name not in only:
            continue
        model = network(width, device)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer: Any = hvd.DistributedOptimizer(sgd, model.named_parameters(), compressor)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        took = statistics.median(timed(model, optimizer, steps, device))
        if len(set(hvd.allgather_object(digest(model)))) != 1:
            raise RuntimeError(f"{name}: ranks have different parameters")
        ratio = optimizer.compression_stats()["total"]["ratio"] if name != "none" else 1.0
        say(f"{name:11} {took:7.2f} ms   {took / alone:5.2f} x alone   1:{ratio:.1f}")
        records.append({"width": width, "compression": name, "milliseconds": took, "ratio": ratio})
    return records


def main() -> None:
    """Run it on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="names of compressors")
    parser.add_argument("--out", help="a JSON file")
    options = parser.parse_args()
    hvd.init()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    records = [record for width in options.width for record in run(width, options.steps, options.only, say)]
    if options.out and hvd.rank() == 0:
        result = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ranks": hvd.size(),
            "runs": records,
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
