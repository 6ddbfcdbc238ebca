"""DiLoCo in Keras `fit`: each rank is a node."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hvd_compress import Adaptive, TopK
from hvd_compress.errors import MismatchError
from tests.diloco_oracle import Nesterov, Oracle
from tests.parallel.cases import Cases
from tests.parallel.workers.keras_fit import FRAMEWORK, check_equal_on_all_ranks, hvd, keras
from tests.parallel.workers.neutral import raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()

RATE = 0.1


def data(rank: int, images: int = 112) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).standard_normal((images, 20)).astype(np.float32)
    return x, (x[:, :3] * 2 + rank).astype(np.float32)


def linear() -> Any:
    # other weights on each rank: only a broadcast makes them equal
    keras.utils.set_random_seed(5 + hvd.rank())
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(3, use_bias=False, name="only")])


def larger(*layers: Any) -> Any:
    keras.utils.set_random_seed(5 + hvd.rank())
    rest = [keras.layers.Dense(64, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    return keras.Sequential([*layers, *rest])


def callbacks(**settings: Any) -> tuple[Any, Any]:
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.DiLoCoCallback(**settings)


@cases.each({"H1": (1, 0, 0.0), "H3": (3, 0, 0.0), "H4-delay2": (4, 2, 0.0), "H4-delay3-alpha": (4, 3, 0.5)})
def weights_follow_the_definition_of_diloco(settings: tuple[int, int, float]) -> None:
    sync_every, delay, alpha = settings
    model, seen = linear(), []
    model.compile(keras.optimizers.SGD(RATE), "mse")
    start = np.asarray(hvd.broadcast(model.get_weights()[0], 0, name="diloco.start"))

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.model.get_weights()[0])

    first, callback = callbacks(sync_every=sync_every, delay=delay, alpha=alpha, average_epochs=False)
    model.fit(
        *data(hvd.rank()), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[first, callback, Recorder()]
    )
    oracle = Oracle({"w": start}, hvd.size(), [["w"]], sync_every, delay, alpha, Nesterov)
    for step, found in enumerate(seen):
        updates = []
        for rank, local in enumerate(oracle.local):
            x, y = (a[step % 7 * 16 : step % 7 * 16 + 16] for a in data(rank))
            updates.append({"w": -RATE * 2 * x.T @ (x @ local["w"] - y) / y.size})
        oracle.step(updates)
        np.testing.assert_allclose(found, oracle.local[hvd.rank()]["w"], rtol=2e-4, atol=2e-5)
    assert len(seen) == 14
    # when training ends
    check_equal_on_all_ranks(model)


COMPRESSED = {
    "adaptive": {"compression": Adaptive(8)},
    "topk-decay": {
        "compression": TopK(0.2), "feedback_decay": 0.95, "outer_momentum": 0.0, "outer_learning_rate": 1.0,
        "fragments": 2, "delay": 1,
    },
}  # fmt: skip


@cases.each(COMPRESSED)
def compressed_local_steps_learn_and_end_with_equal_ranks(settings: dict[str, Any]) -> None:
    model = larger(keras.Input((20,)))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    first, callback = callbacks(sync_every=4, **settings)
    seen: list[np.ndarray] = []

    class Validated(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            seen.append(self.model.get_weights()[0])

    x, y = data(hvd.rank())
    # what ranks look for is the same
    told = model.fit(
        x, y - hvd.rank(), batch_size=16, epochs=4, verbose=0, validation_data=data(0, 16),
        callbacks=[first, callback, Validated()],
    )  # fmt: skip
    # weights and moving means
    check_equal_on_all_ranks(model)
    for i, weights in enumerate(seen):
        everyone = np.asarray(hvd.allgather(weights.reshape(1, -1), name=f"validated.{i}"))
        np.testing.assert_array_equal(everyone, np.broadcast_to(everyone[:1], everyone.shape))
    assert told.history["loss"][-1] < told.history["loss"][0]
    stats = callback.diloco_stats()
    assert (stats["steps"], stats["nodes"], len(seen)) == (28, hvd.size(), 4)


@cases.add
def averages_of_an_optimizer_are_equal_on_all_ranks_at_the_end() -> None:
    model = linear()
    model.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse")
    model.fit(*data(hvd.rank()), batch_size=16, verbose=0, callbacks=[*callbacks(sync_every=3)])
    digests = np.asarray(
        hvd.allgather(np.array([w.sum(dtype=np.float64) for w in model.get_weights()])[None], name="ema")
    )
    assert (digests == digests[0]).all()


@cases.add
def weights_that_early_stopping_restores_are_equal_on_all_ranks_at_the_end() -> None:
    model = linear()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    first, callback = callbacks(sync_every=5)
    # before the callback that makes ranks equal at the end of an epoch
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    metrics = hvd.callbacks.MetricAverageCallback()
    model.fit(*data(hvd.rank()), batch_size=16, epochs=2, verbose=0, callbacks=[first, metrics, stopping, callback])
    check_equal_on_all_ranks(model)


@cases.add
def a_model_that_is_built_by_its_first_batch_begins_after_it() -> None:
    model = larger()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    first, callback = callbacks(sync_every=2)
    model.fit(*data(hvd.rank()), batch_size=16, epochs=1, verbose=0, callbacks=[first, callback])
    check_equal_on_all_ranks(model)
    assert callback.diloco_stats()["synchronizations"] == {"sent": 3, "merged": 3, "not_finite": 0}


@cases.add
def a_state_goes_on_in_the_middle_of_a_delay() -> None:
    x, y = data(hvd.rank())

    def batches(model: Any, callback: Any, begin: int, end: int) -> None:
        for step in range(begin, end):
            rows = slice(step % 7 * 16, step % 7 * 16 + 16)
            model.train_on_batch(x[rows], y[rows])
            callback.on_train_batch_end(step)

    def start() -> tuple[Any, Any]:
        model = linear()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.set_weights([np.asarray(hvd.broadcast(model.get_weights()[0], 0, name="diloco.again"))])
        callback = hvd.callbacks.DiLoCoCallback(sync_every=4, delay=2, compression=Adaptive(4))
        callback.set_model(model)
        callback.on_train_begin()
        return model, callback

    model, callback = start()
    # what was sent after batch 10 is under way after batch 11
    batches(model, callback, 0, 11)
    assert callback.diloco_stats()["under_way"] == 0
    weights, state = model.get_weights(), callback.diloco_state_dict()
    batches(model, callback, 11, 20)
    again, resumed = start()
    again.set_weights(weights)
    resumed.load_diloco_state_dict(state)
    batches(again, resumed, 11, 20)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


@cases.add
def a_rank_that_diverges_goes_back() -> None:
    model = linear()
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "mse")
    first, callback = callbacks(sync_every=2, average_epochs=False)

    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and hvd.rank() == 0:
                self.model.set_weights([np.full((20, 3), np.nan, np.float32)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data(hvd.rank()), batch_size=16, verbose=0, callbacks=[first, callback, Spoil()])
    said = [str(w.message) for w in caught if "DiLoCo" in str(w.message)]
    assert len(said) == 1
    assert ("are again what the ranks agreed on last" in said[0]) == (hvd.rank() == 0)
    assert callback.diloco_stats()["synchronizations"] == {"sent": 3, "merged": 2, "not_finite": 1}
    check_equal_on_all_ranks(model)
    assert np.isfinite(model.get_weights()[0]).all()


@cases.add
def wrong_use_of_diloco_is_told() -> None:
    model = linear()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), "mse")
    fit = {"batch_size": 16, "verbose": 0}
    if hvd.size() > 1:
        raises(ValueError, lambda: model.fit(*data(0), **fit, callbacks=[*callbacks()]), "with a plain optimizer")
        other = linear()
        other.compile(keras.optimizers.SGD(RATE), "mse")
        given = callbacks(sync_every=2 + hvd.rank())
        raises(MismatchError, lambda: other.fit(*data(0), **fit, callbacks=[*given]), "schedule.sync_every")
    raises(ValueError, lambda: callbacks(delay=30), "delay must be less than")
    raises(ValueError, lambda: callbacks(outer_momentum=1.0), "momentum must be a number from 0 on")
    raises(ValueError, lambda: callbacks(outer_learning_rate=0), "learning_rate must be")
