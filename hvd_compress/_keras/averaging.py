"""What callbacks share that average a model's weights between nodes in `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_compress._keras.callbacks import EdgeCallback
from hvd_compress._keras.optimizer import distributed
from hvd_compress._keras.weights import Array, arrays_of, is_floating, write
from hvd_compress.horovod_nodes import NodeSets

__all__ = ["AveragingCallback"]


class AveragingCallback(EdgeCallback):
    """Knows the weights that it has begun with, and what is averaged beside them.

    Args:
        ranks_per_node: as given to `hvd.DASO`.
        average_buffers: whether weights that are not trained are averaged.
        average_state: the same for the optimizer's variables.
    """

    def __init__(self, ranks_per_node: int | None, average_buffers: bool, average_state: bool) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self._averages_buffers = average_buffers
        self._averages_state = average_state
        self._keys: list[Any] | None = None

    def _weights(self) -> list[Any]:
        """The trainable weights, which must stay those of the first call.

        Raises:
            ValueError: they are others.
        """
        weights = list(self.model.trainable_variables)
        keys = [self.edge.key(v) for v in weights]
        if self._keys is None:
            self._keys = keys
        if keys != self._keys:
            raise ValueError(
                f"the trainable weights of the model are not those that this {type(self).__name__} has begun with: "
                "after freezing or unfreezing layers use a new one, on all ranks"
            )
        return weights

    def _sets(self, user: str, *, may_be_plain: bool = False) -> NodeSets:
        """The process sets of this rank; a collective call.

        Raises:
            ValueError: the optimizer of the model averages gradients among other ranks.
        """
        # of this rank's own choosing, a callback could be in another place than the optimizer
        sets = self.edge.nodes.sets(self._ranks_per_node, user=user)
        found = distributed(self.model.optimizer)
        is_alone = may_be_plain and sets.within.size() == 1
        if found is None and is_alone:
            return sets
        if found is None or list(found._hvd.settings["process_set"].ranks) != list(sets.within.ranks):
            alone = " or, as nodes have one rank, with a plain optimizer" if is_alone else ""
            raise ValueError(
                f"{type(self).__name__} needs a model compiled with hvd.DASO(optimizer), with the same "
                f"ranks_per_node{alone}: its node is the ranks {list(sets.within.ranks)}"
            )
        return sets

    def _change(self, weights: list[Any], call: Callable[[list[Array]], bool]) -> None:
        """Let a call work on arrays of weights; it returns whether it has changed them."""
        arrays = arrays_of(self.edge, weights)
        if call(arrays):
            write(weights, arrays)

    def _others(self) -> list[Any]:
        """What is averaged beside the weights."""
        found = [v for v in self.model.non_trainable_variables if self._averages_buffers and is_floating(v)]
        if self._averages_state:
            found += [v for v in self._of_optimizer() if len(v.shape)]
        return found

    def _of_optimizer(self) -> list[Any]:
        """The optimizer's floating variables."""
        of_optimizer = self.model.optimizer.variables
        of_optimizer = of_optimizer if isinstance(of_optimizer, list) else of_optimizer()
        return [v for v in of_optimizer if is_floating(v)]
