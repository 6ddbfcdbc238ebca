"""Measure what an exchange adds to a step in each framework: same network, batch and compressor, in one run.

    python benchmarks/overhead.py [--ranks 2] [--width 1024] [--batch-size 64] [--rounds 3] [--steps 20]

Steps with one-bit exchanges and steps without any communication alternate in blocks within the same processes;
frameworks alternate from round to round. The overhead is the difference of the medians of a block and its neighbour.
Times on one machine are noisy, so the ratio of the overheads is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

FEATURES, CLASSES, HIDDEN = 784, 10, 3
WARM_UP = 5  # kernels are compiled, functions traced, Horovod's caches filled

Step = Callable[[], None]


def torch_steps(options: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> tuple[Step, Step]:
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import OneBit

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)

    def step_of(compressed: bool) -> Step:
        torch.manual_seed(1)
        sizes = [FEATURES, *[options.width] * HIDDEN, CLASSES]
        layers = [
            layer for i in range(HIDDEN + 1) for layer in (torch.nn.Linear(sizes[i], sizes[i + 1]), torch.nn.ReLU())
        ]
        model = torch.nn.Sequential(*layers[:-1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if compressed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), OneBit())

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        return step

    return step_of(False), step_of(True)


def tensorflow_steps(options: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> tuple[Step, Step]:
    import tensorflow as tf

    import hvd_compress.tensorflow as hvd
    from hvd_compress import OneBit

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    inputs, labels = tf.constant(x), tf.constant(y)

    def step_of(compressed: bool) -> Step:
        sizes = [FEATURES, *[options.width] * HIDDEN, CLASSES]
        initial = tf.keras.initializers.HeNormal(seed=1)
        label = "compressed" if compressed else "alone"
        variables = []
        for i in range(HIDDEN + 1):
            variables.append(tf.Variable(initial(sizes[i : i + 2]), name=f"{label}_weight_{i}"))
            variables.append(tf.Variable(tf.zeros([sizes[i + 1]]), name=f"{label}_bias_{i}"))

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                hidden = inputs
                for i in range(HIDDEN):
                    hidden = tf.nn.relu(hidden @ variables[2 * i] + variables[2 * i + 1])
                logits = hidden @ variables[-2] + variables[-1]
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            if compressed:
                tape = hvd.DistributedGradientTape(tape, compression=OneBit())
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.01 * gradient)

        return step

    return step_of(False), step_of(True)


FRAMEWORKS = {"torch": torch_steps, "tensorflow": tensorflow_steps}


def worker(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.batch_size, FEATURES)).astype(np.float32)
    steps = FRAMEWORKS[options.framework](options, x, rng.integers(0, CLASSES, options.batch_size))
    for step in steps:
        for _ in range(WARM_UP):
            step()
    seconds: list[list[float]] = [[], []]
    for _ in range(options.blocks):
        for kind, step in enumerate(steps):
            taken = []
            for _ in range(options.steps):
                begin = time.perf_counter()
                step()
                taken.append(time.perf_counter() - begin)
            seconds[kind].append(statistics.median(taken))
    # one rank speaks for all: they wait for each other in each step
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(options.worker).write_text(json.dumps({"alone": seconds[0], "compressed": seconds[1]}))


def launch(options: argparse.Namespace, framework: str) -> dict[str, list[float]]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        command = ["mpirun", "-np", str(options.ranks), "--oversubscribe", "--bind-to", "none", *root, sys.executable]
        command += [__file__, *sys.argv[1:], "--framework", framework, "--worker", str(result)]
        subprocess.run(command, check=True, env=environment, timeout=300)
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each framework")
    parser.add_argument("--blocks", type=int, default=8, help="of each kind in a start")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--framework", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    overheads: dict[str, list[float]] = {framework: [] for framework in FRAMEWORKS}
    alone: dict[str, list[float]] = {framework: [] for framework in FRAMEWORKS}
    for _ in range(options.rounds):
        for framework in FRAMEWORKS:
            seconds = launch(options, framework)
            alone[framework] += seconds["alone"]
            overheads[framework] += [c - a for a, c in zip(seconds["alone"], seconds["compressed"], strict=True)]
    print(f"{options.ranks} ranks, width {options.width}, batch {options.batch_size}: milliseconds per step")
    print(f"{'':12}{'alone':>10}{'one-bit adds':>16}{'quartiles':>18}")
    for framework, values in overheads.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(values, n=4))
        print(f"{framework:12}{1e3 * statistics.median(alone[framework]):10.1f}{middle:16.1f}{low:10.1f} to {high:.1f}")
    ratio = statistics.median(overheads["tensorflow"]) / statistics.median(overheads["torch"])
    print(f"TensorFlow's overhead is {ratio:.2f} times torch's")


if __name__ == "__main__":
    main()
