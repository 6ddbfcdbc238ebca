"""What the Keras code asks of an edge: the only way from here to tensors and ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from hvd_compress._keras.arithmetic import Arithmetic
from hvd_compress.engine import CarriedExchanges, check_settings, is_carried, refuse_other_ops, refuse_what_stays
from hvd_compress.exchange import Exchange
from hvd_compress.gossip import OneSided
from hvd_compress.horovod_nodes import HorovodNodes
from hvd_compress.ranks import Ranks

__all__ = ["Edge", "KerasExchange"]


class KerasExchange(Protocol):
    """Combines gradients of a fixed list of variables over all ranks."""

    @property
    def keeps_state(self) -> bool:
        """Whether anything depends on the steps before; not where this rank exchanges nothing."""

    def reduce(self, gradients: Sequence[Any], loss_scale: Any = None) -> list[Any]:
        """The combined gradients, in the order of the variables; None stays None."""

    def inherit(self, other: Any) -> None:
        """Take over what another exchange of the same variables owes, and its counters."""

    def stats(self) -> dict[str, Any]:
        """The "total" and "tensors" of `compression_stats()`."""

    def state_dict(self) -> dict[str, Any]:
        """See `hvd_compress.feedback`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""


class Edge(ABC):
    """An edge, seen from Keras; edges fill in what differs between frameworks.

    Args:
        hvd: Horovod for the framework.
        allreduce: of the edge.
        horovod_compressor: of the edge.
        ranks: makes `Ranks` of a process set that this rank is in.
        one_sided: see `OneSided`.
        nodes: of the edge.
        object_state: Horovod's class for the state of elastic runs.
        functions: of the edge, with its `allgather`, `broadcast` and `reducescatter`.
        book: of the exchanges that elastic runs carry over.
        hosts_updated: Horovod's HostsUpdatedInterrupt.
        arithmetic: of the framework.
    """

    def __init__(
        self,
        hvd: Any,
        allreduce: Callable[..., Any],
        horovod_compressor: Callable[[Any], Any],
        ranks: Callable[[Any], Ranks],
        one_sided: OneSided,
        nodes: HorovodNodes,
        object_state: type,
        functions: Any,
        book: CarriedExchanges,
        hosts_updated: type[Exception],
        arithmetic: Arithmetic,
    ) -> None:
        self.arithmetic = arithmetic
        self.book, self.hosts_updated = book, hosts_updated
        self._functions = functions
        self.ranks, self.one_sided = ranks, one_sided
        self.nodes, self.object_state = nodes, object_state
        self.broadcast_object, self.elastic_run = hvd.broadcast_object, hvd.elastic.run
        self.none, self.average_op, self.all_ranks = hvd.Compression.none, hvd.Average, hvd.global_process_set
        self._hvd = hvd
        self._allreduce = allreduce
        self._horovod_compressor = horovod_compressor

    # -- what is the same for all ------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Of this process, among all."""
        return int(self._hvd.rank())

    def size(self) -> int:
        """The number of processes."""
        return int(self._hvd.size())

    def ranks_of(self, process_set: Any) -> int:
        """How many ranks a process set has; 1 where this one is not among them."""
        return int(process_set.size()) if process_set.included() else 1

    def position_in(self, process_set: Any) -> int:
        """Which of the ranks of a process set this one is; 0 where it is not among them."""
        return int(process_set.rank()) if process_set.included() else 0

    def check(
        self,
        *,
        compression: Any,
        op: Any,
        exchange: str | Exchange,
        min_numel: int,
        bucket_bytes: int,
        gradient_predivide_factor: float,
        backward_passes_per_step: int = 1,
        groups: Any = None,
        process_set: Any = None,
        adagrad: Any = None,
        **_: Any,
    ) -> None:
        """Raise what a wrong setting of a wrapper is to raise."""
        check_settings(
            compression, exchange, min_numel, bucket_bytes, op == self.average_op, gradient_predivide_factor,
            backward_passes_per_step, groups, self._hvd.rocm_built(), carries=True,
        )  # fmt: skip
        self._horovod_compressor(compression)
        refuse_other_ops(op, self.average_op, self._hvd.Sum)
        if is_carried(compression, adagrad):
            refuse_what_stays(repr(compression), exchange, process_set)

    def average(self, values: Sequence[float], names: Sequence[str]) -> list[float]:
        """Averages over all ranks; a collective call.

        Raises:
            MismatchError: the ranks have values of other names.
        """
        ranks = self.ranks(self.all_ranks)
        ranks.agree({"names of the metrics": list(names)})
        means: list[float] = ranks.mean("hvd_compress.metrics", np.array(values, np.float64)).tolist()
        return means

    def allreduce(self, value: Any, **settings: Any) -> Any:
        """See `Interface.allreduce`."""
        return self._allreduce(self.tensor(value), **settings)

    def allgather(self, value: Any, name: str | None) -> Any:
        """See `Interface.allgather`."""
        return self._functions.allgather(self.tensor(value), name=name)

    def broadcast_value(self, value: Any, root_rank: int, name: str | None) -> Any:
        """See `Interface.broadcast`."""
        return self._functions.broadcast(self.tensor(value), root_rank, name=name)

    def reducescatter(self, value: Any, name: str | None, op: Any) -> Any:
        """See `Interface.reducescatter`."""
        return self._functions.reducescatter(self.tensor(value), op=op, name=name)

    # -- what a framework has in its own way -------------------------------------------------------------------------

    def collectives(self) -> AbstractContextManager[None]:
        """A context in which collectives that fail raise Horovod's HorovodInternalError."""
        return nullcontext()

    def key(self, variable: Any) -> Any:
        """The same for all objects that stand for the same variable."""
        return id(variable)

    def divisor_of(self, process_set: Any) -> Any:
        """The number of ranks that take part, for the step that is made, or laid into a graph, now."""
        return self.ranks_of(process_set)

    def keep_uncompiled(self, optimizer: Any, method: str) -> None:  # noqa: B027, most need nothing
        """See to it that a compiler of the backend calls this method of an optimizer instead of compiling it."""

    @abstractmethod
    def tensor(self, value: Any) -> Any:
        """What can be made a tensor, as one that Horovod takes."""

    @abstractmethod
    def exchange(
        self, variables: Sequence[Any], groups: Any, settings: dict[str, Any], compares: bool
    ) -> KerasExchange:
        """An exchange for the gradients of Keras variables; a collective call.

        With `compares` it looks in the second step whether all ranks have the same variables, and warns.
        """

    @abstractmethod
    def divided(self, gradient: Any, divisor: Any) -> Any:
        """A gradient, sparse ones too, divided by `divisor`; None stays None."""

    @abstractmethod
    def accumulators(self, passes: int) -> Any:
        """Sums of the gradients of several backward passes, for Keras 2."""

    @abstractmethod
    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Make Keras variables those of the root; a collective call."""

    @abstractmethod
    def values(self, variable: Any) -> Any:
        """The values of a Keras variable as a NumPy array."""
