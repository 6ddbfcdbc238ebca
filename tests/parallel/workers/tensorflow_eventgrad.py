"""`EventGraD` in a custom TensorFlow loop against the loopback, with both transports."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import ConstantThreshold, SlopeThreshold, TopK
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.gossip import GossipLoopback, ParameterSpec
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import raises

FRAMEWORK = "tensorflow"
SHAPES = {"w": (30, 20), "b": (20,), "s": ()}

cases = Cases()


def values(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def update(arrays: list[Any], step: int, rank: int) -> list[np.ndarray]:
    random = np.random.default_rng([step, rank])
    return [x - np.float32(0.05) * random.normal(size=x.shape).astype(np.float32) for x in arrays]


def variables() -> list[tf.Variable]:
    return [tf.Variable(x, name=n) for n, x in zip(SHAPES, values(hvd.rank()), strict=True)]


def train(neighbours: Any, trained: list[tf.Variable], steps: int, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        neighbours.step(trained)
        for v, x in zip(trained, update([v.numpy() for v in trained], step, hvd.rank()), strict=True):
            v.assign(x)


def simulated(steps: int, trigger: Any, **settings: Any) -> list[np.ndarray]:
    tensors = [ParameterSpec(n, s) for n, s in SHAPES.items()]
    group = GossipLoopback(tensors, hvd.size(), trigger, **settings)
    ranks = [[np.array(x).reshape(-1) for x in values(rank)] for rank in range(hvd.size())]
    for step in range(steps):
        group.step(ranks)
        for rank, arrays in enumerate(ranks):
            shaped = [x.reshape(s) for x, s in zip(arrays, SHAPES.values(), strict=True)]
            ranks[rank] = [x.reshape(-1) for x in update(shaped, step, rank)]
    return [x.reshape(s) for x, s in zip(ranks[hvd.rank()], SHAPES.values(), strict=True)]


@cases.each(
    {
        "d-psgd": {"trigger": ConstantThreshold(0)},
        "slope": {"trigger": SlopeThreshold()},
        "topk": {
            "trigger": SlopeThreshold(),
            "compression": TopK(0.1),
            "mixing": "mean_preserving",
            "consensus_rate": 0.2,
        },
    }
)
def ranks_do_what_the_loopback_does_bit_for_bit(settings: dict[str, Any]) -> None:
    trained = variables()
    neighbours = hvd.EventGraD(**settings)
    train(neighbours, trained, 15)
    for v, x in zip(trained, simulated(15, **settings), strict=True):
        assert v.numpy().tobytes() == x.tobytes(), v.name
    assert neighbours.event_stats()["total"]["passes"] == 15
    neighbours.average_parameters(trained)


@cases.add
def variables_and_buffers_are_equal_at_the_end() -> None:
    trained, buffer = variables(), tf.Variable([1.0 + hvd.rank()])
    counter = tf.Variable(hvd.rank())
    neighbours = hvd.EventGraD(trigger=ConstantThreshold(1e6))
    train(neighbours, trained, 3 + 2 * hvd.rank())
    neighbours.average_parameters(trained, [buffer, counter])
    for i, v in enumerate(trained):
        everyone = hvd.allgather(v[None], name=f"equal.{i}").numpy()
        assert (everyone == everyone[0]).all()
    np.testing.assert_allclose(buffer.numpy(), [1.0 + (hvd.size() - 1) / 2])
    assert int(counter) == hvd.rank()
    assert neighbours.consensus_distance(trained) < 1e-5


@cases.add
def a_saved_state_goes_on_bit_for_bit() -> None:
    trained = variables()
    neighbours = hvd.EventGraD(compression=TopK(0.1))
    train(neighbours, trained, 6)
    state, saved = neighbours.event_state_dict(), [v.numpy() for v in trained]
    train(neighbours, trained, 6, begin=6)
    again = [tf.Variable(x, name=name) for x, name in zip(saved, SHAPES, strict=True)]
    resumed = hvd.EventGraD(compression=TopK(0.1))
    resumed.load_event_state_dict(state)
    # who saves before the first step saves what was loaded
    assert resumed.event_state_dict()["format"] == state["format"]
    train(resumed, again, 6, begin=6)
    for v, w in zip(trained, again, strict=True):
        assert v.numpy().tobytes() == w.numpy().tobytes()


@cases.add
def one_sided_messages_arrive_or_are_refused() -> None:
    trained = variables()
    neighbours = hvd.EventGraD(trigger=ConstantThreshold(0), transport="one_sided")
    if not hvd.mpi_enabled():
        raises(UnsupportedError, lambda: neighbours.step(trained), "uses Gloo")
        return
    train(neighbours, trained, 20)
    neighbours.average_parameters(trained)
    everyone = hvd.allgather(trained[0][None], name="one_sided").numpy()
    assert (everyone == everyone[0]).all()
    assert neighbours.event_stats()["total"]["messages"] > 0


@cases.add
def what_cannot_be_honoured_is_refused() -> None:
    trained = variables()
    traced = tf.function(lambda: hvd.EventGraD().step(trained), autograph=False)
    raises(UnsupportedError, traced, "inside of a tf.function")
    disagreeing = hvd.EventGraD(trigger=ConstantThreshold(0.1 + hvd.rank()))
    raises(MismatchError, lambda: disagreeing.step(trained), "disagree on trigger.delta")
    neighbours = hvd.EventGraD()
    neighbours.step(trained)
    raises(ValueError, lambda: neighbours.step(trained[:1]), "always give the same")
    raises(ValueError, lambda: neighbours.step(trained[::-1]), "in their order")
    state = hvd.EventGraD()
    state.load_event_state_dict({"format": 0})
    for _ in range(2):
        raises(StateError, lambda: state.step(trained), "format")
