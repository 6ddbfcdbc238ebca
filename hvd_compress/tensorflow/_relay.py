"""Steps in Python that a graph waits for: what they do is not part of the graph, and may change after it was traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from threading import Thread
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.tensorflow._gradients import Gradient
from hvd_compress.tensorflow._step_token import StepToken

__all__ = ["Relay", "relay"]

_PATIENCE_SECONDS = 60.0

Step = Callable[[list[Gradient], Any], list[Gradient]]


class Relay:
    """Hands gradients from graphs to a thread, and what it makes of them back.

    One step at a time, in the order in which the program has them, so that all ranks make their collectives in one
    order. No thread of TensorFlow waits meanwhile, of which there may be one only.
    """

    def __init__(self) -> None:
        self._turn = StepToken()
        with tf.init_scope(), tf.device("CPU:0"):
            self._answers = tf.queue.FIFOQueue(1, [tf.int64], [()])
        self._thread: Thread | None = None
        self._results: list[Any] = []
        self._problem: Exception | None = None

    def lay(
        self, step: Step, gradients: Sequence[Gradient], loss_scale: tf.Tensor | None, sparse_as_dense: bool
    ) -> list[Gradient]:
        """Lay a step into the current graph.

        Args:
            step: makes combined gradients of gradients and a loss scale, in eager mode; of the same types and shapes,
                and None of None.
            gradients: see `GradientExchange.reduce`.
            loss_scale: likewise.
            sparse_as_dense: what is made of sparse gradients is dense.
        """
        given = [_Form.of(gradient) for gradient in gradients]
        made = [form.made(sparse_as_dense) for form in given]
        inputs = [part for gradient in gradients for part in _parts(gradient)]
        if loss_scale is not None:
            inputs.append(tf.cast(loss_scale, tf.float32))

        def ask(turn: np.int64, *arrays: Any) -> np.int64:
            self._start(step, given, arrays, loss_scale is not None)
            return turn

        # a scope, so that nothing has the name of an operation of Horovod's
        with tf.name_scope("hvd_compress_relay"), tf.device("CPU:0"):
            asked = tf.numpy_function(ask, [self._turn.read(), *inputs], tf.int64, stateful=False)
            with tf.control_dependencies([asked]):
                answer = self._answers.dequeue()
            kinds = [tf.int64, *(dtype for form in made for dtype in form.dtypes)]
            ended, *results = tf.numpy_function(self._heard, [asked, answer], kinds, stateful=False)
            self._turn.write(ended)
        left = iter(results)
        return [form.filled(left) for form in made]

    def finish(self) -> None:
        """Wait for a step whose graph has ended without it, as when another node has failed."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    # -- what the nodes run ------------------------------------------------------------------------------------------

    def _start(self, step: Step, given: Sequence[_Form], arrays: Sequence[Any], is_scaled: bool) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the step before this one has failed on this rank, and still waits for other ranks")
        if self._answers.size() > 0:
            # of a step that ended meanwhile for another reason
            self._answers.dequeue()
        arguments = (step, given, arrays, is_scaled)
        self._thread = Thread(target=self._run, args=arguments, daemon=True, name="hvd_compress step")
        self._thread.start()

    def _run(self, step: Step, given: Sequence[_Form], arrays: Sequence[Any], is_scaled: bool) -> None:
        with tf.device("CPU:0"):
            try:
                left = iter([tf.convert_to_tensor(array) for array in arrays])
                results = step([form.filled(left) for form in given], next(left) if is_scaled else None)
                self._results = [part.numpy() for gradient in results for part in _parts(gradient)]
                self._problem = None
            except Exception as error:
                self._problem = error
            self._answers.enqueue(tf.constant(0, tf.int64))

    def _heard(self, asked: np.int64, answer: np.int64) -> Any:
        if self._thread is not None:
            self._thread.join()
        results, self._results = self._results, []
        problem, self._problem = self._problem, None
        if isinstance(problem, HorovodInternalError):
            # hvd.elastic.run knows it by this name
            raise HorovodInternalError(f"HorovodAllreduce: {problem}") from problem
        if problem is not None:
            raise problem
        return [np.int64(asked + 1), *results]


@cache
def relay() -> Relay:
    """The one of this process."""
    return Relay()


class _Form:
    """Types and shapes of the parts of a gradient; a graph keeps it, and no tensors.

    Args:
        dtypes: none of None, one of a dense gradient, and several of a sparse one.
        shapes: likewise.
        whole: the shape of a sparse gradient as a dense one.
    """

    def __init__(self, dtypes: Sequence[tf.DType], shapes: Sequence[tf.TensorShape], whole: Any = None) -> None:
        self.dtypes, self.shapes, self.whole = list(dtypes), list(shapes), whole

    @classmethod
    def of(cls, gradient: Gradient) -> _Form:
        parts = _parts(gradient)
        whole = gradient.shape if isinstance(gradient, tf.IndexedSlices) else None
        return cls([part.dtype for part in parts], [part.shape for part in parts], whole)

    def made(self, sparse_as_dense: bool) -> _Form:
        """The form of the combined gradient: with all ranks' rows of a sparse one."""
        if self.whole is None:
            return self
        if sparse_as_dense:
            return _Form(self.dtypes[:1], [self.whole])
        rows = [tf.TensorShape([None]).concatenate(shape[1:]) for shape in self.shapes[:2]]
        return _Form(self.dtypes, rows + self.shapes[2:], self.whole)

    def filled(self, parts: Iterator[tf.Tensor]) -> Gradient:
        """The gradient of the next parts."""
        taken = [next(parts) for _ in self.dtypes]
        for part, shape in zip(taken, self.shapes, strict=True):
            part.set_shape(shape)
        if self.whole is not None:
            return tf.IndexedSlices(*taken)
        return taken[0] if taken else None


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if not isinstance(gradient, tf.IndexedSlices):
        return [tf.convert_to_tensor(gradient)]
    shape = [] if gradient.dense_shape is None else [gradient.dense_shape]
    return [gradient.values, gradient.indices, *shape]
