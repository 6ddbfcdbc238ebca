"""All exchanges of one tape or optimizer, laid into a graph: every first stage before any second one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.compressors import FP16
from hvd_compress.cost import network_of, slowest_speeds
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_MIN_NUMEL,
    Ledger,
    Pilot,
    Routing,
    Tensor,
    average_share,
    description,
    exchanged,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Account, AdaGrad, Bucket, Hosts, Pack, ParameterServer
from hvd_compress.mpi import start_root_messages
from hvd_compress.policy import Auto, Policy, check_patterns
from hvd_compress.tensorflow._bucket import Nodes
from hvd_compress.tensorflow._carried import carried_dtype, dense_allreduce, dense_grouped_allreduce
from hvd_compress.tensorflow._gradients import KINDS, Gradient, all_finite, first_value, kind_of, refuse_unfit, same
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow._root_bucket import RootNodes, after_others, let_others_follow
from hvd_compress.tensorflow._seams import ALLREDUCE, is_compiled_by_xla, split_list
from hvd_compress.tensorflow._turn import Turn
from hvd_compress.tensorflow.compression import dense_route, horovod_compressor

__all__ = ["GradientExchange", "Settings", "Source", "allowed_name"]

_names: Counter[tuple[int, str]] = Counter()


@dataclass(frozen=True)
class Settings:
    """How gradients are combined; see `DistributedGradientTape` for the meaning of each.

    `groups` holds a number, or one tuple of positions in the list of tensors for each group.
    """

    compression: Any = hvd.Compression.none
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[int, ...], ...] | None = None
    process_set: hvd.ProcessSet = hvd.global_process_set
    exchange: str | ParameterServer = "auto"
    min_numel: int = DEFAULT_MIN_NUMEL
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    device_dense: str = ""
    device_sparse: str = ""
    adagrad: AdaGrad | None = None


@dataclass(frozen=True)
class Source:
    """What a gradient is of.

    Args:
        name: the same on all ranks, unique in its list.
        shape: None where it is not known before a step.
        dtype: of the gradient.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: tf.DType


class GradientExchange(Ledger[Nodes]):
    """Combines the gradients of a fixed list of tensors over all ranks, in eager mode or within a `tf.function`.

    Args:
        settings: the same on all ranks.
        sources: of the gradients that `reduce` will be given, the same on all ranks.
        compared: whether the ranks compare all this now, in a collective call.

    Raises:
        MismatchError: the ranks disagree; raised on all of them.
        UnsupportedError: a tensor to be compressed whose shape is not known, or whose type is no floating one.
    """

    def __init__(self, settings: Settings, sources: Sequence[Source], compared: bool = True) -> None:
        self.settings = settings
        self._sources = list(sources)
        self._compressor = exchanged(settings.compression)
        self._wire_names = {s.name: _claim(s.name, settings.process_set) for s in sources}
        process_set = settings.process_set
        # in an elastic run others may join
        self.takes_part = process_set.included() and (process_set.size() > 1 or is_elastic())
        self._compares = self.takes_part and compared
        self._compared: set[tuple[str, ...]] = set()
        if self._compares:
            TensorFlowRanks(process_set).agree(self._description())
        check_patterns(settings.compression, [s.name for s in sources])
        ranks = process_set.size() if self.takes_part else 1
        position = process_set.rank() if self.takes_part else 0
        tensors = [Tensor(s.name, self._static_shape(s), s.dtype.name, s.dtype.size) for s in sources]
        self._pilot: Pilot | None = None
        self._scale = 1.0
        if self._compressor is not None:
            self._scale = average_share(self._compressor, settings.op, hvd.Average, hvd.Sum, ranks)
        super().__init__(
            self._routing(tensors), ranks, position, tensors,
            self._bucket_maker(), self._named_groups(),
            hosts=self._found_hosts(), adagrad=settings.adagrad, scale=self._scale,
        )  # fmt: skip
        for source in sources:
            refuse_unfit(source.name, source.dtype, self.exchanges(source.name))
        self._horovods = horovod_compressor(settings.compression)
        self._turn = Turn()
        self._compiled = tf.function(self._lay, autograph=False)

    @property
    def _waits(self) -> bool:
        """Whether stages wait for other ranks on threads of TensorFlow."""
        exchange = self.settings.exchange
        return self.takes_part and isinstance(exchange, ParameterServer) and exchange.transport == "mpi"

    @property
    def keeps_state(self) -> bool:
        """Whether anything depends on the steps before; not where this rank exchanges nothing."""
        return self.takes_part or self.accumulators is not None

    def reduce(self, gradients: Sequence[Gradient], loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """The combined gradients, in the order of the sources; None stays None.

        Args:
            gradients: one per source, of its shape and dtype.
            loss_scale: that the gradients are multiplied with; where it changes, residuals are converted.

        Raises:
            UnsupportedError: the function is compiled by XLA, or a sparse gradient comes to AdaGrad.
            MismatchError: a gradient is None, or sparse, on some ranks only; raised on all of them where that is so in
                the first step, or from one step on.
        """
        if self._compares:
            self._compare_kinds(gradients)
        if not self.keeps_state or all(g is None for g in gradients):
            return list(gradients)
        if tf.executing_eagerly():
            return list(self._compiled(list(gradients), loss_scale))
        return self._lay(list(gradients), loss_scale)

    # -- the graph ---------------------------------------------------------------------------------------------------

    def _lay(self, gradients: list[Gradient], loss_scale: tf.Tensor | None) -> list[Gradient]:
        if is_compiled_by_xla():
            raise UnsupportedError(
                "jit_compile=True: XLA cannot compile the exchange of gradients, which runs in Python and in "
                "Horovod. Use jit_compile=False for the function that combines and applies gradients "
                "(Keras: model.compile(..., jit_compile=False)); the layers can be in functions of their own"
            )
        prepared = [self._prepared(g, s) for g, s in zip(gradients, self._sources, strict=True)]
        exchanged = {
            s.name: g
            for s, g in zip(self._sources, prepared, strict=True)
            if self.exchanges(s.name) and isinstance(g, tf.Tensor)
        }
        # exchanges run on the CPU, wherever the gradients are; TensorFlow copies them there and back
        with tf.device("CPU:0"):
            turn = self._turn.read()
            if self._waits:
                turn = after_others(turn)
            if self.accumulators is not None:
                turn = tf.numpy_function(self._forget, [turn], tf.int64, stateful=False)
            if loss_scale is not None and self.owes:
                turn = tf.numpy_function(self._rescale, [turn, loss_scale], tf.int64, stateful=False)
        results = self._lay_dense(prepared, set(exchanged), turn)
        finite = [all_finite(g) for g in results if g is not None] if self.owes else []
        if self.accumulators is not None:
            results, are_finite = self._lay_adagrad(results, turn)
            finite += are_finite
        ends = [first_value(g) for g in results if g is not None]
        with tf.device("CPU:0"):
            # No deadlock: no node waits for a collective, and the first ones of all buckets come before the second ones
            buckets = [bucket for bucket in self.buckets if not exchanged.keys().isdisjoint(bucket.tensors)]
            payloads = [bucket.lay_encode(exchanged, turn) for bucket in buckets]
            last = [bucket.lay_advance(sent, payloads) for bucket, sent in zip(buckets, payloads, strict=True)]
            finite += [bucket.lay_arrive(payload, last) for bucket, payload in zip(buckets, last, strict=True)]
            keep = tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)
            combined: dict[str, tf.Tensor] = {}
            for bucket in buckets:
                of_bucket, done = bucket.lay_finish(exchanged, keep, self._scale)
                combined |= of_bucket
                ends.append(done)
            self._lay_end(prepared, [keep, *ends], turn)
            if self._waits:
                let_others_follow([keep, *ends])
        return [combined.get(s.name, result) for s, result in zip(self._sources, results, strict=True)]

    def _lay_dense(self, gradients: list[Gradient], exchanged: set[str], turn: tf.Tensor) -> list[Gradient]:
        """Results of what goes through Horovod's own allreduce, not before this step's turn; None for the others."""
        ours = {i for i, source in enumerate(self._sources) if source.name in exchanged}
        with tf.control_dependencies([turn]):
            gradients = [g if g is None or i in ours else same(g) for i, g in enumerate(gradients)]
        if not self.takes_part:
            return gradients
        settings = self.settings
        factor = settings.gradient_predivide_factor if settings.op == hvd.Average else 1.0
        reduce = {
            "device_dense": settings.device_dense, "device_sparse": settings.device_sparse,
            "op": settings.op, "prescale_factor": 1.0 / factor,
            "postscale_factor": factor, "process_set": settings.process_set,
        }  # fmt: skip
        results: list[Gradient] = [None] * len(gradients)
        for group in self._groups(gradients, ours):
            if len(group) == 1 and settings.groups is None:
                (i,) = group
                name = _name_in_graph(f"{ALLREDUCE}.{self._wire_names[self._sources[i].name]}")
                # Horovod names the two allgathers of a sparse gradient itself
                results[i] = dense_allreduce(
                    gradients[i], name=name, ignore_name_scope=True,
                    compression=self._horovods_of(self._sources[i].name), **reduce,
                )  # fmt: skip
            elif group:
                name = _name_in_graph(f"{ALLREDUCE}.grouped.{self._wire_names[self._sources[group[0]].name]}")
                combined = dense_grouped_allreduce(
                    [gradients[i] for i in group], name=name, ignore_name_scope=True,
                    compression=self._horovods_of(self._sources[group[0]].name), **reduce,
                )  # fmt: skip
                for i, result in zip(group, combined, strict=True):
                    results[i] = result
        return results

    def _lay_adagrad(self, combined: list[Gradient], turn: tf.Tensor) -> tuple[list[Gradient], list[tf.Tensor]]:
        """Updates of what went dense, and whether each is finite; None for the others."""
        updates: list[Gradient] = [None] * len(combined)
        finite = []
        for i, (source, gradient) in enumerate(zip(self._sources, combined, strict=True)):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                raise UnsupportedError(
                    f"{self.settings.adagrad!r} with a sparse gradient of {source.name!r}: its elements would need "
                    "accumulators of their own on all ranks. Use sparse_as_dense=True"
                )
            wide = gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)

            def update(turn: np.int64, values: np.ndarray[Any, Any], name: str = source.name) -> Any:
                # a TensorFlow tensor must not change
                flat = np.array(values).reshape(-1)
                return np.bool_(self.precondition(name, flat)), flat

            with tf.device("CPU:0"):
                # `turn` is an input, so that the gradient cannot be a constant and this be run once
                is_finite, flat = tf.numpy_function(update, [turn, wide], [tf.bool, wide.dtype], stateful=False)
            is_finite.set_shape([])
            finite.append(is_finite)
            updates[i] = tf.cast(tf.reshape(flat, tf.shape(gradient)), gradient.dtype)
            updates[i].set_shape(gradient.shape)
        return updates, finite

    def _lay_end(self, gradients: list[Gradient], ends: list[tf.Tensor], turn: tf.Tensor) -> None:
        """Count the step when all of it is done, which `ends` tell, and give the turn to the next one.

        The first of `ends` says whether the step is kept.
        """
        dense = [
            (source.name, *self._dense_bytes(g, self._horovods_of(source.name)))
            for source, g in zip(self._sources, gradients, strict=True)
            if isinstance(g, tf.Tensor) and not self.exchanges(source.name) and g.shape.is_fully_defined()
        ]

        def end(turn: np.int64, keep: np.bool_, *_: Any) -> np.int64:
            self.settle(bool(keep))
            self.count_step()
            for name, sent_bytes, gradient_bytes in dense:
                self.count_dense(name, sent_bytes, gradient_bytes)
            return np.int64(turn + 1)

        self._turn.write(tf.numpy_function(end, [turn, *ends], tf.int64, stateful=False))

    def _compare_kinds(self, gradients: Sequence[Gradient]) -> None:
        """Whether all ranks have gradients of the same kinds, which decide what collectives there are.

        Only where they are of other kinds than in the steps before, as most never are.
        """
        kinds = tuple(kind_of(g, self.settings.sparse_as_dense) for g in gradients)
        if kinds in self._compared:
            return
        told = {s.name: kind for s, kind in zip(self._sources, kinds, strict=True)}
        TensorFlowRanks(self.settings.process_set).agree({KINDS: told})
        self._compared.add(kinds)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _prepared(self, gradient: Gradient, source: Source) -> Gradient:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and not self.settings.sparse_as_dense:
            return gradient
        gradient = tf.convert_to_tensor(gradient)
        if self.exchanges(source.name):
            gradient.shape.assert_is_compatible_with(source.shape)
        return gradient

    def _groups(self, gradients: list[Gradient], ours: set[int]) -> list[list[int]]:
        """Positions of dense gradients that Horovod is to combine together, each group in one way."""
        return [
            [i for i in group if self._horovods_of(self._sources[i].name) is way]
            for group in self._whole_groups(gradients, ours)
            for way in dict.fromkeys(self._horovods_of(self._sources[i].name) for i in group)
        ]

    def _whole_groups(self, gradients: list[Gradient], ours: set[int]) -> list[list[int]]:
        left = [i for i, g in enumerate(gradients) if g is not None and i not in ours]
        groups = self.settings.groups
        if groups is None:
            return [[i] for i in left]
        if isinstance(groups, int):
            return [list(part) for part in split_list(left, groups)] if left else []
        named = [[i for i in group if i in left] for group in groups]
        grouped = {i for group in named for i in group}
        return named + [[i] for i in left if i not in grouped]

    def _dense_bytes(self, gradient: tf.Tensor, horovods: Any) -> tuple[int, int]:
        numel = int(np.prod(gradient.shape.as_list(), dtype=np.int64))
        with tf.init_scope():
            sent, _ = horovods.compress(tf.zeros([1], carried_dtype(gradient.dtype)))
        pairs = 2 if gradient.dtype.is_complex else 1
        return pairs * numel * sent.dtype.size, numel * gradient.dtype.size

    def _forget(self, turn: np.int64) -> np.int64:
        # of a step that has failed
        self.settle(keep=False)
        return turn

    def _rescale(self, turn: np.int64, loss_scale: np.float32) -> np.int64:
        self.set_loss_scale(float(loss_scale))
        return turn

    def _static_shape(self, source: Source) -> tuple[int, ...]:
        if source.shape is not None:
            return source.shape
        if self._compressor is not None and self.takes_part:
            raise UnsupportedError(
                f"{source.name!r} has a shape that is not known before the step: {self._compressor!r} needs it to lay "
                "out payloads. Set the shape, or use compression=hvd.Compression.none"
            )
        return ()

    def _routing(self, tensors: list[Tensor]) -> Routing:
        settings, ours = self.settings, self._compressor if self.takes_part else None
        chosen = None if isinstance(ours, Auto) else ours
        routing = Routing(chosen, settings.exchange, settings.min_numel, settings.bucket_bytes)
        if isinstance(ours, Auto):
            # graphs are fixed, so predictions decide; measured at once, even while tracing
            with tf.init_scope(), tf.device("CPU:0"):
                ranks = TensorFlowRanks(settings.process_set)
                network = network_of(ranks, with_hosts=settings.exchange == "hierarchical")
                speeds = slowest_speeds((FP16(), *ours.candidates), ranks)
                self._pilot = Pilot(ours, tensors, routing, network, speeds)
            routing = self._pilot.routing()
        return routing

    def _bucket_maker(self) -> Callable[[dict[str, Account], Pack | None], Nodes]:
        process_set = self.settings.process_set
        if not self._waits:
            return lambda accounts, pack: Nodes(Bucket(accounts, pack), process_set, self._wire_names)
        with tf.init_scope(), tf.device("CPU:0"):
            messages = start_root_messages(hvd, TensorFlowRanks(process_set))

        def make_bucket(accounts: dict[str, Account], pack: Pack | None) -> Nodes:
            return RootNodes(Bucket(accounts, pack), process_set, self._wire_names, messages.channel())

        return make_bucket

    def _found_hosts(self) -> Hosts | None:
        if not self.takes_part or self.settings.exchange != "hierarchical":
            return None
        return Hosts.of_names(TensorFlowRanks(self.settings.process_set).host_numbers())

    def stats(self) -> dict[str, Any]:
        """The "total", "tensors" and, with `Auto`, "auto" of `compression_stats()`."""
        return super().stats() | ({} if self._pilot is None else {"auto": self._pilot.report()})

    def _horovods_of(self, name: str) -> Any:
        """How a tensor goes through Horovod's allreduce."""
        if isinstance(self._compressor, Auto | Policy):
            return dense_route(self.routing.compressor_of(name))
        return self._horovods

    def _named_groups(self) -> list[list[str]] | None:
        groups = self.settings.groups
        names = [source.name for source in self._sources]
        if groups is None:
            return None
        if isinstance(groups, int):
            return [list(part) for part in split_list(names, groups)]
        return [[names[i] for i in group] for group in groups]

    def _description(self) -> dict[str, Any]:
        settings = self.settings
        return description(
            settings.compression, settings.op, [[s.name, s.shape, s.dtype.name] for s in self._sources],
            exchange=settings.exchange, min_numel=settings.min_numel, bucket_bytes=settings.bucket_bytes,
            sparse_as_dense=settings.sparse_as_dense,
            gradient_predivide_factor=settings.gradient_predivide_factor, groups=settings.groups,
            adagrad=settings.adagrad,
        )  # fmt: skip


def _claim(name: str, process_set: hvd.ProcessSet) -> str:
    """`name` for collectives: what a graph allows, and unique in this process, on all ranks in the same way."""
    allowed = allowed_name(name)
    if is_elastic():
        # who joins has not made what the others have; `_name_in_graph` makes it unique
        return allowed
    taken = _names[process_set.process_set_id, allowed]
    _names[process_set.process_set_id, allowed] += 1
    return f"{allowed}.again{taken}" if taken else allowed


def allowed_name(name: str) -> str:
    """`name` with what a graph does not allow in names replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", ".", name)


def _name_in_graph(name: str) -> str:
    """`name` for Horovod; in an elastic run unique in the current graph, which does not depend on the graphs before."""
    if not is_elastic():
        return name
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        return str(graph.unique_name(name))
