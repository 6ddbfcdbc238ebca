"""AdaGrad inside the exchanges of a tape, in eager mode and in tf.function."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import AdaGrad, Auto, NoCompression, OneBit
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.exchange.raw import CheckedRaw
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import MIN_NUMEL, SHAPES, numbers, raises

FRAMEWORK = "tensorflow"

cases = Cases()
EPSILON = 1e-6
# exact, and exchanged all the same
ALL_SENT = CheckedRaw()
BUCKETS = {"alone": 0, "together": 2**25}


class Run:
    """Steps of a tape, every second one in a graph, with gradients that are known on every rank."""

    def __init__(self, compression: Any = ALL_SENT, **settings: Any) -> None:
        self.of = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
        self._settings = {"min_numel": MIN_NUMEL, "adagrad": AdaGrad(EPSILON), "compression": compression, **settings}
        self._in_graph = tf.function(self._step)

    def step(self, number: int, **changed: np.ndarray) -> dict[str, np.ndarray]:
        wanted = {name: numbers(name, horovod.rank(), number, shape) for name, shape in SHAPES.items()} | changed
        run = self._in_graph if number % 2 else self._step
        found = run([tf.constant(wanted[name]) for name in SHAPES])
        return {name: gradient.numpy() for name, gradient in zip(SHAPES, found, strict=True)}

    def wrap(self, tape: tf.GradientTape) -> Any:
        return hvd.DistributedGradientTape(tape, **self._settings)

    def state(self) -> dict[str, Any]:
        return self.wrap(tf.GradientTape()).compression_state_dict(self.of)

    def load(self, state: dict[str, Any]) -> None:
        self.wrap(tf.GradientTape()).load_compression_state_dict(state, self.of)

    def _step(self, wanted: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(self.of, wanted, strict=True)])
        return self.wrap(tape).gradient(loss, self.of)


class Oracle:
    def __init__(self) -> None:
        self.squares: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)

    def check(self, found: dict[str, np.ndarray], step: int) -> None:
        for name, shape in SHAPES.items():
            each = [numbers(name, rank, step, shape) for rank in range(horovod.size())]
            average = np.mean(each, axis=0, dtype=np.float64)
            self.squares[name] = self.squares[name] + average**2
            expected = average / (np.sqrt(self.squares[name]) + EPSILON)
            np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-3, err_msg=name)


@cases.each(
    {f"{e}-{b}": (e, BUCKETS[b]) for e in ("auto", "hierarchical") for b in BUCKETS},
    witnesses=["auto-alone", "hierarchical-together"],
)
def where_everything_is_sent_updates_are_adagrads(setting: tuple[str, int]) -> None:
    run, oracle = Run(exchange=setting[0], bucket_bytes=setting[1]), Oracle()
    for step in range(5):
        oracle.check(run.step(step), step)


@cases.each({"none": NoCompression(), "horovods": hvd.Compression.none})
def without_compression_updates_are_adagrads(compression: Any) -> None:
    run, oracle = Run(compression), Oracle()
    for step in range(4):
        oracle.check(run.step(step), step)


@cases.add
def compressed_tensors_are_the_loopbacks() -> None:
    run = Run(OneBit(), bucket_bytes=0)
    loopback = Loopback(horovod.size(), OneBit(), adagrad=AdaGrad(EPSILON))
    for step in range(4):
        found = run.step(step)
        for name in ("first.weight", "second.weight"):
            arrays = [numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())]
            assert found[name].tobytes() == loopback.allreduce(arrays, name=name)[0].tobytes(), (name, step)


@cases.each(
    {f"{n}-{b}": (n, BUCKETS[b]) for n in ("first.weight", "first.bias") for b in BUCKETS},
    witnesses=["first.weight-together", "first.bias-alone"],
)
def a_step_that_is_not_finite_is_taken_back_everywhere(setting: tuple[str, int]) -> None:
    name, bucket_bytes = setting
    run, oracle = Run(bucket_bytes=bucket_bytes), Oracle()
    for step in range(4):
        oracle.check(run.step(step), step)
        if step in (1, 2):
            before = run.state()
            bad = np.full(SHAPES[name], 1e30 if step == 1 else np.inf, np.float32)
            assert not np.isfinite(run.step(step, **{name: bad})[name]).all()
            np.testing.assert_equal(run.state()["accumulators"], before["accumulators"])


@cases.each(BUCKETS)
def a_saved_state_goes_on_bit_for_bit(bucket_bytes: int) -> None:
    run, again = Run(OneBit(), bucket_bytes=bucket_bytes), Run(OneBit(), bucket_bytes=bucket_bytes)
    for step in range(3):
        run.step(step)
    again.load(run.state())
    for step in range(3, 6):
        one, two = run.step(step), again.step(step)
        assert all(one[name].tobytes() == two[name].tobytes() for name in SHAPES), step


@cases.add
def what_cannot_be_honoured_is_refused() -> None:
    for settings, part in ({"exchange": "allgather"}, "two_phase"), ({"compression": Auto()}, "Policy"):
        raises(UnsupportedError, lambda s=settings: Run(**s).wrap(tf.GradientTape()), part)
    run = Run()
    raises(UnsupportedError, lambda: run.wrap(tf.GradientTape()).register_local_source(run.of[0]), "local source")
    words = tf.Variable(tf.ones((70, 31)))
    for min_numel in (MIN_NUMEL, 10**9):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(words, [1, 2, 5]))
        tape = Run(min_numel=min_numel).wrap(tape)
        raises(UnsupportedError, lambda t=tape, loss=loss: t.gradient(loss, [words]), "sparse_as_dense=True")


@cases.add
def ranks_must_agree_on_it() -> None:
    run = Run(adagrad=AdaGrad(1e-6 if horovod.rank() else 1e-7))
    raises(MismatchError, lambda: run.step(0), "adagrad")
