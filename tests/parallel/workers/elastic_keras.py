"""What a rank of an elastic run with compression does under `fit` of Keras 3. Arguments: setting, scenario, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvd_compress.keras as hvd
from hvd_compress import QSGD, AdaGrad, OneBit, Policy
from tests.parallel.rank import be_strict
from tests.parallel.workers.elastic_stages import Run, die

SETTINGS: dict[str, dict[str, Any]] = {
    "onebit": {"compression": OneBit()},
    "policy": {"compression": Policy([("first*", QSGD(bits=2)), ("*", OneBit())])},
    "adagrad": {"compression": OneBit(), "adagrad": AdaGrad()},
}
_SEED, _ROWS, _BATCH = 5, 256, 32


def _data(rank: int) -> tuple[Any, Any]:
    inputs = np.random.default_rng((_SEED, rank)).normal(size=(_ROWS, 64)).astype(np.float32)
    return inputs, np.repeat(np.sin(inputs[:, :1]), 100, axis=1)


class _Course(keras.callbacks.Callback):
    def __init__(self, run: _Keras) -> None:
        super().__init__()
        self.run = run

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.run.is_over(self.run.state):
            return
        if self.run.dies(self.run.state, "before"):
            die()
        self.run.note("before", self.run.state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        inputs, targets = _data(0)
        loss = float(np.square(np.asarray(self.model.predict_on_batch(inputs)) - targets).mean())
        self.run.count(self.run.state, loss)
        self.model.stop_training = self.run.is_over(self.run.state)


class _Keras(Run):
    def __init__(self, setting: str, scenario: str, folder: Path) -> None:
        settings = SETTINGS[setting]
        super().__init__(hvd, scenario, folder)
        keras.utils.set_random_seed(os.getpid())
        layers = [keras.layers.Dense(300, "tanh", name="first"), keras.layers.Dense(100, name="second")]
        self.model = keras.Sequential([keras.Input((64,)), *layers])
        sgd = keras.optimizers.SGD(0.01 if "adagrad" in settings else 0.05)
        self.optimizer = hvd.DistributedOptimizer(sgd, **settings)
        self.model.compile(self.optimizer, self.loss)
        self.state = hvd.elastic.KerasState(self.model, step=0, stage=0, made=0, epoch=0, batch=0)

    def loss(self, targets: Any, predicted: Any) -> Any:
        """The mean square, in which the doomed rank may end while the others wait for its gradients."""
        loss = keras.ops.mean(keras.ops.square(targets - predicted))
        if keras.backend.backend() == "torch":
            if self.dies(self.state, "middle"):
                die()
            return loss
        import tensorflow as tf

        def look(value: Any) -> Any:
            if self.dies(self.state, "middle"):
                die()
            return value

        with tf.control_dependencies([tf.numpy_function(look, [loss], tf.float32)]):
            return tf.identity(loss)

    def values(self) -> list[Any]:
        return self.model.get_weights()

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.compression_state_dict()]

    def stats(self) -> dict[str, Any]:
        return self.optimizer.compression_stats()

    def train(self, state: Any) -> None:
        """Train until all stages are over."""
        # what a step would do first, so that what was taken up can be noted
        self.optimizer._hvd._exchange_for(self.optimizer._trainable_variables).exchange()
        self.note("enter", state)
        while not self.is_over(state):
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                _Course(self),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ]
            inputs, targets = _data(hvd.rank())
            self.model.fit(inputs, targets, _BATCH, verbose=0, shuffle=False, callbacks=callbacks)
        self.end(state)


def main() -> None:
    """Train, and note it."""
    setting, scenario, folder = sys.argv[1:]
    be_strict()
    hvd.init()
    run = _Keras(setting, scenario, Path(folder))
    hvd.elastic.run(run.train)(run.state)


if __name__ == "__main__":
    main()
