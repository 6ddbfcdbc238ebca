"""What a rank of an elastic run does, in a way of training that the arguments name; no `Report`, as ranks change.

Arguments: way, package, folder. The rank on the host `DOOMED` ends at `DEATH`, and leaves a file that tells the
discovery of hosts; another rank joins then. All train until there are `STEPS` and two ranks again.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel.rank import be_strict

DOOMED = "127.0.0.1"
DEATH, STEPS = 3, 12
Note = Callable[[Any, int, float], None]


def with_torch(package: str, note: Note) -> None:
    import torch

    hvd = importlib.import_module(f"{package}.torch")
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS or hvd.size() < 2:
            note(hvd, state.step, sum(p.sum().item() for p in model.parameters()))
            optimizer.zero_grad()
            model(torch.ones(4, 10)).pow(2).mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)


def with_torch_types(package: str, note: Note) -> None:
    """Parameters and buffers that Horovod cannot move: 16 bits, complex, in other orders, without dimensions."""
    import torch

    hvd = importlib.import_module(f"{package}.torch")
    hvd.init()
    torch.manual_seed(os.getpid())
    model = torch.nn.Module()
    model.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.narrow = torch.nn.Linear(10, 10).bfloat16()
    model.rotation = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
    model.scale = torch.nn.Parameter(torch.randn(()))
    model.register_buffer("mask", torch.rand(6) > 0.5)
    model.register_buffer("strided", torch.randn(4, 6).t())
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def numbers(tensors: Any) -> float:
        wide = (torch.view_as_real(t) if t.is_complex() else t for t in tensors if isinstance(t, torch.Tensor))
        return sum(float(t.double().abs().sum()) for t in wide)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS or hvd.size() < 2:
            states = [value for of_p in optimizer.state.values() for value in of_p.values()]
            note(hvd, state.step, numbers([*model.state_dict().values(), *states]))
            # who joins has made fewer calls without a name
            assert hvd.allreduce(torch.ones(3, dtype=torch.bfloat16), op=hvd.Sum).tolist() == [hvd.size()] * 3
            optimizer.zero_grad()
            image = model.conv(torch.ones(2, 3, 5, 5)).square().mean()
            halves = model.narrow(torch.ones(4, 10, dtype=torch.bfloat16)).float().square().mean()
            (image + halves + (model.rotation.abs() * model.scale).sum()).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)


def with_tensorflow(package: str, note: Note) -> None:
    import tensorflow as tf

    hvd = importlib.import_module(f"{package}.tensorflow")
    hvd.init()
    v, w = tf.Variable(tf.ones([10, 10]), name="v"), tf.Variable(tf.ones([10]), name="w")
    state = hvd.elastic.TensorFlowState([v, w], step=0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.ones([4, 10]) @ v + w) ** 2)
        for gradient, of in zip(hvd.DistributedGradientTape(tape).gradient(loss, [v, w]), [v, w], strict=True):
            of.assign_sub(0.01 * gradient)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS or hvd.size() < 2:
            note(hvd, state.step, float(tf.reduce_sum(v)))
            step()
            state.step += 1
            state.commit()

    train(state)


def with_keras(package: str, note: Note) -> None:
    import keras

    hvd = importlib.import_module(f"{package}.keras")
    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, step=0)

    class Noting(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            note(hvd, state.step, float(np.sum([w.sum() for w in model.get_weights()])))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state.step += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS or hvd.size() < 2:
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                Noting(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ]
            model.fit(np.ones((16, 10)), np.ones((16, 10)), batch_size=4, verbose=0, callbacks=callbacks)

    train(state)


def main() -> None:
    """Train; one line in a file of this process for each step."""
    way, package, folder = sys.argv[1:]
    be_strict()
    lines = (Path(folder) / f"{os.getpid()}.jsonl").open("w", buffering=1)

    def note(hvd: Any, step: int, total: float) -> None:
        if step == DEATH and os.environ["HOROVOD_HOSTNAME"] == DOOMED:
            (Path(folder) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        lines.write(json.dumps({"step": step, "ranks": hvd.size(), "total": total}) + "\n")

    {"torch": with_torch, "types": with_torch_types, "tensorflow": with_tensorflow, "keras": with_keras}[way](
        package, note
    )
    lines.write(json.dumps({"end": True}) + "\n")


if __name__ == "__main__":
    main()
