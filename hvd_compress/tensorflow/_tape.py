"""`DistributedGradientTape`: a tape whose `gradient` returns the combined gradients of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress._keras.names import exchanged_name, unique
from hvd_compress._keras.optimizer import local_variables
from hvd_compress.engine import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_MIN_NUMEL,
    check_settings,
    empty_state,
    exchange_of,
    is_carried,
    refuse_other_ops,
    refuse_what_stays,
    resolved,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import AdaGrad, Exchange
from hvd_compress.tensorflow._carried_exchange import CarriedGraphExchange, exchange_for
from hvd_compress.tensorflow._exchange import GradientExchange
from hvd_compress.tensorflow._seams import overlay
from hvd_compress.tensorflow._settings import Settings, Source, ranks_of
from hvd_compress.tensorflow.compression import horovod_compressor

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


_Key = tuple[Settings, Any, tuple[int, ...]]

# A training step makes a new tape, residuals must stay: exchanges belong to what the gradients are of.
_exchanges: dict[_Key, GradientExchange | CarriedGraphExchange] = {}


class _Overrides(tf.GradientTape):
    """Methods laid over those of a tape; see `_seams.overlay`."""

    _hvd_settings: Settings
    _hvd_groups: Any
    _hvd_scale_local: bool
    _hvd_local: list[Any]

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The combined gradients of all ranks, in the structure of `sources`; a collective call.

        Args:
            target: what to differentiate.
            sources: variables or watched tensors, nested as you like; the same on all ranks.
            output_gradients: see `tf.GradientTape.gradient`.
            use_generic_names: Horovod's; collectives are always named by source here.
            unconnected_gradients: see `tf.GradientTape.gradient`.

        Raises:
            UnsupportedError: within a function compiled by XLA.
            MismatchError: the ranks disagree; raised on all of them at the first call.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources, flat = _flatten(sources), _flatten(gradients)
        shared = [i for i, s in enumerate(flat_sources) if not self._is_local(s)]
        if shared:
            exchange = self._exchange_of(flat_sources)
            for i, combined in zip(shared, exchange.reduce([flat[i] for i in shared]), strict=True):
                flat[i] = combined
        if self._hvd_scale_local:
            ranks = ranks_of(self._hvd_settings.process_set)
            for i in set(range(len(flat))) - set(shared):
                flat[i] = divided(flat[i], ranks)
        return _pack(sources, flat)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of `source` to this rank: divided by the number of ranks, but not combined.

        Raises:
            UnsupportedError: with AdaGrad, which is applied to combined gradients.
        """
        if self._hvd_settings.adagrad is not None:
            raise UnsupportedError(
                f"{self._hvd_settings.adagrad!r} with a local source: its gradient is not combined, so that it would "
                "be the only one without AdaGrad. Give local sources a tape of their own"
            )
        self._hvd_local.append(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Call `gradient` and return (source, gradient) pairs: those of local sources, and all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(_flatten(sources), _flatten(gradients), strict=True))
        return [p for p in pairs if self._is_local(p[0])], [p for p in pairs if not self._is_local(p[0])]

    def compression_stats(self, sources: Any) -> dict[str, Any]:
        """Bytes, seconds and residual norms of all exchanges of `sources` so far in this process.

        What was exchanged before a state was loaded is not among them. Before the first step nothing is.

        Returns:
            As `DistributedOptimizer.compression_stats` of `hvd_compress.torch` does, but `exchange_seconds` are those
            between a stage and the next, in which other tensors make progress, and `start_seconds` are among them.
        """
        exchange = _exchanges.get(self._key_of(self._shared(sources)))
        found = {"total": {}, "tensors": {}} if exchange is None else exchange.stats()
        return {"compressor": repr(self._hvd_settings.compression), **found}

    def compression_state_dict(self, sources: Any) -> dict[str, Any]:
        """The residuals of this rank for `sources`, to be saved on each rank; values are NumPy arrays."""
        exchange = _exchanges.get(self._key_of(self._shared(sources)))
        if exchange is not None:
            return exchange.state_dict()
        process_set = self._hvd_settings.process_set
        among = process_set.included() and process_set.size() > 1
        return {**empty_state(), **({"size": process_set.size(), "rank": process_set.rank()} if among else {})}

    def load_compression_state_dict(self, state: dict[str, Any], sources: Any) -> None:
        """Take over what `compression_state_dict` returned on this rank; a collective call if it is the first one.

        Raises:
            StateError: not such a state, of another rank or number of ranks, or of other tensors.
        """
        self._exchange_of(sources).load_state_dict(state)

    def _is_local(self, source: Any) -> bool:
        return any(source is local for local in self._hvd_local)

    def _shared(self, sources: Any) -> list[Any]:
        return [s for s in _flatten(sources) if not self._is_local(s)]

    def _key_of(self, shared: Sequence[Any]) -> _Key:
        return self._hvd_settings, positions_of(self._hvd_groups, shared), tuple(map(id, shared))

    def _exchange_of(self, sources: Any) -> GradientExchange | CarriedGraphExchange:
        shared = self._shared(sources)
        key = self._key_of(shared)
        if key not in _exchanges:
            settings = replace(self._hvd_settings, groups=key[1])
            described = describe_sources(shared)
            _exchanges[key] = exchange_for(settings, described, variables_of(described, shared))
            for source in shared:
                # an id may be given to another object when this one is gone
                weakref.finalize(source, _exchanges.pop, key, None)
        return _exchanges[key]


def positions_of(groups: Any, sources: Sequence[Any]) -> Any:
    """Groups of variables as groups of positions in a list; a number of groups, or None, as it is."""
    if not isinstance(groups, list):
        return groups
    positions = {id(s): i for i, s in enumerate(sources)}
    return tuple(tuple(positions[id(v)] for v in group if id(v) in positions) for group in groups)


def describe_sources(sources: Sequence[Any]) -> list[Source]:
    """Names (of Keras 3: layer and variable), made unique by their position, with shapes and dtypes."""
    described = []
    for name, source in zip(unique([_name_of(s, i) for i, s in enumerate(sources)]), sources, strict=True):
        shape = tf.TensorShape(source.shape)
        known = tuple(shape.as_list()) if shape.is_fully_defined() else None
        described.append(Source(name, known, tf.as_dtype(source.dtype)))
    return described


def variables_of(described: Sequence[Source], sources: Sequence[Any]) -> dict[str, tf.Variable]:
    """Those of the sources that are variables, and of the same values on all ranks, by name."""
    inner = [source if isinstance(source, tf.Variable) else getattr(source, "value", None) for source in sources]
    return {d.name: v for d, v in zip(described, inner, strict=True) if isinstance(v, tf.Variable)}


def divided(gradient: Any, divisor: Any) -> Any:
    """A gradient, sparse ones too, divided by a number or a tensor of one; None stays None."""
    if gradient is None:
        return None
    if isinstance(divisor, tf.Tensor):
        divisor = tf.cast(divisor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


def _name_of(source: Any, position: int) -> str:
    try:
        return exchanged_name(source) or f"source_{position}"
    except AttributeError:
        # an eager tensor has no name
        return f"source_{position}"


def _flatten(structure: Any) -> list[Any]:
    # tf.nest would take a sparse gradient apart
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in _flatten(structure[key])]
    if isinstance(structure, list | tuple):
        return [leaf for part in structure for leaf in _flatten(part)]
    return [structure]


def _pack(structure: Any, leaves: list[Any]) -> Any:
    return tf.nest.map_structure(lambda i: leaves[i], tf.nest.pack_sequence_as(structure, list(range(len(leaves)))))


# programs wrap a tape inside of a tf.function: settings are Python, of which AutoGraph has nothing to convert
@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    exchange: str | Exchange = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    adagrad: AdaGrad | None = None,
) -> Any:
    """Wrap a tape so that `gradient()` returns the combined gradients of all ranks, exchanged compressed.

    Works in eager mode and inside `tf.function`, with variables of TensorFlow and of Keras. Residuals (what compression
    left out) belong to the list of sources, not to the tape: a new tape in every step goes on where the last one ended.
    Another list, such as one without the variables of a layer that was frozen, has residuals of its own. So give the
    same list in every step, and leave out the updates of what is frozen.

    Args:
        gradtape: to wrap; both share what is recorded.
        device_dense: of Horovod's allreduce.
        device_sparse: of Horovod's allgathers of sparse gradients.
        compression: a compressor of hvd_compress, one of `Compression`, or one written for Horovod.
        sparse_as_dense: make sparse gradients dense and compress them; else they travel as Horovod sends them.
        op: Average or Sum.
        gradient_predivide_factor: splits the averaging into a division before the sum and one after it; only for
            Average. Where hvd_compress makes the sums, in float32, the factors cancel, and the result is the average.
        num_groups: old name of `groups`.
        groups: gradients that go together, compressed or not: a number of groups, or lists of variables.
        process_set: the ranks that take part; others get their own gradients back.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.
        exchange: "two_phase"; "allgather"; "auto" for the one of these two that sends fewer bytes, where each
            collective counts as 32 KiB more (with `Auto`: the faster one); "hierarchical", which sums gradients inside
            each host and exchanges the sums compressed between hosts; or an `Exchange`, such as `ParameterServer`
            ("parameter_server" for one with its defaults), in which one rank sums what all ranks send.
        min_numel: gradients with fewer elements are not compressed; those of float32 share an exchange with compressed
            ones.
        bucket_bytes: gradients share an exchange of up to this many bytes (as float32), in the reverse order of the
            sources; 0 gives each gradient an exchange of its own, and leaves small ones to Horovod's own allreduce.
        adagrad: make the combined gradients AdaGrad's updates, to be multiplied with its learning rate and subtracted.
            exchange="allgather" is not possible then. With one rank, and outside of the process set, it is applied to
            the rank's own gradients.

    Raises:
        ValueError: a setting out of its range.
        TypeError: `compression` is no compressor, or `adagrad` no AdaGrad.
        UnsupportedError: another `op`; `adagrad` with `Auto` or with
            exchange="allgather"; `Auto` with a parameter server; a tape that is distributed already; in an elastic run
            with a compressor, a process set or messages of MPI.

    Example, on one rank::

        >>> import tensorflow as tf, hvd_compress.tensorflow as hvd
        >>> hvd.init()
        >>> w = tf.Variable([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(w * w)
        >>> tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.onebit)
        >>> tape.gradient(loss, [w])[0].numpy().tolist()
        [2.0, 4.0]
    """
    if isinstance(gradtape, _Overrides):
        raise UnsupportedError(
            "this tape is distributed already: its gradients are the combined ones, and would be combined twice. Wrap "
            "a tape once, or the plain one again"
        )
    groups = num_groups if num_groups and groups is None else groups
    compression = resolved(compression, exchange)
    check_settings(
        compression, exchange, min_numel, bucket_bytes, op == hvd.Average, gradient_predivide_factor, 1, groups,
        hvd.rocm_built(), carries=True,
    )  # fmt: skip
    exchange = exchange_of(adagrad, exchange, compression, carries=True)
    if is_carried(compression, adagrad):
        refuse_what_stays(repr(compression), exchange, process_set)
    horovod_compressor(compression)
    refuse_other_ops(op, hvd.Average, hvd.Sum)
    settings = Settings(
        compression, op, gradient_predivide_factor, sparse_as_dense, None, process_set, exchange, min_numel,
        bucket_bytes, device_dense, device_sparse, adagrad,
    )  # fmt: skip
    return overlay(
        gradtape, _Overrides, _hvd_settings=settings, _hvd_groups=groups, _hvd_scale_local=scale_local_gradients,
        _hvd_local=[],
    )  # fmt: skip


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None, **settings: Any
) -> Any:
    """`DistributedGradientTape` that leaves the weights of some layers to each rank.

    Args:
        gradtape: to wrap.
        arguments: of `DistributedGradientTape`, in its order.
        local_layers: one Keras layer, or several.
        settings: of `DistributedGradientTape`, by name.

    Raises:
        ValueError: `local_layers` are no layers, or not built.
    """
    tape = DistributedGradientTape(gradtape, *arguments, **settings)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape
