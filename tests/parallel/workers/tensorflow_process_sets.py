"""`hvd_compress.tensorflow` among two pairs of ranks out of four."""

from __future__ import annotations

import functools
import tempfile
import warnings
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from tensorflow import keras

import hvd_compress.tensorflow as tensorflow_hvd
import hvd_compress.tensorflow.keras as hvd
from hvd_compress import OneBit
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import SHAPES, numbers
from tests.parallel.workers.tensorflow_values import EXCHANGE, check_against, given, gradients, variables, wrapped

FRAMEWORK = "tensorflow"
PROCESS_SETS = "dynamic"

cases = Cases()


@functools.cache
def pairs() -> tuple[Any, Any]:
    return horovod.add_process_set([0, 2]), horovod.add_process_set([1, 3])


def even() -> Any:
    return pairs()[0]


@cases.add
def each_pair_combines_its_own() -> None:
    mine, ranks = (pairs()[0], (0, 2)) if horovod.rank() % 2 == 0 else (pairs()[1], (1, 3))
    of, loopback = variables(), Loopback(2, OneBit(), EXCHANGE)
    for i in range(2):
        found = gradients(of, given(i), lambda tape: wrapped(tape, process_set=mine))
        for name, combined in zip(SHAPES, found, strict=True):
            check_against(loopback, name, combined, i, ranks)


@cases.add
def ranks_outside_keep_their_gradients() -> None:
    found = gradients(variables(), given(0), lambda tape: wrapped(tape, process_set=even()))
    if horovod.rank() % 2:
        np.testing.assert_array_equal(found[0], given(0)[0])


def compiled(process_set: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((40,)), keras.layers.Dense(64, name="first"), keras.layers.Dense(10, name="second")]
    model = keras.Sequential(layers)
    settings = {"compression": OneBit(), "min_numel": 100, "process_set": process_set or even()}
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
    # all files are there
    horovod.allreduce(tf.zeros(1), name="written")
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


@cases.add
def a_set_that_gets_the_number_of_another_one_gets_nothing_else_of_it() -> None:
    pairs()
    numbers_of_sets, loopbacks = [], {pair: Loopback(2, OneBit()) for pair in ((0, 1), (1, 2))}
    # rank 0 comes to a set whose number rank 1 knows from another one, and a set is made again
    for step, ranks in enumerate([(1, 2), (0, 1), (1, 2), (0, 1)]):
        process_set = horovod.add_process_set(ranks)
        numbers_of_sets.append(process_set.process_set_id)
        found = gradients(variables(), given(step), lambda tape, those=process_set: wrapped(tape, process_set=those))
        if horovod.rank() in ranks:
            loopback = Loopback(2, OneBit(), EXCHANGE)
            for name, combined in zip(SHAPES, found, strict=True):
                check_against(loopback, name, combined, step, ranks)
            x = [numbers("p", rank, step, (53, 307)) for rank in ranks]
            mine = tf.constant(x[ranks.index(horovod.rank())])
            result = tensorflow_hvd.allreduce(mine, name="again", compression=OneBit(), process_set=process_set)
            assert result.numpy().tobytes() == loopbacks[ranks].allreduce(x, name="again")[0].tobytes()
        horovod.remove_process_set(process_set)
    assert len(set(numbers_of_sets)) == 1, "no number was used again, so nothing is tested"
