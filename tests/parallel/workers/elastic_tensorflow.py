"""What a rank of an elastic run with compression does with a tape of TensorFlow. Arguments: setting, scenario, folder.

The step is one `tf.function`, which is traced once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import AdaGrad, Auto, OneBit, PowerSGD
from hvd_compress.tensorflow._carried_exchange import BOOK
from tests.parallel.rank import be_strict
from tests.parallel.workers.elastic_stages import Run, die

SETTINGS: dict[str, dict[str, Any]] = {
    "onebit": {"compression": OneBit()},
    "sum": {"compression": OneBit(), "op": hvd.Sum},
    "auto": {"compression": Auto()},
    "adagrad": {"compression": OneBit(), "adagrad": AdaGrad()},
    "powersgd": {"compression": PowerSGD(2)},
    "calls": {},
}
_SEED = 5


class _TensorFlow(Run):
    def __init__(self, setting: str, scenario: str, folder: Path) -> None:
        self.settings = SETTINGS[setting]
        super().__init__(hvd, scenario, folder, self.settings.get("op") == hvd.Sum)
        self.uses_calls = setting == "calls"
        self.rate = 0.01 if "adagrad" in self.settings else 0.05
        random = np.random.default_rng(os.getpid())
        shapes = {"first": (64, 300), "first_bias": (300,), "second": (300, 100), "second_bias": (100,)}
        self.variables = [
            tf.Variable(random.normal(size=shape, scale=0.1).astype(np.float32), name=name)
            for name, shape in shapes.items()
        ]
        # a layer of each rank's own: its gradient is divided by the number of ranks
        self.local = tf.Variable(1.0, name="local")
        self.traces = 0
        self.compiled = tf.function(self._step)
        self.state = hvd.elastic.TensorFlowState(self.variables, step=0, stage=0, made=0)

    def _predicted(self, inputs: Any) -> Any:
        first, first_bias, second, second_bias = self.variables
        return tf.tanh(inputs @ first + first_bias) @ second + second_bias

    def _tape(self) -> Any:
        return hvd.DistributedGradientTape(tf.GradientTape(), **self.settings)

    def _step(self, inputs: Any) -> Any:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self._predicted(inputs) - tf.sin(inputs[:, :1])) ** 2)
            with tf.control_dependencies([tf.numpy_function(self._look, [loss], tf.float32)]):
                loss = tf.identity(loss)
            local = self.local * 6.0
        if self.uses_calls:
            named = zip(tape.gradient(loss, self.variables), self.variables, strict=True)
            gradients = [hvd.allreduce(g, name=v.name[:-2], compression=OneBit()) for g, v in named]
            own = tf.constant(6.0)
        else:
            tape = hvd.DistributedGradientTape(tape, **self.settings)
            if self.settings.get("adagrad") is None:
                tape.register_local_source(self.local)
                *gradients, own = tape.gradient([loss, local], [*self.variables, self.local])
            else:
                gradients, own = tape.gradient(loss, self.variables), tf.constant(6.0)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(self.rate * gradient)
        return own

    def _look(self, value: Any) -> Any:
        if self.dies(self.state, "middle"):
            die()
        return value

    def values(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables]

    def states(self) -> list[dict[str, Any]]:
        if self.uses_calls:
            return [owed.state for owed in BOOK._owed().values()]
        return [self._tape().compression_state_dict(self.variables)]

    def stats(self) -> dict[str, Any]:
        if self.uses_calls:
            return {"lost_norm": BOOK.lost.norm, "lost_ranks": BOOK.lost.ranks}
        return self._tape().compression_stats(self.variables)

    def train(self, state: Any) -> None:
        """Train until all stages are over."""
        if not self.uses_calls:
            # what a step would do first, so that what was taken up can be noted
            self._tape()._exchange_of(self.variables).exchange()
        self.note("enter", state)
        shared = np.random.default_rng(_SEED).normal(size=(64, 64)).astype(np.float32)
        while not self.is_over(state):
            self.note("before", state)
            if self.dies(state, "before"):
                die()
            inputs = np.random.default_rng((_SEED, state.step, hvd.rank())).normal(size=(32, 64))
            own = float(self.compiled(tf.constant(inputs, tf.float32)))
            if not self.uses_calls and "adagrad" not in self.settings:
                assert own == 6.0 / hvd.size(), own
            self.count(state, float(tf.reduce_mean((self._predicted(shared) - tf.sin(shared[:, :1])) ** 2)))
            state.commit()
        assert self.traces == 1, self.traces
        self.end(state)


def main() -> None:
    """Train, and note it."""
    setting, scenario, folder = sys.argv[1:]
    be_strict()
    hvd.init()
    run = _TensorFlow(setting, scenario, Path(folder))
    hvd.elastic.run(run.train)(run.state)


if __name__ == "__main__":
    main()
