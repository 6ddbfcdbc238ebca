"""Keras `fit` with wrapped optimizers, on the backend that KERAS_BACKEND names, or with Keras 2 if so asked."""

from __future__ import annotations

import os
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import FP16, NoCompression, OneBit, TopK
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.feedback import read_state, write_state
from tests.outsider import SignSum
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import COMPRESSORS, raises, ranks_of_start

FRAMEWORK = "torch" if os.environ.get("KERAS_BACKEND") == "torch" else "tensorflow"
KERAS = int(os.environ.get("HVD_COMPRESS_KERAS", "3"))
if KERAS == 2:
    from tensorflow import keras

    import hvd_compress.tensorflow.keras as hvd
else:
    import keras

    import hvd_compress.keras as hvd

cases = Cases()
# what Keras adds is the same for all; tracing takes seconds where ranks outnumber cores
_FEW = {"onebit": COMPRESSORS["onebit"], "topk-golomb": COMPRESSORS["topk-golomb"]}
FITTED = {**(COMPRESSORS if ranks_of_start() == 2 and KERAS == 3 else _FEW), "none": NoCompression(), "fp16": FP16()}
FITTED["of-a-users-file"] = SignSum()


def network(dropout: float = 0.0, use_bias: bool = True) -> Any:
    # other weights on each rank: only a broadcast makes them equal
    keras.utils.set_random_seed(1 + hvd.rank())
    layers = [
        keras.Input((40,)),
        keras.layers.Dense(64, activation="relu", use_bias=use_bias, name="first"),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(10, use_bias=use_bias, name="second"),
    ]
    return keras.Sequential(layers)


def data(rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(hvd.rank() if rank is None else rank).standard_normal((96, 40)).astype(np.float32)
    return x, x[:, :10].argmax(1)


def wrapped(optimizer: Any = None, compression: Any = None, **settings: Any) -> Any:
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, compression=compression or OneBit(), **{"min_numel": 100, **settings})


def trained(optimizer: Any, *callbacks: Any, model: Any = None, epochs: int = 2, **compile_settings: Any) -> Any:
    model = model or network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **compile_settings)
    callbacks = (hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks)
    history = model.fit(*data(), batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    model.seen = history.history
    return model


def check_equal_on_all_ranks(model: Any) -> None:
    digest = zlib.crc32(b"".join(w.tobytes() for w in model.get_weights()))
    digests = np.asarray(hvd.allgather(np.array([digest], np.int64), name="digest")).tolist()
    assert len(set(digests)) == 1, f"the ranks' weights differ: {digests}"


@cases.each(FITTED, witnesses=["onebit", "none"])
def weights_are_equal_after_fit(compressor: Any) -> None:
    model = trained(wrapped(keras.optimizers.Adam(0.01), compressor), model=network(dropout=0.2))
    check_equal_on_all_ranks(model)
    steps = model.optimizer.compression_stats()["total"]["steps"]
    assert steps == int(model.optimizer.iterations) == 12


def stock_gradients(model: Any, loss: Any, x: np.ndarray, y: np.ndarray) -> list[Any]:
    """Gradients of the model's trainable weights, averaged by stock Horovod."""
    if FRAMEWORK == "torch":
        import horovod.torch as stock

        model.zero_grad()
        loss(y, model(x, training=True)).backward()
        of = [v.value.grad for v in model.trainable_weights]
        return [stock.allreduce(gradient, name=f"stock.{i}") for i, gradient in enumerate(of)]
    import horovod.tensorflow as stock
    import tensorflow as tf

    raw = [getattr(v, "value", v) if KERAS == 3 else v for v in model.trainable_weights]
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    return stock.DistributedGradientTape(tape).gradient(value, raw)


@cases.add
def without_compression_fit_is_stock_horovod() -> None:
    model, alone = network(), network()
    start = [np.array(hvd.broadcast(w, 0, name=f"stock.start{i}")) for i, w in enumerate(network().get_weights())]
    alone.set_weights(start)
    trained(wrapped(keras.optimizers.SGD(0.1, momentum=0.9), NoCompression()), model=model, epochs=1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = data()
    for first in range(0, 96, 16):
        given = stock_gradients(alone, loss, x[first : first + 16], y[first : first + 16])
        optimizer.apply_gradients(zip(given, alone.trainable_weights, strict=True))
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        # with more than two ranks a ring adds in an order that depends on what is fused
        if hvd.size() == 2:
            assert found.tobytes() == expected.tobytes(), np.abs(found - expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@cases.add
def without_compression_fit_is_training_on_all_data() -> None:
    model = trained(wrapped(keras.optimizers.SGD(0.1), NoCompression()), epochs=1)
    alone = network()
    hvd_weights = [np.asarray(hvd.broadcast(w, 0, name=f"w{i}")) for i, w in enumerate(network().get_weights())]
    alone.set_weights(hvd_weights)
    alone.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    parts = [data(rank) for rank in range(hvd.size())]
    for first in range(0, 96, 16):
        x, y = (np.concatenate([part[i][first : first + 16] for part in parts]) for i in range(2))
        alone.train_on_batch(x, y)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@cases.each({"clipnorm": {"clipnorm": 0.01}, "clipvalue": {"clipvalue": 0.001}, "global": {"global_clipnorm": 0.01}})
def clipping_sees_combined_gradients(clip: Any) -> None:
    model = network()
    start = [np.array(hvd.broadcast(w, 0, name=f"start{i}")) for i, w in enumerate(model.get_weights())]
    model = trained(wrapped(keras.optimizers.SGD(1.0, **clip)), model=model, epochs=1)
    check_equal_on_all_ranks(model)
    moved = [w - s for w, s in zip(model.get_weights(), start, strict=True)]
    if "clipvalue" in clip:
        assert max(np.abs(m).max() for m in moved) <= 6 * 0.001 * 1.001
    else:
        assert max(np.linalg.norm(m) for m in moved) <= 6 * 0.01 * 1.001
    assert max(np.abs(m).max() for m in moved) > 0


@cases.each({"sum": False, "average": True})
def backward_passes_are_accumulated(average: bool) -> None:
    optimizer = wrapped(keras.optimizers.SGD(0.01), backward_passes_per_step=3, average_aggregated_gradients=average)
    model = trained(optimizer)
    check_equal_on_all_ranks(model)
    stats = model.optimizer.compression_stats()["total"]
    # 12 batches; Keras 3 counts updates, Keras 2 batches
    assert stats["steps"] == 4
    assert int(model.optimizer.iterations) == (12 if KERAS == 2 else 4)


if KERAS == 3:

    @cases.each({"alone": False, "under a loss scale": True}, witnesses=["alone"])
    def a_trained_optimizer_that_accumulates_since_is_saved_as_it_is(is_scaled: bool) -> None:
        adam = keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9))
        plain = network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        plain.compile(keras.optimizers.LossScaleOptimizer(adam) if is_scaled else adam, loss)
        plain.fit(*data(), batch_size=16, verbose=0)
        before = [np.array(v) for v in plain.optimizer.variables]
        done = int(adam.iterations)
        if not is_scaled:
            adam.exclude_from_weight_decay(var_names=["bias"])
        optimizer = wrapped(plain.optimizer, compression=NoCompression(), backward_passes_per_step=3)
        # a schedule goes on where it was
        assert int(np.array(getattr(optimizer, "inner_optimizer", optimizer)._iterations)) == done > 0
        if not is_scaled:
            assert not any(optimizer._use_weight_decay(v) for v in plain.trainable_variables if "bias" in v.path)
        large = [v for v in before if v.ndim > 1]
        assert all(any(np.array_equal(v, w) for w in optimizer.variables if w.shape == v.shape) for v in large)
        model = trained(optimizer, model=plain)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            again = hvd.load_model(path, compression=NoCompression(), backward_passes_per_step=3)
        for v, w in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(v), np.array(w), err_msg=v.path)

    @cases.add
    def accumulated_passes_are_summed_after_a_load_too() -> None:
        model = trained(wrapped(keras.optimizers.SGD(0.01), compression=NoCompression(), backward_passes_per_step=3))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            again = hvd.load_model(path, compression=NoCompression(), backward_passes_per_step=3)
            raises(ValueError, lambda: hvd.load_model(path, backward_passes_per_step=2), "give one of them")
        for each in (model, again):
            each.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        for found, expected in zip(again.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@cases.add
def loss_scaling_skips_a_step_on_all_ranks() -> None:
    scaled = keras.optimizers.LossScaleOptimizer if hasattr(keras.optimizers, "LossScaleOptimizer") else None
    scaled = scaled or keras.mixed_precision.LossScaleOptimizer
    optimizer = wrapped(scaled(keras.optimizers.SGD(0.05), initial_scale=2.0**10))
    model = trained(optimizer)
    check_equal_on_all_ranks(model)
    before = model.get_weights()
    x, y = data()
    if hvd.rank() == hvd.size() - 1:
        x[0] = np.inf
    model.train_on_batch(x[:16], y[:16])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.train_on_batch(*data(0))
    check_equal_on_all_ranks(model)


@cases.add
def mixed_float16_trains() -> None:
    policy = keras.mixed_precision
    policy.set_global_policy("mixed_float16")
    try:
        model = trained(wrapped())
    finally:
        policy.set_global_policy("float32")
    check_equal_on_all_ranks(model)


@cases.add
def class_name_and_configuration_are_those_of_the_base() -> None:
    plain = keras.optimizers.Adam(0.01, clipnorm=1.0)
    mine = wrapped(plain)
    assert mine.get_config() == plain.get_config()
    assert mine.name == plain.name
    assert isinstance(mine, keras.optimizers.Adam)
    assert keras.saving.serialize_keras_object(mine) == keras.saving.serialize_keras_object(plain)
    raises(UnsupportedError, lambda: wrapped(mine), "wrap it once")


@cases.add
def a_saved_model_loads_with_and_without_us_and_goes_on() -> None:
    model = trained(wrapped())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.models.load_model(path)
        again = hvd.load_model(path, compression=OneBit(), min_numel=100)
    assert not hasattr(type(plain.optimizer), "compression_stats")
    again.fit(*data(), batch_size=16, verbose=0, shuffle=False)
    check_equal_on_all_ranks(again)
    assert int(again.optimizer.iterations) == 18
    assert again.optimizer.compression_stats()["total"]["steps"] == 6


@cases.add
def a_resumed_training_is_bit_identical() -> None:
    # all is compressed: the order in which Horovod sums dense tensors over Gloo depends on what it happens to fuse
    straight = trained(wrapped(), model=network(use_bias=False), epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        keeper = hvd.callbacks.CompressionCheckpointCallback(Path(folder) / "state")
        trained(wrapped(), keeper, model=network(use_bias=False), epochs=2).save(path)
        again = hvd.load_model(path, compression=OneBit(), min_numel=100)
        again.fit(*data(), batch_size=16, verbose=0, shuffle=False, callbacks=[keeper])
        for a, b in zip(straight.get_weights(), again.get_weights(), strict=True):
            assert a.tobytes() == b.tobytes()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trained(wrapped(), keeper, model=network(use_bias=False), epochs=1)
        assert any("left out on all ranks" in str(w.message) for w in seen)


@cases.add
def a_damaged_file_on_one_rank_is_left_out_on_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder) / "model.keras", Path(folder) / "state"
        keeper = hvd.callbacks.CompressionCheckpointCallback(state)
        trained(wrapped(), keeper, model=network(use_bias=False), epochs=1).save(path)
        file = state / "compression-1.npz"
        for part in (2, 3):
            if file.exists():
                damaged = bytearray(file.read_bytes())
                damaged[len(damaged) // part] ^= 255
                file.write_bytes(damaged)
            again = hvd.load_model(path, compression=OneBit(), min_numel=100)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                again.fit(*data(), batch_size=16, verbose=0, shuffle=False, callbacks=[keeper])
            assert any("left out on all ranks" in str(w.message) for w in seen)
            check_equal_on_all_ranks(again)


@cases.add
def ranks_that_were_away_for_a_while_leave_files_that_are_not_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder) / "model.keras", Path(folder) / "state"
        keeper = hvd.callbacks.CompressionCheckpointCallback(state)
        trained(wrapped(), keeper, model=network(use_bias=False), epochs=1).save(path)
        saved = read_state(state / f"compression-{hvd.rank()}.npz")
        # one rank went on alone, and the others have come back since
        alone = {**saved, "size": 1, "rank": 0, "owner_residuals": {}}
        for rank in range(hvd.size()):
            old = {**saved, "rank": rank, "iterations": saved["iterations"] - 1}
            write_state(state / f"compression-{rank}.npz", alone if rank == 0 else old)
        again = hvd.load_model(path, compression=OneBit(), min_numel=100)
        keeper.set_model(again)
        with warnings.catch_warnings():
            # a state that is left out is a warning
            warnings.simplefilter("error")
            keeper.on_train_begin()
        assert bool(again.optimizer.compression_state_dict()["residuals"]) == (hvd.rank() == 0)


@cases.add
def callbacks_tell_the_same_on_all_ranks() -> None:
    stats, warmup = hvd.callbacks.CompressionStatsCallback(), hvd.callbacks.LearningRateWarmupCallback(0.08, 2)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "log.csv"
        logger = keras.callbacks.CSVLogger(table)
        model = trained(wrapped(), hvd.callbacks.MetricAverageCallback(), stats, warmup, logger, epochs=3)
        assert {"compression_ratio", "bytes_sent", "residual_norm"} <= set(table.read_text().splitlines()[0].split(","))
    seen = model.seen
    assert seen["compression_ratio"][0] > 5
    assert seen["residual_norm"][0] > 0
    np.testing.assert_allclose(seen["lr"][1:], 0.08, rtol=1e-6)
    first = 0.08 / hvd.size() * (1 * (hvd.size() - 1) / 2 + 1)
    np.testing.assert_allclose(seen["lr"][0], first, rtol=1e-6)
    for name in ("loss", "accuracy"):
        everyone = np.asarray(hvd.allgather(np.array(seen[name]), name=f"seen.{name}")).reshape(hvd.size(), -1)
        assert (everyone == everyone[0]).all(), name
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.04, 0.5, start_epoch=1)
    model = trained(wrapped(keras.optimizers.SGD(0.04)), schedule, epochs=3)
    np.testing.assert_allclose(model.seen["lr"], [0.04, 0.04, 0.02], rtol=1e-6)


@cases.add
def compression_warms_up() -> None:
    warmup = hvd.callbacks.CompressionWarmupCallback(warmup_epochs=1, dense_epochs=1)
    model = trained(wrapped(compression=TopK(0.01)), warmup, hvd.callbacks.CompressionStatsCallback(), epochs=3)
    check_equal_on_all_ranks(model)
    dense, wide, narrow = model.seen["compression_ratio"]
    assert dense == 1.0
    assert 1.0 < wide < narrow


@cases.add
def local_layers_stay_local() -> None:
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=OneBit(), min_numel=100, local_layers=model.layers[0]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    # what is not broadcast is warned of, but for what is to differ
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=model.layers[0].weights)
    model.fit(*data(), batch_size=16, verbose=0, callbacks=[first])
    tensors = model.optimizer.compression_stats()["tensors"]
    assert len(tensors) == 2, tensors


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    compression = TopK(0.1 if hvd.rank() == 0 else 0.2)
    raises(MismatchError, lambda: trained(wrapped(compression=compression), run_eagerly=True), "ratio")
