"""CompressedAdam of Keras among real ranks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import Auto, OneBit, ParameterServer, Policy, PowerSGD, TopK
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.feedback import redistribute
from tests import adam_oracle
from tests.adam_oracle import DUE, SHAPE, STEPS, Oracle
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
)
from tests.parallel.workers.neutral import in_elastic_run, raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()


def adam(rate: Any = 0.01, **settings: Any) -> Any:
    return hvd.CompressedAdam(rate, **{"warmup_steps": 4, "renewals": 2, "min_numel": 0, **settings})


def variable(shape: tuple[int, ...] = SHAPE, name: str = "w") -> Any:
    if KERAS == 2:
        import tensorflow as tf

        return tf.Variable(tf.ones(shape), name=name)
    return keras.Variable(np.ones(shape, np.float32), name=name)


def tensor(array: np.ndarray) -> Any:
    if FRAMEWORK == "torch":
        import torch

        return torch.from_numpy(array.copy())
    import tensorflow as tf

    return tf.constant(array)


def stepper(optimizer: Any, variables: list[Any], in_graph: bool = True) -> Any:
    """A step with these gradients, in a graph where the framework has one."""
    optimizer.build(variables)

    def step(*gradients: Any) -> Any:
        return optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    if FRAMEWORK == "tensorflow" and in_graph:
        import tensorflow as tf

        step = tf.function(step)
    return lambda *gradients: step(*map(tensor, gradients))


def value(v: Any) -> np.ndarray:
    return np.array(v.numpy() if FRAMEWORK == "tensorflow" else v.value.detach())


SETTINGS = {"frozen": ("frozen", False, True), "renewed": ("renewed", False, False), "late": ("frozen", True, True)}


@cases.each(SETTINGS)
def it_follows_the_algorithm_that_the_torch_form_follows(setting: tuple[str, bool, bool]) -> None:
    variance, late, in_graph = setting
    v = variable()
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    optimizer = adam(rate, weight_decay=0.1, variance=variance, exchange="two_phase")
    step, oracle = stepper(optimizer, [v], in_graph), Oracle(OneBit(), hvd.size(), variance == "renewed")
    for number in range(STEPS):
        of_all = adam_oracle.gradients(number, hvd.size(), late)
        oracle.step(of_all, 0.01 * 0.9**number, 0.1)
        step(of_all[hvd.rank()])
        np.testing.assert_allclose(value(v), oracle.x, rtol=1e-4, atol=1e-5)
    ways = optimizer.compression_stats()["steps_by_way"]
    renewals = int(late) if variance == "frozen" else len(DUE)
    assert ways == {"warm-up": 4, "renewal": renewals, "compressed": STEPS - 4 - renewals}


if FRAMEWORK == "torch":

    @cases.each({"policy": {"compression": Policy({"w*": TopK(0.1)}, OneBit())}, "renewed": {"variance": "renewed"}})
    def it_makes_the_steps_of_the_torch_form(settings: Any) -> None:
        import torch

        import hvd_compress.torch as of_torch

        of_keras = {"w": variable(), "b": variable((40,), "b")}
        mine = adam(weight_decay=0.1, epsilon=1e-6, beta_1=0.8, beta_2=0.99, **settings)
        step = stepper(mine, list(of_keras.values()))
        theirs = {name: torch.nn.Parameter(torch.ones(v.shape)) for name, v in of_keras.items()}
        other = of_torch.CompressedAdam(
            list(theirs.items()), 0.01, (0.8, 0.99), 1e-6, 0.1, warmup_steps=4, renewals=2, min_numel=0, **settings
        )
        for number in range(STEPS):
            of_weight = adam_oracle.gradients(number, hvd.size(), late=True)[hvd.rank()]
            of_bias = adam_oracle.gradients(100 + number, hvd.size())[hvd.rank()][0]
            theirs["w"].grad, theirs["b"].grad = torch.from_numpy(of_weight.copy()), torch.from_numpy(of_bias.copy())
            other.step()
            step(of_weight, of_bias)
            for name, p in theirs.items():
                np.testing.assert_allclose(value(of_keras[name]), p.detach().numpy(), rtol=1e-5, atol=1e-6)
        assert mine.compression_stats()["steps_by_way"] == other.compression_stats()["steps_by_way"]
        owed = mine.compression_state_dict()["residuals"]
        for name, entry in other.compression_state_dict()["residuals"].items():
            values = np.asarray(entry["values"])
            # nothing is an entry of zeros there
            found = owed[name]["values"] if name in owed or values.any() else np.zeros_like(values)
            np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-4)


@cases.add
def fit_trains_and_a_saved_model_goes_on() -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    clip = {"clipnorm": 1.0}
    model = trained(adam(rate, weight_decay=0.01, compression=Policy({"first*": TopK(0.1)}, OneBit()), **clip))
    check_equal_on_all_ranks(model)
    assert model.seen["loss"][-1] < model.seen["loss"][0]
    stats = model.optimizer.compression_stats()
    assert stats["steps_by_way"] == {"warm-up": 4, "renewal": 0, "compressed": 8}
    assert stats["total"]["steps"] == 8
    assert stats["total"]["bytes_sent"] > 0
    assert stats["uncompressed"]["steps"] == 4
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        loaded = hvd.load_model(Path(folder) / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    loaded.optimizer.load_compression_state_dict(model.optimizer.compression_state_dict())
    for each in (loaded, model):
        each.fit(*data(), batch_size=16, verbose=0, shuffle=False)
    assert loaded.optimizer.compression_stats()["steps_by_way"]["compressed"] == 6
    for found, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert found.tobytes() == expected.tobytes()


@cases.add
def what_is_frozen_later_stays_and_what_is_owed_of_it_waits() -> None:
    first, second = variable(name="first"), variable(name="second")
    optimizer = adam(weight_decay=0.1)
    both, one = stepper(optimizer, [first, second]), stepper(optimizer, [second])
    for number in range(6):
        both(*(adam_oracle.gradients(number + n, hvd.size(), False)[hvd.rank()] for n in range(2)))
    frozen, owed = value(first), optimizer.compression_state_dict()["residuals"]["first"]["values"].copy()
    moved = value(second)
    for number in range(6, 9):
        one(adam_oracle.gradients(number, hvd.size(), False)[hvd.rank()])
    np.testing.assert_array_equal(value(first), frozen)
    assert (value(second) != moved).all()
    np.testing.assert_array_equal(optimizer.compression_state_dict()["residuals"]["first"]["values"], owed)
    both(*(adam_oracle.gradients(9 + n, hvd.size(), False)[hvd.rank()] for n in range(2)))
    assert (value(first) != frozen).any()


@cases.add
def weight_decay_may_be_set_later() -> None:
    v, optimizer = variable(), adam(weight_decay=0.5)
    step = stepper(optimizer, [v], in_graph=False)
    nothing = np.zeros(SHAPE, np.float32)
    step(nothing)
    np.testing.assert_allclose(value(v), 1 - 0.005, rtol=1e-6)
    optimizer.weight_decay = 0.25
    step(nothing)
    np.testing.assert_allclose(value(v), (1 - 0.005) * (1 - 0.0025), rtol=1e-6)
    if KERAS == 3:
        optimizer.exclude_from_weight_decay(var_names=["w"])
        step(nothing)
        np.testing.assert_allclose(value(v), (1 - 0.005) * (1 - 0.0025), rtol=1e-6)


@cases.each({"never": None, "every second step": 2})
def averages_of_weights_are_those_of_keras(frequency: int | None) -> None:
    v, w = variable(), variable(name="other")
    settings = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": frequency}
    # in its warm-up it is AdamW
    optimizer = adam(warmup_steps=10, **settings)
    theirs = keras.optimizers.AdamW(0.01, weight_decay=0.0, epsilon=1e-8, **settings)
    step, their_step = stepper(optimizer, [v], in_graph=False), stepper(theirs, [w], in_graph=False)
    for number in range(5):
        of_all = adam_oracle.gradients(number, hvd.size(), False)
        step(of_all[hvd.rank()])
        their_step(np.mean(of_all, axis=0).astype(np.float32))
        np.testing.assert_allclose(value(v), value(w), rtol=1e-4, atol=1e-5)
    for each, of in ((optimizer, v), (theirs, w)):
        each.finalize_variable_values([of])
    np.testing.assert_allclose(value(v), value(w), rtol=1e-4, atol=1e-5)
    assert (value(v) < 0.999).any()


@cases.add
def a_training_goes_on_as_if_it_had_not_stopped() -> None:
    def begun(optimizer: Any) -> tuple[Any, Any]:
        v = variable()
        return v, stepper(optimizer, [v])

    def go_on(step: Any, begin: int, end: int) -> None:
        for number in range(begin, end):
            step(adam_oracle.gradients(number, hvd.size(), late=True)[hvd.rank()])

    first, second = adam(), adam()
    v, step = begun(first)
    go_on(step, 0, 11)
    state, of_all_ranks = first.compression_state_dict(), [np.array(w.numpy()) for w in kept(first)]
    has_late = hvd.rank() == hvd.size() - 1
    assert ("late gradients of" in str(list(state["residuals"]))) == has_late
    # before the optimizer is built, as a callback does it
    second.load_compression_state_dict(copy.deepcopy(state))
    w, other_step = begun(second)
    for mine, saved in zip([*kept(second), w], [*of_all_ranks, value(v)], strict=True):
        mine.assign(saved)
    go_on(step, 11, STEPS)
    go_on(other_step, 11, STEPS)
    assert value(v).tobytes() == value(w).tobytes()
    assert first.compression_stats()["steps_by_way"]["renewal"] == 1
    # of elements that are here, and of others
    first.load_compression_state_dict(state)
    assert sorted(first.compression_state_dict()["residuals"]) == sorted(state["residuals"])
    strange = {"late gradients of other": {"shape": [2], "values": np.ones(2, np.float32)}}
    wrong = {**state, "residuals": strange}
    raises(StateError, lambda: first.load_compression_state_dict(wrong), "no such variable")
    assert sorted(first.compression_state_dict()["residuals"]) == sorted(state["residuals"])
    divided = redistribute([{**state, "rank": rank} for rank in range(hvd.size())], 1, average=True)
    assert divided[0]["residuals"].keys() == state["residuals"].keys()


def kept(optimizer: Any) -> list[Any]:
    """The variables that Keras saves, but the learning rate."""
    of_keras = optimizer.variables if KERAS == 3 else optimizer.variables()
    return [v for v in of_keras if "learning_rate" not in v.name]


@cases.each({"warm-up": 2, "compressed": 7, "with late gradients": 10})
def a_bad_number_takes_the_step_back_on_all_ranks(step_of_it: int) -> None:
    v, w = variable(), variable()
    optimizer, untouched = adam(), adam()
    step, other_step = stepper(optimizer, [v]), stepper(untouched, [w])
    for number in range(13):
        gradient = adam_oracle.gradients(number, hvd.size(), late=True)[hvd.rank()]
        if number == step_of_it:
            before, bad = [np.array(x.numpy()) for x in kept(optimizer)], gradient.copy()
            if hvd.rank() == hvd.size() - 1:
                bad[39, 3] = np.inf
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                step(bad)
            assert any("CompressedAdam: a gradient is not finite on some rank" in str(x.message) for x in seen)
            after = [np.array(x.numpy()) for x in kept(optimizer)]
            # all but the iterations, which come first
            assert [x.tobytes() for x in before[1:]] == [x.tobytes() for x in after[1:]]
        step(gradient)
        other_step(gradient)
        # residuals are taken back to a rounding
        np.testing.assert_allclose(value(v), value(w), rtol=1e-6, atol=1e-6)
    assert optimizer.compression_stats()["steps_taken_back"] == 1


@cases.add
def sparse_and_missing_gradients() -> None:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Embedding(50, 8, name="table"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3, name="head")])
    model.compile(adam(warmup_steps=2, renewals=1), "mse")
    before = model.get_weights()[0]
    # one word appears after the warm-up, on one rank, and some never
    words = np.random.default_rng(hvd.rank()).integers(0, 30, (64, 5))
    words[40:, 0] = 35 if hvd.rank() == 0 else 0
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(words, np.ones((64, 3), np.float32), batch_size=8, verbose=0, shuffle=False, callbacks=[first])
    check_equal_on_all_ranks(model)
    table = model.get_weights()[0]
    assert (table[36:] == before[36:]).all()
    assert (table[35] != before[35]).all()
    assert np.abs(table - before).max() < 0.01 * 32
    # a rank without any gradient takes part with zeros
    v, optimizer = variable(), adam(warmup_steps=1)
    optimizer.build([v])
    for number in range(4):
        mine = adam_oracle.gradients(number, 2)[0]
        optimizer.apply_gradients([(tensor(mine) if hvd.rank() == 0 else None, v)])
    assert (value(v) != 1).mean() > 0.9
    assert optimizer.compression_stats()["steps_by_way"] == {"warm-up": 1, "renewal": 0, "compressed": 3}


@cases.add
def ranks_that_disagree_are_told_when_adam_begins() -> None:
    for settings in ({"warmup_steps": 2 + hvd.rank()}, {"beta_2": 0.9 + 0.01 * hvd.rank()}):
        v, optimizer = variable(), adam(**settings)
        optimizer.build([v])
        gradient = tensor(np.ones(SHAPE, np.float32))
        raises(MismatchError, lambda o=optimizer, v=v, g=gradient: o.apply_gradients([(g, v)]), "rank")


@cases.add
def what_adam_refuses() -> None:
    raises(ValueError, lambda: adam(beta_1=1.0), "beta_1=1.0", "less than 1")
    raises(ValueError, lambda: adam(-0.1), "learning_rate=-0.1")
    raises(ValueError, lambda: adam(variance="kept"), "frozen")
    raises(ValueError, lambda: adam(warmup_steps=0), "warmup_steps")
    raises(UnsupportedError, lambda: adam(compression=Auto()), "Auto chooses for gradients")
    raises(UnsupportedError, lambda: adam().register_local_var(variable()), "register_local_var")
    raises(UnsupportedError, lambda: copy.deepcopy(adam()), "cannot be copied", "from_config")
    raises(UnsupportedError, lambda: hvd.DistributedOptimizer(adam()), "distributed already")
    with in_elastic_run():
        raises(UnsupportedError, adam, "elastic")


@cases.add
def weights_that_were_not_broadcast_are_told_by_adam() -> None:
    model = network()
    # without a callback Keras builds the optimizer when it traces the first step
    model.compile(adam(warmup_steps=1), "mse")
    x = data()[0]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(x, x[:, :10], batch_size=32, verbose=0)
    assert any("differs from that of rank 0" in str(w.message) for w in seen)
    assert model.optimizer.compression_stats()["steps_by_way"] == {"warm-up": 1, "renewal": 0, "compressed": 2}


if KERAS == 2:

    @cases.add
    def a_loss_scale_around_adam_is_refused() -> None:
        scaled = keras.mixed_precision.LossScaleOptimizer(adam())
        raises(UnsupportedError, lambda: trained(scaled, run_eagerly=True), "mixed_bfloat16")


if KERAS == 2:

    @cases.add
    def a_model_in_one_file_of_hdf5_keeps_the_state_of_adam() -> None:
        model = trained(adam())
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are saving your model as an HDF5 file")
            model.save(f"{folder}/model.h5")
            loaded = hvd.load_model(f"{folder}/model.h5")
        for found, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(value(found), value(expected))
        assert int(loaded.optimizer.iterations) > 0


if KERAS == 3:

    @cases.add
    def what_adam_of_keras_3_refuses() -> None:
        raises(UnsupportedError, lambda: keras.optimizers.LossScaleOptimizer(adam()), "mixed_bfloat16")
        half = keras.Variable(np.ones(4, np.float32), dtype="float16", name="half")
        raises(TypeError, lambda: adam().build([half]), "half", "float32 or float64")

    @cases.each(
        {"server": {"exchange": ParameterServer()}, "powersgd": {"compression": PowerSGD(rank=2)}},
        witnesses=["powersgd"],
    )
    def adam_takes_any_exchange_eagerly(settings: Any) -> None:
        model = trained(adam(**settings), run_eagerly=True)
        check_equal_on_all_ranks(model)
        assert model.seen["loss"][-1] < model.seen["loss"][0]

    @cases.add
    def adam_accumulates_gradients() -> None:
        model = trained(adam(warmup_steps=2, gradient_accumulation_steps=3))
        check_equal_on_all_ranks(model)
        assert model.optimizer.compression_stats()["steps_by_way"] == {"warm-up": 2, "renewal": 0, "compressed": 2}

    @cases.add_thorough
    def a_model_in_bfloat16_trains_with_adam() -> None:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = trained(adam(), model=network())
        finally:
            keras.config.set_dtype_policy(before)
        check_equal_on_all_ranks(model)
        assert {str(getattr(w.dtype, "name", w.dtype)) for w in model.trainable_weights} == {"float32"}
