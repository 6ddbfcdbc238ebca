"""`hvd_compress.tensorflow` among two pairs of ranks out of four."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
from tensorflow import keras

import hvd_compress.tensorflow.keras as hvd
from hvd_compress import OneBit
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import SHAPES
from tests.parallel.workers.tensorflow_values import EXCHANGE, check_against, given, gradients, variables, wrapped

FRAMEWORK = "tensorflow"
EVEN, ODD = horovod.ProcessSet([0, 2]), horovod.ProcessSet([1, 3])
PROCESS_SETS = [EVEN, ODD]

cases = Cases()


@cases.add
def each_pair_combines_its_own() -> None:
    mine, ranks = (EVEN, (0, 2)) if horovod.rank() % 2 == 0 else (ODD, (1, 3))
    of, loopback = variables(), Loopback(2, OneBit(), EXCHANGE)
    for i in range(2):
        found = gradients(of, given(i), lambda tape: wrapped(tape, process_set=mine))
        for name, combined in zip(SHAPES, found, strict=True):
            check_against(loopback, name, combined, i, ranks)


@cases.add
def ranks_outside_keep_their_gradients() -> None:
    found = gradients(variables(), given(0), lambda tape: wrapped(tape, process_set=EVEN))
    if horovod.rank() % 2:
        np.testing.assert_array_equal(found[0], given(0)[0])


def compiled(process_set: Any = EVEN) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((40,)), keras.layers.Dense(64, name="first"), keras.layers.Dense(10, name="second")]
    model = keras.Sequential(layers)
    settings = {"compression": OneBit(), "min_numel": 100, "process_set": process_set}
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **settings), "mse")
    return model


@cases.add
def who_is_outside_takes_nothing_of_what_all_owed() -> None:
    x = np.random.default_rng(horovod.rank()).standard_normal((32, 40)).astype(np.float32)
    folder = horovod.broadcast_object(tempfile.mkdtemp() if horovod.rank() == 0 else None, 0)
    keeper = hvd.callbacks.CompressionCheckpointCallback(folder)
    everyone, pair = compiled(horovod.global_process_set), compiled()
    everyone.fit(x, x[:, :10], batch_size=16, verbose=0, callbacks=[keeper])
    owed = everyone.optimizer.compression_stats()["total"]["residual_norm"]
    assert owed > 0
    pair.set_weights(everyone.get_weights())
    pair.optimizer.build(pair.trainable_variables)
    pair.optimizer.iterations.assign(everyone.optimizer.iterations)
    keeper.set_model(pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.on_train_begin()
    is_member = horovod.rank() % 2 == 0
    assert bool(pair.optimizer.compression_state_dict()["residuals"]) == is_member


@cases.add
def a_pair_trains_with_keras_and_resumes() -> None:
    x = np.random.default_rng(horovod.rank()).standard_normal((64, 40)).astype(np.float32)
    folder = horovod.broadcast_object(tempfile.mkdtemp() if horovod.rank() == 0 else None, 0)
    keeper = hvd.callbacks.CompressionCheckpointCallback(folder)
    first, second = compiled(), compiled()
    first.fit(x, x[:, :10], batch_size=16, verbose=0, callbacks=[keeper])
    second.set_weights(first.get_weights())
    second.optimizer.build(second.trainable_variables)
    second.optimizer.iterations.assign(first.optimizer.iterations)
    with warnings.catch_warnings():
        # a state that is left out is a warning
        warnings.simplefilter("error")
        second.fit(x, x[:, :10], batch_size=16, verbose=0, callbacks=[keeper])
    is_member = horovod.rank() % 2 == 0
    # counters are of this optimizer's steps; its state has those of both
    assert second.optimizer.compression_stats()["total"]["steps"] == (4 if is_member else 0)
    assert second.optimizer.compression_state_dict()["steps"] == (8 if is_member else 0)
    digests = np.asarray(
        hvd.allgather(np.concatenate([w.reshape(-1) for w in second.get_weights()])[None], name="weights")
    )
    assert digests[0].tobytes() == digests[2].tobytes()
    assert digests[1].tobytes() != digests[3].tobytes()
