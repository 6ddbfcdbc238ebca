"""All exchanges of one tape or optimizer, laid into a graph: every first stage before any second one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.cost import network_of, slowest_speeds
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import (
    DENSE,
    NONE,
    SPARSE,
    Ledger,
    Pilot,
    Routing,
    Tensor,
    average_share,
    description,
    exchanged,
    has_residuals,
    is_carried,
)
from hvd_compress.engine.pilot import timed_compressors
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import Account, Hosts, Pack, bucket_of
from hvd_compress.fingerprint import Place
from hvd_compress.mpi import start_root_messages
from hvd_compress.policy import Auto, Policy, check_patterns
from hvd_compress.tensorflow._beginning import lay_comparison
from hvd_compress.tensorflow._bucket import GraphStages
from hvd_compress.tensorflow._dense import DenseWay
from hvd_compress.tensorflow._gradients import (
    Gradient,
    after,
    all_finite,
    first_value,
    kind_of,
    refuse_unfit,
    with_debt,
)
from hvd_compress.tensorflow._kinds import KindsOfGradients
from hvd_compress.tensorflow._ranks import TensorFlowRanks
from hvd_compress.tensorflow._root_bucket import RootGraphStages, after_others, let_others_follow
from hvd_compress.tensorflow._seams import ALLGATHER, ALLREDUCE, refuse_xla, split_list
from hvd_compress.tensorflow._settings import Settings, Source, claim
from hvd_compress.tensorflow._step_token import StepToken
from hvd_compress.tensorflow.compression import dense_route, horovod_compressor

__all__ = ["GradientExchange", "in_use"]

_in_use: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


class GradientExchange(Ledger[GraphStages]):
    """Combines the gradients of a fixed list of tensors over all ranks, in eager mode or within a `tf.function`.

    Args:
        settings: the same on all ranks.
        sources: of the gradients that `reduce` will be given, the same on all ranks.
        compared: whether the ranks compare all this now, in a collective call, and later which gradients they have.
        variables: among the sources, by name.
        compares: whether ranks look in the second step whether they hold the same values of these.

    Raises:
        MismatchError: the ranks disagree; raised on all of them.
        UnsupportedError: a tensor to be compressed whose shape is not known, or whose type is no floating one.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Source],
        compared: bool = True,
        variables: Mapping[str, tf.Variable] | None = None,
        compares: bool = True,
    ) -> None:
        self.settings = settings
        self._sources = list(sources)
        self._is_carried = is_carried(settings.compression, settings.adagrad)
        is_last = self._is_carried and settings.process_set.size() == 1
        # the last rank of an elastic run sends everything: what it owes goes with its next gradients
        self._compressor = None if is_last else exchanged(settings.compression)
        self._wire_names = {s.name: claim(s.name, settings.process_set) for s in sources}
        process_set = settings.process_set
        # in an elastic run others may join
        self.takes_part = process_set.included() and (process_set.size() > 1 or is_elastic())
        self._kinds: KindsOfGradients | None = None
        # who joins an elastic run knows of no exchanges before, unless all ranks make them anew then
        if self.takes_part and compared and (self._is_carried or not is_elastic()):
            TensorFlowRanks(process_set).agree(self._description())
            if sources:
                self._kinds = KindsOfGradients([s.name for s in sources], process_set, self._places)
                _in_use.add(self)
        self._compares = compares
        # whose variables go, goes with them
        self._variables = {name: weakref.ref(v) for name, v in (variables or {}).items()}
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
            self._bucket_maker(), self._named_groups(), pays_debts=self._is_carried or not self.takes_part,
            hosts=self._found_hosts(), adagrad=settings.adagrad, scale=self._scale,
        )  # fmt: skip
        for source in sources:
            refuse_unfit(source.name, source.dtype, self.exchanges(source.name))
        self._horovods = horovod_compressor(settings.compression)
        self._dense = DenseWay(settings, sources, self._wire_names, self._horovods_of)
        self._turn = StepToken()
        self._was_left_out = False
        """Whether a graph was made in which gradients are only returned, since this rank exchanged nothing then."""
        # the rows of a sparse gradient are others in each step
        self._compiled = tf.function(self._lay, autograph=False, reduce_retracing=True)

    @property
    def _waits(self) -> bool:
        """Whether stages wait for other ranks on threads of TensorFlow."""
        return self.takes_part and self.settings.exchange.sends_by_mpi

    @property
    def keeps_state(self) -> bool:
        """Whether anything depends on the steps before; not where this rank exchanges nothing, and owes nothing."""
        return self.takes_part or self.owes or self.steps > 0

    @tf.autograph.experimental.do_not_convert
    def reduce(self, gradients: Sequence[Gradient], loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """The combined gradients, in the order of the sources; None stays None.

        Args:
            gradients: one per source, of its shape and dtype.
            loss_scale: that the gradients are multiplied with; where it changes, residuals are converted.

        Raises:
            UnsupportedError: the function is compiled by XLA, or a sparse gradient comes to AdaGrad.
            MismatchError: a gradient is None, or sparse, on some ranks only, or a rank has called `join`; raised on all
                of them, and within a `tf.function` as an error of TensorFlow.
        """
        if self._kinds is not None:
            self._kinds.begin(self._kinds_of(gradients))
        elif not self.keeps_state or all(g is None for g in gradients):
            self._was_left_out = self._was_left_out or not tf.executing_eagerly()
            return list(gradients)
        if not tf.executing_eagerly():
            return self._lay(list(gradients), loss_scale)
        try:
            return list(self._compiled(list(gradients), loss_scale))
        except tf.errors.OpError as error:
            explained = None if self._kinds is None else self._kinds.explained(error)
            if explained is None:
                raise
            raise explained from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state completely, then take it over; see `Ledger`.

        Raises:
            StateError: not a state of this rank; or something is owed where one rank exchanges nothing, and has traced
                a function in which there is no place for it.
        """
        if self._was_left_out and has_residuals(state):
            raise StateError(
                "compressor state with residuals, loaded after a tf.function was traced with this tape or optimizer on "
                "one rank, which exchanges nothing: what is owed would never be added there. Load it before the first "
                "step"
            )
        super().load_state_dict(state)

    def places(self) -> list[Place]:
        """The first collectives of a step in which all gradients are dense."""
        return self._places([DENSE] * len(self._sources))

    def agree_to_join(self) -> None:
        """Make sure that no rank makes another compressed step before Horovod's `join`; a collective call.

        Raises:
            MismatchError: on all ranks, where others go on to a step.
        """
        if self._kinds is not None:
            self._kinds.agree_to_join()

    @property
    def is_in_use(self) -> bool:
        """Whether ranks may make another compressed step; TensorFlow keeps graphs for longer than their variables."""
        are_there = not self._variables or any(variable() is not None for variable in self._variables.values())
        return bool(self.buckets) and are_there and self.settings.process_set.process_set_id == 0

    # -- elastic runs ------------------------------------------------------------------------------------------------

    @property
    def _may_owe(self) -> bool:
        """Whether something may be owed while graphs that are laid now are used."""
        return self.owes or self._is_carried or not self.takes_part

    def with_debts(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Begin a step: add what is owed of tensors that are not compressed now to their gradients, in eager mode."""
        # of a step that has failed
        self.settle(keep=False)
        due = [None if g is None else self.due(s.name) for s, g in zip(self._sources, gradients, strict=True)]
        return [
            g if owed is None else with_debt(g, owed, self.settings.sparse_as_dense)
            for g, owed in zip(gradients, due, strict=True)
        ]

    def rest(self) -> None:
        """Nothing runs between steps."""

    # -- the graph ---------------------------------------------------------------------------------------------------

    def _lay(self, gradients: list[Gradient], loss_scale: tf.Tensor | None) -> list[Gradient]:
        # a scope, so that the names of collectives are what they are called by, however often they are in a graph
        with tf.name_scope("hvd_compress"):
            return self._lay_in_scope(gradients, loss_scale)

    def _lay_in_scope(self, gradients: list[Gradient], loss_scale: tf.Tensor | None) -> list[Gradient]:
        refuse_xla()
        prepared = [self._prepared(g, s) for g, s in zip(gradients, self._sources, strict=True)]
        exchanged = {
            s.name: g
            for s, g in zip(self._sources, prepared, strict=True)
            if self.exchanges(s.name) and isinstance(g, tf.Tensor)
        }
        # exchanges run on the CPU, wherever the gradients are; TensorFlow copies them there and back
        with tf.device("CPU:0"):
            turn = self._lay_beginning(gradients)
            if self._waits:
                turn = after_others(turn)
            if (self.accumulators is not None and not self._is_carried) or not self.takes_part:
                turn = tf.numpy_function(self._forget, [turn], tf.int64, stateful=False)
            if loss_scale is not None and self._may_owe:
                turn = tf.numpy_function(self._rescale, [turn, loss_scale], tf.int64, stateful=False)
        if self.takes_part:
            results = self._lay_dense(prepared, set(exchanged), turn)
        else:
            results = [self._lay_alone(s.name, g, turn) for s, g in zip(self._sources, prepared, strict=True)]
        finite = [all_finite(g) for g in results if g is not None] if self._may_owe else []
        if self.accumulators is not None:
            results, are_finite = self._lay_adagrad(results, turn)
            finite += are_finite
        ends = [first_value(g) for g in results if g is not None]
        with tf.device("CPU:0"):
            if self._kinds is not None and all(g is None for g in gradients):
                ends.append(self._lay_nothing(turn))
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
            with tf.control_dependencies([keep, *ends]):
                ends.append(self._lay_comparison(gradients, tf.identity(turn)))
            self._lay_end(prepared, [keep, *ends], turn)
            if self._waits:
                let_others_follow([keep, *ends])
        return [combined.get(s.name, result) for s, result in zip(self._sources, results, strict=True)]

    def _lay_beginning(self, gradients: list[Gradient]) -> tf.Tensor:
        """The turn of this step, when all ranks have come to such a one."""
        turn = self._turn.read()
        return turn if self._kinds is None else self._kinds.lay(self._kinds_of(gradients), turn)

    def _lay_comparison(self, gradients: list[Gradient], turn: tf.Tensor) -> tf.Tensor:
        """Look whether ranks have the same variables, in the second step, when all ranks have made it."""
        if self._kinds is None:
            return turn
        # ranks may add up sparse gradients in different orders
        kinds = self._kinds_of(gradients)
        names = [s.name for s, kind in zip(self._sources, kinds, strict=True) if kind != SPARSE]
        found = {name: self._variables[name]() for name in names if self._compares and name in self._variables}
        alive = {name: variable for name, variable in found.items() if variable is not None}
        collective = f"{ALLGATHER}.variables.{self._wire_names[self._sources[0].name]}"
        return lay_comparison([s.name for s in self._sources], alive, turn, collective, self.settings.process_set)

    def _lay_dense(self, gradients: list[Gradient], exchanged: set[str], turn: tf.Tensor) -> list[Gradient]:
        """Results of what goes through Horovod's own collectives, not before this step's turn; None for the others."""
        waiting = {
            i: after(g, turn, i)
            for i, (s, g) in enumerate(zip(self._sources, gradients, strict=True))
            if g is not None and s.name not in exchanged
        }
        results = self._dense.lay(waiting)
        return [results.get(i) for i in range(len(gradients))]

    def _lay_alone(self, name: str, gradient: Gradient, turn: tf.Tensor) -> Gradient:
        """A gradient of a rank that exchanges nothing, with what is owed of it; a sparse one waits for a dense one."""
        if not isinstance(gradient, tf.Tensor):
            return gradient

        def pay(turn: np.int64, values: np.ndarray[Any, Any]) -> Any:
            due = self.due(name)
            return values if due is None else (values + due.reshape(values.shape)).astype(values.dtype)

        with tf.device("CPU:0"):
            # `turn` is an input, so that the gradient cannot be a constant and this be run once
            paid = tf.numpy_function(pay, [turn, gradient], gradient.dtype, stateful=False)
        paid.set_shape(gradient.shape)
        return paid

    def _lay_nothing(self, turn: tf.Tensor) -> tf.Tensor:
        """A collective in a step without any gradient, for ranks to meet who have one."""
        zero = tf.cast(turn, tf.float32)
        return hvd.allreduce(zero, name=self._nothing(), ignore_name_scope=True, process_set=self.settings.process_set)

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
            (source.name, *self._dense.bytes_of(source, g))
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

    # -- parts -------------------------------------------------------------------------------------------------------

    def _kinds_of(self, gradients: Sequence[Gradient]) -> tuple[str, ...]:
        return tuple(kind_of(g, self.settings.sparse_as_dense) for g in gradients)

    def _places(self, kinds: Sequence[str]) -> list[Place]:
        """The first collectives of a step with gradients of these kinds."""
        ours = {s.name for s, k in zip(self._sources, kinds, strict=True) if k == DENSE and self.exchanges(s.name)}
        others = {
            i: k for i, (s, k) in enumerate(zip(self._sources, kinds, strict=True)) if k != NONE and s.name not in ours
        }
        of_buckets = [bucket.place for bucket in self.buckets if not ours.isdisjoint(bucket.tensors)]
        return [*of_buckets, *self._dense.places(others)] or [Place("allreduce", self._nothing())]

    def _nothing(self) -> str:
        return f"{ALLREDUCE}.nothing.{self._wire_names[self._sources[0].name]}"

    def _prepared(self, gradient: Gradient, source: Source) -> Gradient:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and not self.settings.sparse_as_dense:
            return gradient
        gradient = tf.convert_to_tensor(gradient)
        if self.exchanges(source.name):
            gradient.shape.assert_is_compatible_with(source.shape)
        return gradient

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
                network = network_of(ranks, with_hosts=settings.exchange.uses_hosts)
                speeds = slowest_speeds(timed_compressors(ours, settings.exchange), ranks)
                self._pilot = Pilot(ours, tensors, routing, network, speeds)
            routing = self._pilot.routing()
        return routing

    def _bucket_maker(self) -> Callable[[dict[str, Account], Pack | None], GraphStages]:
        process_set = self.settings.process_set
        if not self._waits:
            return lambda accounts, pack: GraphStages(bucket_of(accounts, pack), process_set, self._wire_names)
        with tf.init_scope(), tf.device("CPU:0"):
            messages = start_root_messages(hvd, TensorFlowRanks(process_set))

        def make_bucket(accounts: dict[str, Account], pack: Pack | None) -> GraphStages:
            return RootGraphStages(bucket_of(accounts, pack), process_set, self._wire_names, messages.channel())

        return make_bucket

    def _found_hosts(self) -> Hosts | None:
        if not self.takes_part or not self.settings.exchange.uses_hosts:
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
            exchange=settings.exchange.told_among(settings.process_set.size()),
            min_numel=settings.min_numel, bucket_bytes=settings.bucket_bytes,
            sparse_as_dense=settings.sparse_as_dense,
            gradient_predivide_factor=settings.gradient_predivide_factor, groups=settings.groups,
            adagrad=settings.adagrad,
        )  # fmt: skip


def in_use() -> list[GradientExchange]:
    """Exchanges of tapes and optimizers among all ranks in which these may make another compressed step."""
    return [exchange for exchange in list(_in_use) if exchange.is_in_use]
