"""DASO in Keras `fit`: 4 processes of one machine stand for 2 nodes of 2, 2 for 2 of one."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import numpy as np

from hvd_compress import BF16, Adaptive, DasoSchedule, NoCompression, TopK
from hvd_compress.errors import MismatchError
from hvd_compress.schedules import Moment
from tests.parallel.cases import Cases
from tests.parallel.workers.keras_fit import FRAMEWORK, check_equal_on_all_ranks, hvd, keras
from tests.parallel.workers.neutral import raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
PER_NODE = SIZE // 2
PROCESS_SETS = hvd.daso_process_sets(ranks_per_node=PER_NODE)
RATE = 0.1
RAW = {"blocking_compression": NoCompression(), "patience": None}


def data(rank: int, images: int = 112) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).standard_normal((images, 20)).astype(np.float32)
    return x, (x[:, :3] * 2 + rank).astype(np.float32)


def linear() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(3, use_bias=False, name="only")])


def larger() -> Any:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((20,)), *layers])


def fitted(model: Any, callback: Any, epochs: int, optimizer: Any) -> None:
    model.compile(hvd.DASO(optimizer, ranks_per_node=PER_NODE), "mse")
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*data(hvd.rank()), batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[first, callback])


def daso(**settings: Any) -> Any:
    return hvd.callbacks.DASOCallback(ranks_per_node=PER_NODE, **{**RAW, **settings})


def simulated(schedule: DasoSchedule, start: np.ndarray, steps: int) -> np.ndarray:
    """The weights of this rank's node: SGD on the mean of squares, and equation 1 of the paper."""
    weights, clock, sent = [start.copy(), start.copy()], schedule.clock(), []
    for step in range(steps):
        for node, w in enumerate(weights):
            gradients = []
            for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
                x, y = (a[step % 7 * 16 : step % 7 * 16 + 16] for a in data(rank))
                gradients.append(2 * x.T @ (x @ w - y) / y.size)
            weights[node] = w - RATE * np.mean(gradients, axis=0)
        moment = clock.batch()
        if moment.arrives is not None and not moment.blocks:
            weights = [(2 * moment.arrives * w + sent[0] + sent[1]) / (2 * moment.arrives + 2) for w in weights]
        if moment.blocks:
            weights = [(weights[0] + weights[1]) / 2] * 2
        if moment.sends:
            sent = [w.copy() for w in weights]
        if (step + 1) % 7 == 0:
            assert clock.end_epoch(None) == Moment()
    return weights[hvd.rank() // PER_NODE]


@cases.each({"B1-S0": (1, 0), "B3-S0": (3, 0), "B2-S1": (2, 1), "B3-S3": (3, 3)})
def weights_follow_equation_1(pair: tuple[int, int]) -> None:
    for form in ("sharded", "rotate"):
        model = linear()
        start = np.asarray(hvd.broadcast(model.get_weights()[0], 0, name="daso.start"))
        seen: list[np.ndarray] = []

        class Recorder(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None, seen: Any = seen) -> None:
                seen.append(self.model.get_weights()[0])

        callback = daso(global_skips=pair[0], batches_to_wait=pair[1], form=form)
        model.compile(hvd.DASO(keras.optimizers.SGD(RATE), ranks_per_node=PER_NODE), "mse")
        first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(
            *data(hvd.rank()),
            batch_size=16,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[first, callback, Recorder()],
        )
        schedule = DasoSchedule(*pair, patience=None, steps_per_epoch=7)
        for steps in range(1, 15):
            np.testing.assert_allclose(seen[steps - 1], simulated(schedule, start, steps), rtol=2e-4, atol=2e-5)
        check_equal_on_all_ranks(model)


@cases.add
def weights_that_early_stopping_restores_are_equal_on_all_ranks_at_the_end() -> None:
    model, callback = linear(), daso(global_skips=3)
    model.compile(hvd.DASO(keras.optimizers.SGD(RATE), ranks_per_node=PER_NODE), "mse")
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    # before the callback that makes ranks equal at the end of an epoch
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    metrics = hvd.callbacks.MetricAverageCallback()
    model.fit(*data(hvd.rank()), batch_size=16, epochs=2, verbose=0, callbacks=[first, metrics, stopping, callback])
    check_equal_on_all_ranks(model)


COMPRESSED = {
    "adaptive": {"compression": Adaptive(8)},
    "topk-rotate": {"compression": TopK(0.2), "form": "rotate", "merge": "delta"},
    "phases": {
        "compression": Adaptive(8), "blocking_compression": BF16(), "total_epochs": 3, "warmup_epochs": 1,
        "cooldown_epochs": 1,
    },
}  # fmt: skip


@cases.each(COMPRESSED)
def compressed_training_learns_and_makes_ranks_equal(settings: dict[str, Any]) -> None:
    model = larger()
    callback = daso(global_skips=3, batches_to_wait=2, average_state=True, **settings)
    fitted(model, callback, 3, keras.optimizers.SGD(0.05, momentum=0.9))
    # weights, moving means and momentum
    check_equal_on_all_ranks(model)
    momentum = [v for v in model.optimizer.variables if len(v.shape)] if FRAMEWORK == "torch" else []
    for i, v in enumerate(momentum):
        mine = np.asarray(v)
        np.testing.assert_array_equal(mine, np.asarray(hvd.broadcast(mine, 0, name=f"momentum.{i}")))
    stats = callback.daso_stats()
    assert stats["epochs"][-1]["loss"] < stats["epochs"][0]["loss"]
    assert (stats["batches"], stats["nodes"], len(stats["epochs"])) == (21, 2, 3)
    if "total_epochs" in settings:
        assert [epoch["phase"] for epoch in stats["epochs"]] == ["warm-up", "cycling", "cool-down"]
        assert stats["synchronizations"] == {"blocking": 15, "sent": 1, "merged": 1}


@cases.add
def a_state_goes_on_in_the_middle_of_a_cycle() -> None:
    x, y = data(hvd.rank())

    def batches(model: Any, callback: Any, begin: int, end: int) -> None:
        for step in range(begin, end):
            rows = slice(step % 7 * 16, step % 7 * 16 + 16)
            model.train_on_batch(x[rows], y[rows])
            callback.on_train_batch_end(step)

    def start() -> tuple[Any, Any]:
        model, callback = linear(), daso(global_skips=3, batches_to_wait=2, compression=Adaptive(4))
        model.compile(hvd.DASO(keras.optimizers.SGD(RATE), ranks_per_node=PER_NODE), "mse")
        callback.set_model(model)
        callback.set_params({})
        return model, callback

    model, callback = start()
    # what was sent after batch 9 is under way after batch 10
    batches(model, callback, 0, 10)
    weights, state = model.get_weights(), callback.daso_state_dict()
    batches(model, callback, 10, 20)
    again, resumed = start()
    again.set_weights(weights)
    resumed.load_daso_state_dict(state)
    assert resumed.daso_state_dict() is state
    batches(again, resumed, 10, 20)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


@cases.add
def validation_is_of_equal_weights_and_epochs_may_be_of_unknown_length() -> None:
    """Among nodes of one rank, where a change takes two collectives; one rank is slow."""
    seen: list[list[np.ndarray]] = []

    class Recorder(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            seen.append(self.model.get_weights()[:1])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 0:
                time.sleep(0.01)

    def endless() -> Any:
        x, y = data(hvd.rank())
        while True:
            for begin in range(0, 112, 16):
                yield x[begin : begin + 16], y[begin : begin + 16]

    model = larger()
    callback = hvd.callbacks.DASOCallback(
        **RAW, global_skips=3, batches_to_wait=3, compression=Adaptive(8), ranks_per_node=1
    )
    model.compile(hvd.DASO(keras.optimizers.SGD(0.05), ranks_per_node=1), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), callback, Recorder()]
    settings = {"verbose": 0, "shuffle": False, "callbacks": callbacks, "validation_data": data(0, 16)}
    # as long as Keras is told, and then longer
    model.fit(endless(), steps_per_epoch=4, epochs=2, **settings)
    model.fit(endless(), steps_per_epoch=7, epochs=2, **settings)
    for i, (weights,) in enumerate(seen):
        everyone = np.asarray(hvd.allgather(weights.reshape(1, -1), name=f"validated.{i}"))
        np.testing.assert_array_equal(everyone, np.broadcast_to(everyone[:1], everyone.shape))
    assert len(seen) == 4
    stats = callback.daso_stats()
    assert (len(stats["epochs"]), stats["batches"]) == (4, 22)


@cases.each({"told-by-keras": True, "found-at-the-end": False})
def nodes_that_make_different_numbers_of_batches_are_told_so(has_length: bool) -> None:
    model = linear()
    model.compile(hvd.DASO(keras.optimizers.SGD(RATE), ranks_per_node=PER_NODE), "mse")
    batches = 3 if hvd.rank() < PER_NODE else 2
    x, y = data(hvd.rank(), 16 * batches)

    def one_by_one() -> Any:
        for begin in range(0, len(x), 16):
            yield x[begin : begin + 16], y[begin : begin + 16]

    given = {"x": x, "y": y, "batch_size": 16} if has_length else {"x": one_by_one()}
    # no batch sends anything: what is under way when an error comes would be left to the cases after this one
    callback = daso(global_skips=100, batches_to_wait=1)

    def fit() -> None:
        # Keras says that a generator has ended
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        model.fit(**given, epochs=1, shuffle=False, verbose=0, callbacks=[callback])

    where = "steps_per_epoch" if has_length else "epoch_end() after 3 batches"
    with warnings.catch_warnings():
        raises(MismatchError, fit, "the ranks disagree on", where)


@cases.add
def executions_of_several_steps_count_once() -> None:
    # Keras on torch has one step in each
    each = 1 if FRAMEWORK == "torch" else 2
    model, callback = linear(), daso(global_skips=2)
    model.compile(hvd.DASO(keras.optimizers.SGD(RATE), ranks_per_node=PER_NODE), "mse", steps_per_execution=each)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*data(hvd.rank()), batch_size=16, epochs=2, verbose=0, callbacks=[first, callback])
    check_equal_on_all_ranks(model)
    # of the 7 batches of an epoch the last is alone
    assert callback.daso_stats()["batches"] == {1: 14, 2: 8}[each]
    assert len(callback.daso_stats()["epochs"]) == 2


@cases.add
def wrong_use_is_told() -> None:
    model = linear()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), "mse")

    def fit() -> None:
        model.fit(*data(hvd.rank()), batch_size=16, verbose=0, callbacks=[daso()])

    raises(ValueError, fit, "compiled with hvd.DASO(optimizer)", "ranks_per_node")
    raises(ValueError, lambda: daso(global_skips=0), "global_skips")
    raises(ValueError, lambda: daso(cooldown_epochs=1), "without total_epochs")
    raises(ValueError, lambda: hvd.DASO(keras.optimizers.SGD(), ranks_per_node=3), "divides")
