"""`Policy` and `Auto` of the TensorFlow tape: each tensor its way; the ways of `Auto` are predicted, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import FP16, Adaptive, Auto, OneBit, Policy, TopK
from hvd_compress.cost import Network, Speed
from hvd_compress.errors import UnsupportedError
from hvd_compress.loopback import Loopback
from hvd_compress.tensorflow import _exchange
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import MIN_NUMEL, numbers, raises

FRAMEWORK = "tensorflow"
SHAPES = {"a1": (48, 601), "a2": (40, 300), "b1": (37, 803), "b2": (1500,), "lowered": (50, 60), "plain": (60, 70),
          "bias": (48,)}  # fmt: skip
LARGE = [name for name, shape in SHAPES.items() if np.prod(shape) >= MIN_NUMEL]
POLICY = Policy([("a*", OneBit()), ("b[12]", TopK(0.05)), ("lowered", FP16())])

cases = Cases()


def variables() -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def given(step: int, rank: int | None = None) -> dict[str, np.ndarray]:
    return {name: numbers(name, horovod.rank() if rank is None else rank, step, s) for name, s in SHAPES.items()}


def gradients(of: list[tf.Variable], wanted: Any, compression: Any, **settings: Any) -> dict[str, tf.Tensor]:
    """What a wrapped tape returns for a loss whose gradients are `wanted`."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * wanted[name]) for v, name in zip(of, SHAPES, strict=True)])
    settings = {"exchange": "two_phase", "min_numel": MIN_NUMEL, "op": hvd.Sum, **settings}
    tape = hvd.DistributedGradientTape(tape, compression=compression, **settings)
    return dict(zip(SHAPES, tape.gradient(loss, of), strict=True))


def stats(of: list[tf.Variable], compression: Any, **settings: Any) -> dict[str, Any]:
    settings = {"exchange": "two_phase", "min_numel": MIN_NUMEL, "op": hvd.Sum, **settings}
    return hvd.DistributedGradientTape(tf.GradientTape(), compression=compression, **settings).compression_stats(of)


@contextmanager
def link(bandwidth: float) -> Iterator[None]:
    """A network and kernels that were not measured."""
    network = Network.on_paper(bandwidth, 1e-5, horovod.size())
    speeds = dict.fromkeys((FP16(), OneBit(), Adaptive(pi=64)), Speed())
    with (
        mock.patch.object(_exchange, "network_of", return_value=network),
        mock.patch.object(_exchange, "slowest_speeds", return_value=speeds),
    ):
        yield


@cases.add
def each_tensor_goes_its_way() -> None:
    of, ranks = variables(), range(horovod.size())
    loopbacks = {
        letter: Loopback(len(ranks), c, "two_phase", "sum") for letter, c in (("a", OneBit()), ("b", TopK(0.05)))
    }

    def eager(wanted: Any) -> Any:
        return gradients(of, wanted, POLICY)

    in_graph = tf.function(eager)
    for step in range(4):
        found = (in_graph if step % 2 else eager)({k: tf.constant(v) for k, v in given(step).items()})
        everyone = [given(step, rank) for rank in ranks]
        for letter, loopback in loopbacks.items():
            names = [name for name in reversed(SHAPES) if name.startswith(letter) and name in LARGE]
            of_ranks = [{name: of_rank[name] for name in names} for of_rank in everyone]
            for name, value in loopback.grouped_allreduce(of_ranks)[0].items():
                assert found[name].numpy().tobytes() == value.tobytes(), f"{name}, step {step}"
        lowered = found["lowered"].numpy()
        np.testing.assert_array_equal(lowered, lowered.astype(np.float16).astype(np.float32))
        np.testing.assert_allclose(lowered, sum(g["lowered"] for g in everyone), atol=2e-2)
        for name in ("plain", "bias"):
            np.testing.assert_allclose(found[name], sum(g[name] for g in everyone), rtol=1e-5, atol=1e-5)
    ways = {name: counters["exchange"] for name, counters in stats(of, POLICY)["tensors"].items()}
    assert ways == {**dict.fromkeys(("a1", "a2", "b1", "b2"), "two_phase"), "lowered": "dense", "plain": "dense",
                    "bias": "two_phase, uncompressed"}  # fmt: skip


@cases.each({"slow": (1e6, Adaptive(pi=64)), "fast": (1e14, None)})
def auto_goes_where_it_predicts_the_least(setting: Any) -> None:
    bandwidth, expected = setting
    of, twins = variables(), variables()
    auto = Auto([OneBit(), Adaptive(pi=64)])
    with link(bandwidth):
        step = tf.function(lambda wanted: gradients(of, wanted, auto))
        for i in range(3):
            wanted = {k: tf.constant(v) for k, v in given(i).items()}
            mine, its = step(wanted), gradients(twins, wanted, expected or hvd.Compression.none)
            for name in SHAPES:
                if expected is None:
                    np.testing.assert_allclose(mine[name], its[name], rtol=1e-5, atol=1e-5)
                else:
                    assert mine[name].numpy().tobytes() == its[name].numpy().tobytes(), name
        report = stats(of, auto)["auto"]
    assert report["configuration"] == ("none" if expected is None else "adaptive")
    assert report["measured_seconds"] == {}
    assert "predicted" in report["reason"]


@cases.add
def auto_measures_and_all_ranks_go_the_same_way() -> None:
    of = variables()
    step = tf.function(lambda wanted: gradients(of, wanted, "auto", bucket_bytes=4 * 30_000))
    for i in range(2):
        found = step({k: tf.constant(v) for k, v in given(i).items()})
        flat = tf.concat([tf.reshape(g, [-1]) for g in found.values()], axis=0)
        assert len({row.tobytes() for row in horovod.allgather(flat[None], name="alike").numpy()}) == 1
    report = stats(of, "auto", bucket_bytes=4 * 30_000)["auto"]
    assert report["configuration"] in report["predicted_seconds"]
    assert len(report["buckets"]) > 1


@cases.each({"policy": POLICY, "auto": Auto(), "by name": "auto"})
def single_tensors_are_given_their_compressor(compression: Any) -> None:
    x = tf.ones(SHAPES["a1"])
    for call in (lambda: hvd.allreduce(x, name="x", compression=compression),
                 lambda: hvd.grouped_allreduce([x, x], name="x", compression=compression)):  # fmt: skip
        raises(UnsupportedError, call, "of an optimizer", "give the compressor of this one")
