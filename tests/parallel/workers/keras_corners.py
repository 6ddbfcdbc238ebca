"""Corners of Keras `fit`: unusual models and optimizers, compilers, what is owed between steps."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
import zlib
from typing import Any

import numpy as np

from hvd_compress import (
    FP16,
    Adaptive,
    ConstantThreshold,
    NoCompression,
    OneBit,
    ParameterServer,
    Policy,
    SlopeThreshold,
    TopK,
)
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.gossip import GossipLoopback, ParameterSpec
from tests.parallel.cases import Cases
from tests.parallel.workers.keras_fit import (
    FRAMEWORK,
    KERAS,
    check_equal_on_all_ranks,
    data,
    hvd,
    keras,
    network,
    trained,
    wrapped,
)
from tests.parallel.workers.neutral import raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()


@cases.each({"dense": False, "sparse": True})
def embeddings_train(sparse_as_dense: bool) -> None:
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.Input((5,)), keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(wrapped(sparse_as_dense=sparse_as_dense), "mse")
    words = np.random.default_rng(hvd.rank()).integers(0, 50, (32, 5))
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(words, np.ones((32, 3), np.float32), batch_size=8, verbose=0, callbacks=[first])
    check_equal_on_all_ranks(model)


@cases.add
def xla_is_switched_off_by_a_callback() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = trained(wrapped(), jit_compile=True)
    check_equal_on_all_ranks(model)
    assert any("jit_compile is switched off" in str(w.message) for w in seen) == (hvd.rank() == 0)


@cases.add
def compiled_without_our_callbacks_it_exchanges_or_says_why_not() -> None:
    model = network()
    model.set_weights([np.asarray(hvd.broadcast(w, 0, name=f"jit{i}")) for i, w in enumerate(model.get_weights())])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrapped(), loss, jit_compile=True)

    def fit() -> None:
        with warnings.catch_warnings():
            # torch.compile warns of its own parts
            warnings.simplefilter("ignore")
            model.fit(*data(), batch_size=16, verbose=0)

    if FRAMEWORK == "tensorflow":
        raises(Exception, fit, "jit_compile=False")
        return
    fit()
    check_equal_on_all_ranks(model)
    assert model.optimizer.compression_stats()["total"]["steps"] == 6


@cases.add
def a_model_that_is_built_on_one_rank_only_is_broadcast_after_the_first_batch() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    if hvd.rank() == 0:
        model.build((None, 40))
    check_equal_on_all_ranks(trained(wrapped(), model=model))


@cases.add
def metrics_may_be_arrays() -> None:
    model = network()
    metric = keras.metrics.F1Score()
    model.compile(wrapped(), keras.losses.CategoricalCrossentropy(from_logits=True), metrics=[metric])
    x, y = data()
    history = model.fit(x, np.eye(10, dtype=np.float32)[y], batch_size=16, verbose=0,
                        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                                   hvd.callbacks.MetricAverageCallback()])  # fmt: skip
    mine = np.asarray(history.history["f1_score"][0])
    assert mine.shape == (10,)
    everyone = np.asarray(hvd.allgather(mine, name="f1")).reshape(hvd.size(), 10)
    assert (everyone == everyone[0]).all()


@cases.each({"the same callback": False, "another callback": True})
def compression_warms_up_once(another: bool) -> None:
    def callback() -> Any:
        return hvd.callbacks.CompressionWarmupCallback(warmup_epochs=1, dense_epochs=1)

    warmup, stats = callback(), hvd.callbacks.CompressionStatsCallback()
    model = trained(wrapped(compression=TopK(0.01)), warmup, epochs=2)
    # interrupted: the last stage was to begin now
    again = callback() if another else warmup
    seen = model.fit(*data(), batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=[again, stats]).history
    assert 1.0 < seen["compression_ratio"][0] == seen["compression_ratio"][1] < seen["compression_ratio"][2]
    check_equal_on_all_ranks(model)
    assert model.optimizer._hvd.settings["compression"] == TopK(0.01)


@cases.each({"from the epoch it has reached": 1, "from the first epoch": 0})
def a_warm_up_goes_on_where_training_was_resumed(begin: int) -> None:
    def warmup() -> Any:
        return hvd.callbacks.CompressionWarmupCallback(warmup_epochs=2, dense_epochs=1)

    model = trained(wrapped(compression=TopK(0.01)), warmup(), epochs=2)
    state = model.optimizer.compression_state_dict()
    resumed = wrapped(compression=TopK(0.01))
    resumed.load_compression_state_dict(state)
    seen: list[Any] = []

    class Recorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.optimizer._hvd.settings["compression"])

    model.compile(resumed, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*data(), batch_size=16, epochs=4, initial_epoch=begin, verbose=0, callbacks=[warmup(), Recorder()])
    assert seen[-3:] == [TopK(0.25), TopK(0.0625), TopK(0.01)]
    # an epoch that came before is as the last one was, and not dense again
    assert seen[:-3] == [TopK(0.25)] * (1 - begin)
    check_equal_on_all_ranks(model)


@cases.add
def what_is_owed_is_known_between_steps() -> None:
    model = trained(wrapped())
    optimizer = model.optimizer
    state = optimizer.compression_state_dict()
    assert state["residuals"]
    optimizer.set_compression(TopK(0.1))
    assert optimizer.compression_state_dict()["residuals"].keys() == state["residuals"].keys()
    assert optimizer.compression_stats()["total"]["residual_norm"] > 0
    later = wrapped()
    later.load_compression_state_dict(state)
    found = later.compression_state_dict()
    assert found["residuals"].keys() == state["residuals"].keys()
    for name, entry in state["residuals"].items():
        np.testing.assert_array_equal(found["residuals"][name]["values"], entry["values"])


@cases.each({f"{t}-{a}": (t, a) for t in ("horovod", "mpi") for a in ("compressed", "dense")})
def gradients_go_through_a_parameter_server(setting: tuple[str, str]) -> None:
    transport = setting[0] if hvd.mpi_enabled() else "horovod"
    server = ParameterServer("round_robin", setting[1], transport)
    for compression in (OneBit(), NoCompression()):
        model = trained(wrapped(compression=compression, exchange=server))
        check_equal_on_all_ranks(model)
        ways = {counters["exchange"] for counters in model.optimizer.compression_stats()["tensors"].values()}
        assert "parameter_server" in ways
        # another compressor takes over what is owed, and the same way
        model.optimizer.set_compression(TopK(0.1))
        model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        check_equal_on_all_ranks(model)


@cases.add
def each_variable_goes_its_way() -> None:
    rules = [("first/kernel", OneBit()), ("second/kernel", Adaptive(pi=4)), ("*/bias", FP16())]
    model = trained(wrapped(compression=Policy(rules), bucket_bytes=2**20, exchange="two_phase"))
    check_equal_on_all_ranks(model)
    tensors = model.optimizer.compression_stats()["tensors"]
    ways = {
        name.rpartition("/")[2] + str(i): counters["exchange"] for i, (name, counters) in enumerate(tensors.items())
    }
    assert sorted(ways.values()) == ["two_phase", "two_phase", "two_phase, uncompressed", "two_phase, uncompressed"], (
        ways
    )
    # without a rule nothing is compressed; what the old rules owe must go somewhere
    model.optimizer.set_compression(Policy(rules[:1], default=NoCompression()))
    model.make_train_function(force=True)
    if FRAMEWORK == "tensorflow":
        raises(Exception, lambda: model.train_on_batch(*data()), "is still owed")
        return
    # it goes with the next gradients
    model.train_on_batch(*data())
    check_equal_on_all_ranks(model)
    norms = {n: t["residual_norm"] for n, t in model.optimizer.compression_stats()["tensors"].items()}
    assert [name for name, norm in norms.items() if norm > 0] == [n for n in norms if n.endswith("first/kernel")]


@cases.each({"by name": "auto", "later": None})
def auto_trains(compression: Any) -> None:
    # on TensorFlow what is owed cannot follow tensors that go uncompressed
    before = NoCompression() if FRAMEWORK == "tensorflow" else OneBit()
    model = trained(wrapped(compression=compression or before), epochs=1)
    if compression is None:
        model.optimizer.set_compression("auto")
    model = trained(model.optimizer, model=model, epochs=3)
    check_equal_on_all_ranks(model)
    stats = model.optimizer.compression_stats()
    assert stats["total"]["steps"] == 24
    assert stats["auto"]["configuration"] in stats["auto"]["predicted_seconds"]
    told = f"{stats['auto']['configuration']} {stats['auto']['committed']} {stats['auto']['reason']}".encode()
    digest = np.array([zlib.crc32(told)], np.int64)
    assert len(set(np.asarray(hvd.allgather(digest, name="told")).tolist())) == 1


@cases.add
def what_is_owed_when_a_compressor_without_error_feedback_comes() -> None:
    model = trained(wrapped(), run_eagerly=True)
    owed = model.optimizer.compression_stats()["total"]["residual_norm"]
    assert owed > 0
    model.optimizer.set_compression(TopK(0.1, error_feedback=False))
    if FRAMEWORK == "tensorflow":
        # it is refused, and refused again
        for _ in range(2):
            raises(UnsupportedError, lambda: model.train_on_batch(*data()), "is still owed")
        assert model.optimizer.compression_stats()["total"]["residual_norm"] == owed
        return
    # it goes with the next gradients
    model.train_on_batch(*data())
    check_equal_on_all_ranks(model)
    assert model.optimizer.compression_stats()["total"]["residual_norm"] == 0


@cases.add
def all_that_an_optimizer_has_is_kept() -> None:
    plain = keras.optimizers.SGD(0.05, momentum=0.9)
    plain.note = "of the user"
    model = network()
    model.compile(plain, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*data(), batch_size=16, verbose=0)
    mine = wrapped(plain)
    assert mine.note == "of the user"
    assert int(mine.iterations) == 6
    model.compile(mine, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = trained(mine, model=model, epochs=1)
    check_equal_on_all_ranks(model)
    assert int(mine.iterations) == 12


@cases.each({"compiled again": False, "run eagerly": True})
def frozen_layers_stay_as_they_are(eagerly: bool) -> None:
    settings = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "run_eagerly": eagerly}
    model = trained(wrapped(compression=TopK(0.05)), run_eagerly=eagerly)
    first = model.layers[0].get_weights()
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        # Keras 2 looks at it when it compiles
        if not eagerly or KERAS == 2:
            model.compile(model.optimizer, **settings)
        before = model.get_weights()
        model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        same = [(a == b).all() for a, b in zip(first, model.layers[0].get_weights(), strict=True)]
        assert all(same) if not trainable else not all(same)
        assert any((a != b).any() for a, b in zip(before[len(first) :], model.get_weights()[len(first) :], strict=True))
    check_equal_on_all_ranks(model)


@cases.add
def a_wrapped_optimizer_is_not_copied_to_a_plain_one() -> None:
    mine = trained(wrapped(), epochs=1).optimizer
    for copied in (copy.deepcopy, pickle.dumps):
        raises(UnsupportedError, lambda copied=copied: copied(mine), "from_config", "exchanges nothing")
    again = wrapped(mine.__class__.from_config(mine.get_config()))
    check_equal_on_all_ranks(trained(again, epochs=1))
    assert type(type(mine).from_config(mine.get_config())) is mine.__class__
    raises(UnsupportedError, lambda: wrapped(mine), "wrap it once", "set_compression")


@cases.add
def a_wrapped_optimizer_clips_what_is_combined() -> None:
    model = network()
    model.set_weights([np.asarray(hvd.broadcast(w, 0, name=f"clip{i}")) for i, w in enumerate(model.get_weights())])
    before = model.get_weights()
    model = trained(wrapped(keras.optimizers.SGD(1.0, global_clipnorm=1e-3)), model=model, epochs=2)
    moved = sum(((a - b) ** 2).sum() for a, b in zip(before, model.get_weights(), strict=True)) ** 0.5
    assert 0 < moved <= 12 * 1e-3 * (1 + 1e-4)
    check_equal_on_all_ranks(model)


@cases.each({"onebit": OneBit(), "none": NoCompression()})
def weights_that_were_not_broadcast_are_told(compression: Any) -> None:
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    # Keras' torch backend takes one step at a time
    several = {} if FRAMEWORK == "torch" else {"steps_per_execution": 3}
    for callbacks, settings, expected in (([], {}, 1), ([first], several, 0)):
        model = network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(wrapped(compression=compression), loss, **settings)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.fit(*data(), batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
        told = [str(w.message) for w in seen if "differs from that of rank 0" in str(w.message)]
        assert len(told) == expected, told
        assert all("'first/kernel'" in t and "BroadcastGlobalVariablesCallback" in t for t in told)


@cases.each({"onebit": OneBit(), "none": NoCompression()})
def a_gradient_that_is_missing_on_a_rank_later_is_an_error_on_all(compression: Any) -> None:
    model = trained(wrapped(compression=compression), epochs=1)
    optimizer, variables = model.optimizer, model.trainable_variables

    def apply(missing: int | None = None) -> None:
        given = [keras.ops.ones(tuple(v.shape)) if KERAS == 3 else np.ones(v.shape, np.float32) for v in variables]
        with warnings.catch_warnings():
            # Keras tells of it
            warnings.simplefilter("ignore")
            pairs = [(None if i == missing else g, v) for i, (g, v) in enumerate(zip(given, variables, strict=True))]
            optimizer.apply_gradients(pairs)

    before = model.get_weights()
    last = hvd.rank() == hvd.size() - 1
    for mine, others in ((0, None), (1, 2)):
        call = functools.partial(apply, mine if last else others)
        raises(MismatchError, call, "the ranks disagree on what kind", "None")
    if KERAS == 3:
        nothing = functools.partial(optimizer.apply_gradients, [(None, v) for v in variables])
        raises(MismatchError, nothing if last else apply, "the ranks disagree on what kind", "None")
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    for missing in (None, 0, None):
        apply(missing)
    check_equal_on_all_ranks(model)


# Keras 3 adds up passes itself, and leaves out a variable without a gradient in the last one
@cases.each({"each pass": 1, **({"two passes": 2} if KERAS == 2 else {})})
def a_variable_may_have_its_first_gradient_later(passes: int) -> None:
    model = network()
    before = [np.zeros_like(w) for w in model.get_weights()]
    model.set_weights(before)
    settings = {"compression": NoCompression(), "backward_passes_per_step": passes}
    optimizer = wrapped(keras.optimizers.SGD(0.5), **settings)
    variables = model.trainable_variables
    optimizer.build(variables)
    missing = [0] * passes + [None] * passes + [None, 1][:passes]
    for without in missing:
        given = [keras.ops.ones(tuple(v.shape)) if KERAS == 3 else np.ones(v.shape, np.float32) for v in variables]
        with warnings.catch_warnings():
            # Keras tells of it
            warnings.simplefilter("ignore")
            optimizer.apply_gradients(
                [(None if i == without else g, v) for i, (g, v) in enumerate(zip(given, variables, strict=True))]
            )
    check_equal_on_all_ranks(model)
    for i, (a, b) in enumerate(zip(before, model.get_weights(), strict=True)):
        np.testing.assert_allclose(a - b, 0.5 * sum(i != without for without in missing), rtol=1e-5, err_msg=str(i))


@cases.add
def an_optimizer_is_wrapped_once() -> None:
    plain = keras.optimizers.Adam(0.01)
    trained(wrapped(plain), epochs=1)
    raises(ValueError, lambda: wrapped(plain), "was wrapped before", "get_config()")
    trained(wrapped(type(plain).from_config(plain.get_config())), epochs=1)


@cases.add
def a_broadcast_callback_serves_several_models() -> None:
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for _ in range(2):
        # of another seed on each rank
        model = network()
        model.compile(wrapped(), loss)
        model.fit(*data(), batch_size=16, verbose=0, callbacks=[first])
        check_equal_on_all_ranks(model)


@cases.add
def a_layer_that_is_frozen_later_stays_as_it_is() -> None:
    # what is owed of it must not go on moving it
    model = trained(wrapped(), epochs=1)
    model.get_layer("first").trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(model.optimizer, loss)
    before = [np.array(w) for w in model.get_layer("first").get_weights()]
    others = [np.array(w) for w in model.get_weights()]
    with warnings.catch_warnings():
        # Keras tells of gradients that are not there
        warnings.simplefilter("ignore")
        model.fit(*data(), batch_size=16, verbose=0)
    assert all((a == b).all() for a, b in zip(before, model.get_layer("first").get_weights(), strict=True))
    assert not all((a == b).all() for a, b in zip(others, model.get_weights(), strict=True))
    check_equal_on_all_ranks(model)


def gradients_of_float16_that_were_not_scaled_are_refused() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = wrapped(keras.optimizers.SGD(0.5), compression=NoCompression())
        assert hasattr(optimizer, "inner_optimizer")
        variable = keras.Variable(np.ones((3,), np.float32))
        apply = functools.partial(optimizer.apply, [keras.ops.ones((3,))], [variable])
        raises(UnsupportedError, apply, "optimizer.scale_loss(loss)")
        assert float(optimizer.scale_loss(1.0)) > 1
        apply()
    finally:
        keras.config.set_dtype_policy("float32")


def a_loss_scale_around_a_wrapped_optimizer_is_refused() -> None:
    raises(UnsupportedError, lambda: keras.optimizers.LossScaleOptimizer(wrapped()), "other way round")


def several_optimizers_in_one_train() -> None:
    inner = {"first/.*": keras.optimizers.SGD(0.05)}
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), inner))
    raises(UnsupportedError, lambda: wrapped(several, backward_passes_per_step=2), "gradient_accumulation_steps")
    model = trained(wrapped(several))
    check_equal_on_all_ranks(model)
    assert model.optimizer.compression_stats()["total"]["steps"] == 12


def sparse_gradients_are_scaled_and_accumulated() -> None:
    layers = [keras.Input((5,)), keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    model.compile(wrapped(scaled, backward_passes_per_step=2), "mse")
    words = np.random.default_rng(hvd.rank()).integers(0, 50, (32, 5))
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(words, np.ones((32, 3), np.float32), batch_size=8, verbose=0, callbacks=[first])
    check_equal_on_all_ranks(model)


def a_trained_optimizer_keeps_its_state_under_a_loss_scale() -> None:
    model = trained(keras.optimizers.SGD(0.05, momentum=0.9), epochs=1)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        mine = wrapped(model.optimizer)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert int(mine.iterations) == 6
    for a, b in zip(mine.inner_optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))


def bfloat16_is_broadcast() -> None:
    variable = keras.Variable(np.full((3, 5), hvd.rank() + 0.5), dtype="bfloat16")
    mine = keras.Sequential([keras.Input((4,), dtype="bfloat16"), keras.layers.Dense(3, dtype="bfloat16")])
    mine.compile(wrapped(), "mse")
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    first.set_model(mine)
    first.on_train_begin()
    first.edge.broadcast([variable], 0)
    single = keras.Variable(hvd.rank() + 0.5, dtype="bfloat16")
    state = hvd.elastic.KerasState(mine, step=hvd.rank())
    state._variables = lambda: [single, variable]
    state.save()
    state.sync()
    assert state.step == 0
    assert float(keras.ops.convert_to_numpy(single)) == 0.5
    mean = hvd.broadcast(single.value, 0)
    assert float(mean) == 0.5
    gathered = hvd.allgather(variable.value)
    assert tuple(gathered.shape) == (3 * hvd.size(), 5)
    assert float(keras.ops.convert_to_numpy(variable).max()) == 0.5


def sums_of_passes_stay_on_their_rank_when_ranks_meet() -> None:
    model = network()
    model.compile(wrapped(keras.optimizers.SGD(0.05), backward_passes_per_step=2), "mse")
    state = hvd.elastic.KerasState(model, step=0)
    sums = model.optimizer._accumulated_gradients
    assert sums
    for total in sums:
        total.assign(keras.ops.full(total.shape, 1.0 + hvd.rank()))
    state.save()
    state.sync()
    state.restore()
    for total in sums:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(total), 1.0 + hvd.rank())
    check_equal_on_all_ranks(model)


def raw_variables_are_those_of_the_model() -> None:
    import tensorflow as tf

    model = trained(wrapped(), epochs=1)
    raw = [v.value for v in model.trainable_variables]
    grads = [tf.ones_like(v) for v in raw]
    before = model.get_weights()
    model.optimizer.apply_gradients(zip(grads, raw, strict=True))
    assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def legacy_optimizers_train() -> None:
    check_equal_on_all_ranks(trained(wrapped(keras.optimizers.legacy.SGD(0.05, momentum=0.9))))
    model = trained(keras.optimizers.legacy.SGD(0.05, momentum=0.9), epochs=1)
    model.compile(wrapped(model.optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    check_equal_on_all_ranks(trained(model.optimizer, model=model, epochs=1))
    assert int(model.optimizer.iterations) == 12


def elastic_states_of_keras_2_have_all_variables_or_are_refused() -> None:
    model = network()
    model.compile(wrapped(keras.optimizers.legacy.SGD(0.05, momentum=0.9)), "mse")
    state = hvd.elastic.KerasState(model, step=0)
    # its slots, too, which come with the first step else
    assert len(state._values) > 2 * len(model.trainable_variables)
    model.compile(wrapped(keras.optimizers.SGD(0.05), backward_passes_per_step=2), "mse")
    raises(UnsupportedError, lambda: hvd.elastic.KerasState(model), "backward_passes_per_step", "Keras 3")


def the_present_loss_scale_is_kept() -> None:
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)
    model = trained(scaled, epochs=1)
    scaled._loss_scale._current_loss_scale.assign(16.0)
    mine = wrapped(scaled)
    assert float(mine.loss_scale) == 16.0
    check_equal_on_all_ranks(trained(mine, model=model, epochs=1))


def eventgrad_simulated(batches: int, trigger: Any) -> list[np.ndarray]:
    """Weights of this rank: all ranks' models in this process, averaged by the loopback."""
    models = [eventgrad_model() for _ in range(hvd.size())]
    weights = [m.trainable_variables for m in models]
    tensors = [ParameterSpec(str(i), tuple(v.shape)) for i, v in enumerate(weights[0])]
    group = GossipLoopback(tensors, hvd.size(), trigger)
    for batch in range(batches):
        before = [[np.array(x).reshape(-1) for x in m.get_weights()] for m in models]
        mixed = [[x.copy() for x in of_rank] for of_rank in before]
        group.step(mixed)
        for rank, model in enumerate(models):
            x, y = data(rank)
            model.train_on_batch(x[16 * batch : 16 * batch + 16], y[16 * batch : 16 * batch + 16])
            after = [np.array(x).reshape(-1) for x in model.get_weights()]
            changed = [a + (m - b) for a, m, b in zip(after, mixed[rank], before[rank], strict=True)]
            shapes = [tuple(v.shape) for v in weights[rank]]
            model.set_weights([c.reshape(s) for c, s in zip(changed, shapes, strict=True)])
    return models[hvd.rank()].get_weights()


def eventgrad_model() -> Any:
    keras.utils.set_random_seed(5)
    # named: a saved state knows weights by their names, which count the layers of a process
    hidden, last = keras.layers.Dense(64, activation="relu", name="hidden"), keras.layers.Dense(10, name="last")
    model = keras.Sequential([keras.Input((40,)), hidden, last])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


@cases.each({"d-psgd": ConstantThreshold(0), "slope": SlopeThreshold()})
def eventgrad_in_fit_does_what_the_loopback_does(trigger: Any) -> None:
    model = eventgrad_model()
    neighbours = hvd.callbacks.EventGraDCallback(trigger=trigger, average_at_end=False)
    x, y = data()
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[neighbours])
    for found, expected in zip(model.get_weights(), eventgrad_simulated(6, trigger), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert neighbours.event_stats()["total"]["passes"] == 6
    assert neighbours.consensus_distance() > 1e-4
    neighbours.average_parameters()
    check_equal_on_all_ranks(model)


@cases.add
def eventgrad_goes_on_from_a_saved_state() -> None:
    x, y = data()
    model, again = eventgrad_model(), eventgrad_model()
    settings = {"compression": TopK(0.1), "average_at_end": False}
    neighbours, resumed = hvd.callbacks.EventGraDCallback(**settings), hvd.callbacks.EventGraDCallback(**settings)
    model.fit(x[:48], y[:48], batch_size=16, shuffle=False, verbose=0, callbacks=[neighbours])
    again.fit(x[:48], y[:48], batch_size=16, shuffle=False, verbose=0)
    again.set_weights(model.get_weights())
    for a, b in zip(again.optimizer.variables, model.optimizer.variables, strict=True) if KERAS == 3 else ():
        a.assign(b)
    resumed.load_event_state_dict(neighbours.event_state_dict())
    model.fit(x[48:], y[48:], batch_size=16, shuffle=False, verbose=0, callbacks=[neighbours])
    again.fit(x[48:], y[48:], batch_size=16, shuffle=False, verbose=0, callbacks=[resumed])
    assert resumed.event_stats()["total"] == neighbours.event_stats()["total"]
    if KERAS == 3:
        for found, expected in zip(again.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, expected)
    neighbours.average_parameters()
    resumed.average_parameters()


@cases.each({"alltoall": "auto", "one_sided": "one_sided"})
def eventgrad_ends_with_equal_weights_after_different_numbers_of_batches(transport: str) -> None:
    model = keras.Sequential([keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    x, y = data()
    keep = 32 + 16 * hvd.rank()
    neighbours = hvd.callbacks.EventGraDCallback(compression=TopK(0.1), transport=transport)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x[:keep], y[:keep], batch_size=16, epochs=2, verbose=0, callbacks=[first, neighbours])
    check_equal_on_all_ranks(model)
    assert neighbours.event_stats()["total"]["passes"] >= 2 * keep // 16 - 1


if KERAS == 3:
    cases.add(a_loss_scale_around_a_wrapped_optimizer_is_refused)
    cases.add(gradients_of_float16_that_were_not_scaled_are_refused)
    cases.add(several_optimizers_in_one_train)
    cases.add(sparse_gradients_are_scaled_and_accumulated)
    cases.add(a_trained_optimizer_keeps_its_state_under_a_loss_scale)
    cases.add(bfloat16_is_broadcast)
    cases.add(sums_of_passes_stay_on_their_rank_when_ranks_meet)
    if FRAMEWORK == "tensorflow":
        cases.add(raw_variables_are_those_of_the_model)
else:
    cases.add(legacy_optimizers_train)
    cases.add(elastic_states_of_keras_2_have_all_variables_or_are_refused)
    cases.add(the_present_loss_scale_is_kept)
