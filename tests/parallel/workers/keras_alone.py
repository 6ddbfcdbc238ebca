"""What one rank does with a state that several have saved: what they owed goes with its next gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import OneBit
from hvd_compress.errors import StateError
from hvd_compress.feedback import read_state, write_state
from tests.parallel.cases import Cases
from tests.parallel.workers.keras_adagrad import SHAPES, Run, tensor
from tests.parallel.workers.keras_adam import SHAPE, adam, stepper, value, variable
from tests.parallel.workers.keras_fit import FRAMEWORK, KERAS, hvd, keras, network, trained, wrapped
from tests.parallel.workers.neutral import numbers, raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()


def owing(owed: dict[str, np.ndarray], **entries: Any) -> dict[str, Any]:
    residuals = {n: {"shape": list(v.shape), "values": v.reshape(-1).copy()} for n, v in owed.items()}
    return {
        "format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": residuals, "owner_residuals": {}, **entries,
    }  # fmt: skip


def names_of(optimizer: Any) -> list[str]:
    """The names of an optimizer's tensors, after a step."""
    exchange = optimizer._hvd.exchange
    return list(getattr(exchange, "_names", None) or [s.name for s in exchange._sources])


@cases.add
def what_is_owed_goes_with_the_next_gradients() -> None:
    assert hvd.size() == 1
    run = Run(adagrad=None, compression=OneBit())
    plain = -0.125 * np.stack([numbers("weight", 0, step, SHAPES["weight"]) for step in range(4)])
    np.testing.assert_allclose(run.step(0)[0], plain[0], rtol=1e-5, atol=1e-6)
    (name, _) = names_of(run.optimizer)
    owed = numbers("owed", 0, 0, SHAPES["weight"]).astype(np.float32)
    state = owing({name: owed})
    raises(StateError, lambda: run.optimizer.load_compression_state_dict(owing({"x": owed})), "not compressed here")
    run.optimizer.load_compression_state_dict(state)
    np.testing.assert_array_equal(run.optimizer.compression_state_dict()["residuals"][name]["values"], owed.reshape(-1))
    norm = run.optimizer.compression_stats()["total"]["residual_norm"]
    np.testing.assert_allclose(norm, np.linalg.norm(owed), rtol=1e-5)
    weight, _ = run.step(1)
    np.testing.assert_allclose(weight, plain[:2].sum(0) - 0.125 * owed, rtol=1e-4, atol=1e-5)
    assert run.optimizer.compression_state_dict()["residuals"] == {}
    assert run.optimizer.compression_state_dict()["steps"] == 4
    weight, _ = run.step(2)
    np.testing.assert_allclose(weight, plain[:3].sum(0) - 0.125 * owed, rtol=1e-4, atol=1e-5)


@cases.add
def a_step_that_is_not_finite_takes_nothing_away() -> None:
    run = Run(adagrad=None, compression=OneBit())
    run.step(0)
    name, _ = names_of(run.optimizer)
    owed = numbers("owed", 0, 0, SHAPES["weight"]).astype(np.float32)
    run.optimizer.load_compression_state_dict(owing({name: owed}))
    bad = [tensor(np.full(shape, np.nan, np.float32)) for shape in SHAPES.values()]
    run.optimizer.apply_gradients(list(zip(bad, run.of, strict=True)))
    np.testing.assert_array_equal(run.optimizer.compression_state_dict()["residuals"][name]["values"], owed.reshape(-1))


@cases.add
def the_checkpoint_callback_takes_it_up() -> None:
    """Within a training function that is compiled; op=Average, so that 2 ranks' sum is divided by 2."""
    model = trained(wrapped(keras.optimizers.SGD(0.0)), model=network(use_bias=False), epochs=1)
    name = names_of(model.optimizer)[0]
    shape = model.get_weights()[0].shape
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            state = owing({name: np.full(shape, 1.0 + rank, np.float32)}, size=2, rank=rank, iterations=0)
            write_state(Path(folder) / f"compression-{rank}.npz", state)
        again = network(use_bias=False)
        before = again.get_weights()[0]
        # all gradients but what is owed are zero
        x, y = np.zeros((32, 40), np.float32), np.zeros(32, np.int64)
        again.compile(
            wrapped(keras.optimizers.SGD(1.0), min_numel=0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        again.fit(x, y, batch_size=16, verbose=0, callbacks=[hvd.callbacks.CompressionCheckpointCallback(folder)])
        np.testing.assert_allclose(before - again.get_weights()[0], np.full(shape, 1.5), rtol=1e-5)
        saved = read_state(Path(folder) / "compression-0.npz")
        assert (saved["size"], saved["residuals"]) == (1, {})


if FRAMEWORK == "tensorflow" and KERAS == 3:
    import tensorflow as tf

    import hvd_compress.tensorflow as of_tensorflow

    def gradient(weight: Any) -> tuple[Any, Any]:
        """A tape, and its gradient, which is 1."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        tape = of_tensorflow.DistributedGradientTape(tape, compression=OneBit())
        return tape, tape.gradient(loss, [weight])[0]

    @cases.add
    def a_tape_adds_what_is_owed() -> None:
        weight = tf.Variable(tf.ones([40, 30]), name="weight")
        ones, owed = np.ones((40, 30), np.float32), numbers("owed", 0, 0, (40, 30)).astype(np.float32)
        tape, plain = gradient(weight)
        np.testing.assert_array_equal(plain, ones)
        tape.load_compression_state_dict(owing({"weight": owed}), [weight])
        np.testing.assert_allclose(gradient(weight)[1], ones + owed, rtol=1e-6)
        assert tape.compression_state_dict([weight])["residuals"] == {}
        traced = tf.function(lambda: gradient(weight)[1])
        tape.load_compression_state_dict(owing({"weight": owed}), [weight])
        np.testing.assert_allclose(traced(), ones + owed, rtol=1e-6)
        np.testing.assert_array_equal(traced(), ones)

    @cases.add
    def a_function_traced_before_has_no_place_for_it() -> None:
        weight = tf.Variable(tf.ones([40, 30]), name="weight")
        traced = tf.function(lambda: gradient(weight)[1])
        np.testing.assert_array_equal(traced(), np.ones((40, 30)))
        tape, _ = gradient(weight)
        state = owing({"weight": np.ones((40, 30), np.float32)})
        raises(StateError, lambda: tape.load_compression_state_dict(state, [weight]), "before the first step")
        tape.load_compression_state_dict(owing({}), [weight])


@cases.add
def what_is_owed_of_momentum_goes_with_the_next_one() -> None:
    v, optimizer = variable(), adam(warmup_steps=1)
    # in a graph nothing could be added that was not known when it was traced
    step = stepper(optimizer, [v])
    owed = numbers("owed", 0, 0, SHAPE).astype(np.float32)
    optimizer.load_compression_state_dict(owing({"w": owed, "late gradients of w": owed}))
    g = numbers("w", 0, 1, SHAPE).astype(np.float32)
    step(g)
    # what was late comes with the uncompressed gradient
    first, late = 1 - 0.01 * np.sign(g + owed), 0.1 * (g + owed)
    np.testing.assert_allclose(value(v), first, rtol=1e-4, atol=1e-5)
    step(g)
    scale = np.abs(g + owed) + 1e-8
    update = 0.9 * late / scale + 0.1 * np.clip(g / scale, -(0.001**-0.5), 0.001**-0.5) + owed
    np.testing.assert_allclose(value(v), first - 0.01 / (1 - 0.81) * update, rtol=1e-4, atol=1e-4)
    assert optimizer.compression_state_dict()["residuals"] == {}
    step(g)
    assert optimizer.compression_stats()["steps_by_way"] == {"warm-up": 1, "renewal": 0, "compressed": 2}
