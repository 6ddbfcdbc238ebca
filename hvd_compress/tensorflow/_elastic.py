"""States of elastic runs: Horovod's know no optimizers of Keras 3, and one of them does not send its variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_compress._keras.elastic import KerasState, VariablesState
from hvd_compress.errors import UnsupportedError
from hvd_compress.tensorflow._carried import broadcast_variables
from hvd_compress.tensorflow._carried_exchange import BOOK
from hvd_compress.tensorflow._failures import as_horovods
from hvd_compress.tensorflow._seams import key_of, raw

__all__ = ["TensorFlowKerasState", "TensorFlowState"]


class _Carrier:
    """What a state asks of the edge; the edge of Keras would import Keras."""

    rank, broadcast_object = staticmethod(hvd.rank), staticmethod(hvd.broadcast_object)
    key, collectives = staticmethod(key_of), staticmethod(as_horovods)
    book, hosts_updated = BOOK, HostsUpdatedInterrupt

    @staticmethod
    def broadcast(variables: Sequence[Any], root_rank: int) -> None:
        """Make variables those of the root."""
        broadcast_variables(variables, root_rank)

    @staticmethod
    def values(variable: Any) -> Any:
        """As a NumPy array."""
        return raw(variable).numpy()


class TensorFlowState(VariablesState, ObjectState):
    """Variables and further values that all ranks of an elastic run share.

    What compression keeps between steps is carried over, as by `TorchState` of `hvd_compress.torch`: of all tapes and
    optimizers of this process. A `tf.function` that is traced already goes on being used among other ranks.

    Args:
        variables: of TensorFlow or of Keras; the same on all ranks, in the same order.
        session: Horovod's, for TensorFlow 1.
        kwargs: further values, which become attributes.

    Raises:
        UnsupportedError: outside of eager mode.

    Example, in each rank of `horovodrun --min-np 2 --host-discovery-script ./hosts.sh python train.py`::

        state = hvd.elastic.TensorFlowState([*model.weights, *optimizer.variables], step=0)

        @hvd.elastic.run
        def train(state):
            while state.step < 1000:
                train_step()
                state.step += 1
                if state.step % 10 == 0:
                    state.commit()
    """

    edge = _Carrier

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        _require_eager("TensorFlowState", session)
        self.variables = list(variables or [])
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return self.variables


class TensorFlowKerasState(KerasState, ObjectState):
    """`KerasState` of `hvd_compress.tensorflow.keras.elastic`, by the name that Horovod has for it here.

    Args:
        model: built.
        optimizer: of the model; by default the one that it is compiled with.
        backend: Horovod's, for TensorFlow 1.
        kwargs: further values, which become attributes.

    Raises:
        ValueError: the model has no weights yet, or no optimizer.
        UnsupportedError: outside of eager mode.
    """

    edge = _Carrier

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        _require_eager("TensorFlowKerasState", None)
        super().__init__(model, optimizer, backend, **kwargs)


def _require_eager(state: str, session: Any) -> None:
    if session is not None or not tf.executing_eagerly():
        raise UnsupportedError(
            f"{state} outside of eager mode: use the one of horovod.tensorflow.elastic, which knows sessions"
        )
