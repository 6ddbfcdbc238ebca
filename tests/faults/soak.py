"""Train for long, and watch memory, descriptors, threads and step times: `make soak ARGS="--scale 0.01 --part drop"`.

Each part is one start of ranks. With `--scale 1` the whole takes about two hours.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel.launch import LAUNCHERS, ROOT, _end, _environment

SAMPLES = 40
_STAGES = 5  # that TensorFlow keeps of each of our graphs with one variable
_PAGE = os.sysconf("SC_PAGE_SIZE")


def sample() -> dict[str, float]:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * _PAGE / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Samples:
    """Samples taken now and then in a loop of known length, and what grew in its second half.

    In the first half memory allocators still take what they will use again: 1,200 optimizers, made and dropped one
    after the other, were seen to raise the memory by 49 MB, and the next 2,400 by 0.2.
    """

    def __init__(self, count: int) -> None:
        self._every = max(1, count // SAMPLES)
        self._taken: list[tuple[int, dict[str, float]]] = []

    def at(self, i: int) -> None:
        """Take one, if it is time."""
        if i % self._every == 0:
            gc.collect()
            self._taken.append((i, sample()))

    def report(self) -> dict[str, Any]:
        """First and last values, and growth for each 1,000 rounds by a line through the second half."""
        settled = self._taken[len(self._taken) // 2 :]
        rounds = np.array([i for i, _ in settled], float)
        growth = {}
        for key in settled[0][1]:
            values = np.array([of[key] for _, of in settled])
            slope = np.polyfit(rounds, values, 1)[0] if len(settled) > 2 else 0.0
            growth[key] = round(1000 * float(slope), 4)
        return {"first": settled[0][1], "last": settled[-1][1], "growth_per_1000": growth}


def checksum(model: Any) -> int:
    """Of the parameters."""
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


# -- on a rank -------------------------------------------------------------------------------------------------------


def _torch() -> tuple[Any, Any, Any]:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    hvd: Any = importlib.import_module("hvd_compress.torch")
    hvd.init()
    return torch, hvd, importlib.import_module("horovod.torch")


def _tensors(torch: Any, count: int, numel: int) -> Any:
    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.ones(numel) / (i + 1) for i in range(count))

        def forward(self, x: Any) -> Any:
            # one operation for each parameter: a loss of many would take longer than the exchange that is watched
            return (torch.cat(list(self.parts)) * x).square().mean() * count

    return Many()


def _trainer(model: Any, optimizer: Any, torch: Any, rank: int) -> Callable[[int], None]:
    def step(i: int) -> None:
        optimizer.zero_grad()
        model(1.0 + 0.1 * ((i * 7 + rank * 3) % 11)).backward()
        optimizer.step()

    return step


def steps(kind: str, scale: float, numel: int) -> dict[str, Any]:
    """50,000 steps of 300 tensors, every tenth of them followed by one of plain Horovod."""
    from hvd_compress import Adaptive, Auto, OneBit

    torch, hvd, horovod = _torch()
    count = max(100, int(50_000 * scale))
    compression = {"onebit": OneBit, "adaptive": Adaptive, "auto": Auto}[kind]()
    settings = {} if kind == "auto" else {"min_numel": 0}
    models = [_tensors(torch, 300, 1024) for _ in range(2)]
    sgd = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    ours = hvd.DistributedOptimizer(sgd[0], models[0].named_parameters(), compression, **settings)
    dense = horovod.DistributedOptimizer(sgd[1], [(f"dense.{n}", p) for n, p in models[1].named_parameters()])
    trainers = [_trainer(m, o, torch, hvd.rank()) for m, o in zip(models, (ours, dense), strict=True)]
    samples, seconds = Samples(count), ([], [])  # type: ignore[var-annotated]
    for i in range(count):
        samples.at(i)
        for which in (0, 1) if i % 10 == 0 else (0,):
            begin = time.perf_counter()
            trainers[which](i)
            seconds[which].append(time.perf_counter() - begin)
    fifth = [max(1, len(of) // 5) for of in seconds]
    return {
        kind: {
            "steps": count,
            **samples.report(),
            "seconds_begin": [statistics.median(of[n : 2 * n]) for of, n in zip(seconds, fifth, strict=True)],
            "seconds_end": [statistics.median(of[-n:]) for of, n in zip(seconds, fifth, strict=True)],
            "checksum": checksum(models[0]),
        }
    }


def drop(scale: float, numel: int) -> dict[str, Any]:
    """4,000 optimizers made, used for a step and dropped; plain Horovod's beside."""
    from hvd_compress import OneBit

    torch, hvd, horovod = _torch()
    count, found = max(20, int(4000 * scale)), {}
    for kind in ("horovod", "onebit"):
        samples = Samples(count)
        for i in range(count):
            samples.at(i)
            model = _tensors(torch, 20, 1024)
            sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
            named = model.named_parameters()
            if kind == "onebit":
                optimizer = hvd.DistributedOptimizer(sgd, named, OneBit(), min_numel=0)
            else:
                optimizer = horovod.DistributedOptimizer(sgd, named)
            _trainer(model, optimizer, torch, hvd.rank())(i)
            last = checksum(model)
            del model, sgd, named, optimizer
        found[kind] = {"optimizers": count, **samples.report(), "checksum": last}
    return found


def _few(count: int, size: int, rounds: int) -> dict[str, Any]:
    from hvd_compress import OneBit

    torch, hvd, _ = _torch()
    model = _tensors(torch, count, size)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), OneBit(), min_numel=0)
    step, samples, seconds = _trainer(model, optimizer, torch, hvd.rank()), Samples(rounds), []
    for i in range(rounds):
        samples.at(i)
        begin = time.perf_counter()
        step(i)
        seconds.append(time.perf_counter() - begin)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    of_steps = {"seconds": statistics.median(seconds[1:]), "steps": rounds, "finite": finite}
    return {"onebit": {**of_steps, **samples.report(), "checksum": checksum(model)}}


def ranks16(scale: float, numel: int) -> dict[str, Any]:
    """16 ranks."""
    return _few(20, 5000, max(5, int(500 * scale)))


def tensors5000(scale: float, numel: int) -> dict[str, Any]:
    """5,000 tensors."""
    return _few(5000, 256, max(5, int(200 * scale)))


def large(scale: float, numel: int) -> dict[str, Any]:
    """One tensor of more elements than 2^28."""
    return _few(1, numel, max(2, int(5 * scale)))


def traced(scale: float, numel: int) -> dict[str, Any]:
    """2,000 traced functions of TensorFlow with a tape each; plain Horovod's beside.

    TensorFlow keeps the Python functions of a graph, of which ours has some, until the outermost graph ends: so graphs
    with as many of them are beside, too.
    """
    tf: Any = importlib.import_module("tensorflow")
    hvd: Any = importlib.import_module("hvd_compress.tensorflow")
    horovod: Any = importlib.import_module("horovod.tensorflow")
    from hvd_compress import OneBit

    hvd.init()
    variable = tf.Variable(tf.ones(2048))

    def call(kind: str, i: int) -> None:
        @tf.function
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(variable * x))
            if kind == "onebit":
                return hvd.DistributedGradientTape(tape, compression=OneBit()).gradient(loss, [variable])
            if kind == "stages":
                found = tape.gradient(loss, [variable])[0]
                for _ in range(_STAGES):
                    found = tf.numpy_function(lambda x: x, [found], tf.float32)
                return [found]
            if kind == "horovod":
                return horovod.DistributedGradientTape(tape).gradient(loss, [variable])
            return tape.gradient(loss, [variable])

        gradient(tf.constant(1.0 + i % 3))

    count, found = max(20, int(2000 * scale)), {}
    for kind in ("tensorflow", "stages", "horovod", "onebit"):
        samples = Samples(count)
        for i in range(count):
            samples.at(i)
            call(kind, i)
        found[kind] = {"functions": count, **samples.report()}
    return found


PARTS: dict[str, tuple[Callable[[float, int], dict[str, Any]], int]] = {
    "onebit": (partial(steps, "onebit"), 2), "adaptive": (partial(steps, "adaptive"), 2),
    "auto": (partial(steps, "auto"), 2), "traced": (traced, 2), "drop": (drop, 2), "ranks16": (ranks16, 16),
    "tensors5000": (tensors5000, 2), "large": (large, 2),
}  # fmt: skip
"""What a rank does, and how many ranks there are."""

# -- starting ranks --------------------------------------------------------------------------------------------------

# MB for each 1,000 rounds that are noise of allocators, and a step's time at the end against that of dense
MOST_MB, MOST_DRIFT = 5.0, 1.5


def problems(part: str, of_ranks: list[dict[str, Any]]) -> list[str]:
    """Say what is not as it should be, in what the ranks report."""
    found = []
    for kind, of in of_ranks[0].items():
        if len({rank[kind].get("checksum") for rank in of_ranks}) > 1:
            found.append(f"{kind}: ranks ended with other parameters")
        growth = of["growth_per_1000"]
        others = [of_ranks[0][name] for name in ("horovod", "stages") if kind == "onebit" and name in of_ranks[0]]
        allowed = MOST_MB + 1.5 * max([0.0, *(other["growth_per_1000"]["rss_mb"] for other in others)])
        rounds = of.get("steps") or of.get("optimizers") or of.get("functions") or 0
        if kind not in ("horovod", "tensorflow", "stages") and rounds >= 500:
            if growth["rss_mb"] > allowed:
                found.append(f"{kind}: memory grew by {growth['rss_mb']} MB in 1,000 rounds, {allowed:.1f} are allowed")
            found += [f"{kind}: {k} grew, {of['first'][k]} to {of['last'][k]}" for k in ("descriptors", "threads")
                      if of["last"][k] > of["first"][k] + 2]  # fmt: skip
        if "seconds_end" in of:
            ours, dense = (end / begin for begin, end in zip(of["seconds_begin"], of["seconds_end"], strict=True))
            if ours > MOST_DRIFT * max(1.0, dense):
                found.append(f"{kind}: a step takes {ours:.2f} times as long at the end, a dense one {dense:.2f} times")
        if of.get("finite") is False:
            found.append(f"{kind}: parameters are not finite")
    return found


def start(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a part, and return what they report."""
    ranks = PARTS[part][1]
    with tempfile.TemporaryDirectory() as name:
        command = [*LAUNCHERS["gloo"](ranks), sys.executable, "-m", "tests.faults.soak", "--part", part]
        command += ["--scale", str(options.scale), "--numel", str(options.numel), "--folder", name]
        begin = time.monotonic()
        # 16 ranks on few cores come to a collective late
        environment = {**_environment(), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
        of_ranks = [json.loads(file.read_text()) for file in sorted(Path(name).glob("*.json"))]
    found = [f"the launcher returned {code}, {len(of_ranks)} of {ranks} ranks reported"] if code else []
    if code is None:
        found = [f"no end within {options.minutes} minutes"]
    found += problems(part, of_ranks) if of_ranks else []
    seconds = round(time.monotonic() - begin)
    return {"ranks": ranks, "seconds": seconds, "problems": found, "of rank 0": of_ranks[0] if of_ranks else {}}


def main() -> int:
    """Run parts, or be a rank of one; returns how many problems there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps")
    parser.add_argument("--numel", type=int, default=2**28 + 1, help="of the large tensor; it takes 20 bytes for each")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most for one part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        report = PARTS[options.part[0]][0](options.scale, options.numel)
        (options.folder / f"{int(os.environ['HOROVOD_RANK']):03d}.json").write_text(json.dumps(report))
        return 0
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.part or PARTS:
        setting = {"scale": options.scale, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        record[part] = {"setting": setting, **start(part, options)}
        print(part, json.dumps(record[part], indent=1), flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return sum(len(record[part]["problems"]) for part in options.part or PARTS)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
