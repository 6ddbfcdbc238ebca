"""What kinds of gradients the ranks had in the last step, and what is done where one has other ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.engine import kinds_told, only_here, only_there
from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import Place
from hvd_compress.tensorflow._agreement import is_mismatch, require_agreement_through
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow._step_token import StepToken

__all__ = ["KindsOfGradients"]

Kinds = tuple[str, ...]

JOIN = {"call": "join()"}


class KindsOfGradients:
    """Sees to it that ranks make only steps whose gradients are of the same kinds.

    Kinds are known when a graph is laid, but which graph runs is known only when it does. So each graph looks whether
    the last step was of its kinds, which costs no collective. A rank where it was of others compares in place of the
    collectives that all ranks began that step with; where the others begin another such step, Horovod refuses the two
    on all ranks. TensorFlow runs all nodes that do not depend on one that has failed, so every rank begins all of them.

    Args:
        names: of the variables.
        process_set: the ranks that compare.
        places: the first collectives of a step with gradients of these kinds.
    """

    def __init__(
        self, names: Sequence[str], process_set: hvd.ProcessSet, places: Callable[[Kinds], list[Place]]
    ) -> None:
        self._names = list(names)
        self._process_set = process_set
        self._places = places
        self._numbers: dict[Kinds, int] = {}
        self._last: Kinds | None = None
        self._problem: Exception | None = None
        self._number_of_last = StepToken()
        with tf.init_scope(), tf.device("CPU:0"):
            self._answers = tf.queue.FIFOQueue(1, [tf.int64], [()])

    def begin(self, kinds: Kinds) -> None:
        """Compare before the first step, or before a graph is laid for it; a collective call.

        Raises:
            MismatchError: on all ranks, naming the first difference.
        """
        if self._last is None:
            TensorFlowRanks(self._process_set).agree(kinds_told(self._names, kinds))
            self._last = kinds
            with tf.init_scope(), tf.device("CPU:0"):
                self._number_of_last.write(tf.constant(self._number_of(kinds), tf.int64))

    def lay(self, kinds: Kinds, turn: tf.Tensor) -> tf.Tensor:
        """The turn, when all ranks have come to a step with gradients of these kinds."""
        number = self._number_of(kinds)

        def compare() -> tf.Tensor:
            asked = tf.numpy_function(lambda turn: self._ask(kinds, turn), [turn], tf.int64, stateful=False)
            with tf.control_dependencies([asked]):
                # waits on no thread of TensorFlow, of which there may be one
                answer = self._answers.dequeue()
            met = tf.numpy_function(self._heard, [asked, answer], tf.int64, stateful=False)
            with tf.control_dependencies([met]):
                self._number_of_last.write(tf.constant(number, tf.int64))
            met.set_shape([])
            return met

        is_other = tf.not_equal(self._number_of_last.read(), number)
        return tf.cond(is_other, compare, lambda: tf.identity(turn))

    def explained(self, error: Exception) -> Exception | None:
        """What a step has failed for on this rank, if ranks had gradients of different kinds in it."""
        problem, self._problem = self._problem, None
        if problem is None and is_mismatch(error) and self._last is not None:
            return MismatchError(only_there(self._names, self._last))
        return problem

    def agree_to_join(self) -> None:
        """Make sure that no rank makes another step before Horovod's `join`; a collective call.

        Raises:
            MismatchError: on all ranks, where others go on to a step.
        """
        if self._last is None:
            return
        try:
            require_agreement_through(JOIN, self._process_set, self._places(self._last))
        except tf.errors.OpError as error:
            if not is_mismatch(error):
                raise
            raise MismatchError(
                "join() was called on this rank, and others go on to another step: compressed exchanges need all ranks "
                "in each step. Give all ranks the same number of batches, or use Compression.none or "
                "Compression.fp16, with which join() stands in for ranks that have ended"
            ) from error

    def _number_of(self, kinds: Kinds) -> int:
        return self._numbers.setdefault(kinds, len(self._numbers))

    # -- what the nodes run ------------------------------------------------------------------------------------------

    def _ask(self, kinds: Kinds, turn: np.int64) -> np.int64:
        if self._answers.size() > 0:
            # of a step that ended meanwhile for another reason
            self._answers.dequeue()
        Thread(target=self._answer, args=(kinds,), daemon=True, name="hvd_compress kinds").start()
        return turn

    def _answer(self, kinds: Kinds) -> None:
        try:
            self._agree(kinds)
            self._problem = None
        except Exception as error:
            self._problem = error
        with tf.device("CPU:0"):
            self._answers.enqueue(tf.constant(0, tf.int64))

    def _heard(self, turn: np.int64, answer: np.int64) -> np.int64:
        if self._problem is not None:
            raise self._problem
        return turn

    def _agree(self, kinds: Kinds) -> None:
        before = self._last
        if before is None:
            raise RuntimeError("a step before the first one")
        try:
            require_agreement_through(kinds_told(self._names, kinds), self._process_set, self._places(before))
        except tf.errors.OpError as error:
            if not is_mismatch(error):
                raise
            raise MismatchError(only_here(self._names, before, kinds)) from error
        self._last = kinds
