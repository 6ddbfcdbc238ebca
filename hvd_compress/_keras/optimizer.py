"""Optimizers of Keras 2 and 3 whose updates work with the combined gradients of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress._keras.edge import Edge, KerasExchange
from hvd_compress._keras.warmup import described
from hvd_compress.engine import empty_state, is_carried, refuse_loading_apart, resolved
from hvd_compress.errors import UnsupportedError
from hvd_compress.feedback import check_state

__all__ = [
    "DistributedMethods",
    "Distribution",
    "distributed",
    "keras_of",
    "local_variables",
    "wrap",
]


class Distribution:
    """What a wrapped optimizer has beyond its base.

    Args:
        edge: of the framework.
        settings: of the exchange, by name, without groups.
        groups: see `DistributedOptimizer`.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        scale: factor on combined gradients.
        passes: backward passes that are summed before an exchange; of Keras 2, Keras 3 counts them itself.
    """

    def __init__(
        self,
        edge: Edge,
        settings: dict[str, Any],
        groups: Any,
        scale_local_gradients: bool,
        scale: float,
        passes: int = 1,
    ) -> None:
        self.settings = settings
        # a warm-up changes the compression in `settings` for a while
        self.asked_for = settings["compression"]
        self.passes = passes
        self.accumulators: Any = edge.accumulators(passes) if passes > 1 else None
        self.of_gradients: list[Any] = []
        self.given: list[Any] = []
        """What Keras 2 is asked to step, also without a gradient."""
        self.local: list[Any] = []
        self.adds_scale = False
        """Whether a LossScaleOptimizer was put around the user's optimizer."""
        self.has_scaled = False
        """Whether a loss was scaled by it."""
        self.is_broadcast = False
        """Whether a callback makes the variables of all ranks the same, but those that are to differ."""
        self._edge = edge
        self.key = edge.key
        self._groups = groups
        self._scale_local = scale_local_gradients
        self._scale = scale
        self._variables: list[Any] = []
        self._pending: dict[str, Any] | None = None
        self._replaced: KerasExchange | None = None
        self.exchange: KerasExchange | None = None

    def combine(
        self, gradients: Sequence[Any], variables: Sequence[Any], known: Sequence[Any], loss_scale: Any = None
    ) -> list[Any]:
        """The gradients of all ranks, combined; those of local variables stay.

        Args:
            gradients: one per variable.
            variables: what they are of.
            known: all variables that the optimizer will ever be given; the exchange is made for these.
            loss_scale: that gradients are multiplied with.
        """
        edge, key = self._edge, self._edge.key
        by_key = {key(v): g for v, g in zip(variables, gradients, strict=True)}
        exchange = self._exchange_for(known)
        self._check_known(variables)
        combined = exchange.reduce([by_key.get(key(v)) for v in self._variables], loss_scale)
        if self._scale != 1.0:
            combined = [edge.divided(g, 1.0 / self._scale) for g in combined]
        by_key.update({key(v): g for v, g in zip(self._variables, combined, strict=True) if g is not None})
        if self._scale != 1.0:
            local = [key(v) for v in self.local if by_key.get(key(v)) is not None]
            by_key.update({k: edge.divided(by_key[k], 1.0 / self._scale) for k in local})
        if self._scale_local and self.local:
            ranks = edge.divisor_of(self.settings["process_set"])
            by_key.update({key(v): edge.divided(by_key[key(v)], ranks) for v in self.local if key(v) in by_key})
        return [by_key[key(v)] for v in variables]

    def prepare(self, known: Sequence[Any]) -> None:
        """Make the exchange now, for these variables; a collective call."""
        self._exchange_for(known)

    def replace_compression(self, compression: Any) -> None:
        """Use another compressor from the next step on; what is owed is kept. All ranks must do so at the same step.

        Raises:
            UnsupportedError: on TensorFlow a compressor without error feedback, while something is owed; AdaGrad; in an
                elastic run, compression after none or none after it.
        """
        if self.settings["adagrad"] is not None:
            raise UnsupportedError(
                f"another compression with {self.settings['adagrad']!r}: its accumulators lie with the owners of "
                "elements, which change with the compressor. Save the states of all ranks, and load them after "
                "hvd_compress.feedback.redistribute into an optimizer with the other one"
            )
        settings = {**self.settings, "compression": resolved(compression, self.settings["exchange"])}
        self._edge.check(**settings)
        if is_carried(self.settings["compression"], None) != is_carried(settings["compression"], None):
            raise UnsupportedError(
                f"{compression!r} after {self.settings['compression']!r} in an elastic run: what goes uncompressed has "
                "no exchange that is carried over to other ranks. Use compressors of hvd_compress for both "
                "(CompressionWarmupCallback: dense_epochs=0)"
            )
        self.settings = settings
        if self.exchange is not None:
            self._replaced, self.exchange = self.exchange, None

    @property
    def has_begun(self) -> bool:
        """Whether gradients have been exchanged, also before a state was saved that is loaded here."""
        return self.latest is not None or bool(self._pending and self._pending["steps"])

    @property
    def compressed_as(self) -> Any:
        """What gradients have been compressed with last, as `described` has it."""
        if self._pending is not None and self._pending["steps"]:
            return self._pending.get("compressor")
        return described(self.settings["compression"])

    @property
    def latest(self) -> KerasExchange | None:
        """The exchange that holds what is owed, also while another one is about to take over."""
        return self.exchange or self._replaced

    def state(self) -> dict[str, Any]:
        """What this rank owes, also before the first step after a state has been loaded."""
        if self._pending is not None:
            return self._pending
        return self.latest.state_dict() if self.latest is not None and self.latest.keeps_state else empty_state()

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state now, or as soon as it is known what variables there are."""
        refuse_loading_apart()
        if self.exchange is None:
            self._pending = check_state(state)
        else:
            self.exchange.load_state_dict(state)

    def _check_known(self, variables: Sequence[Any]) -> None:
        key = self._edge.key
        known = {key(v) for v in [*self._variables, *self.local]}
        unknown = [_path(v) for v in variables if key(v) not in known]
        if unknown:
            raise ValueError(
                f"gradients of {', '.join(map(repr, unknown))}, which this optimizer was not built with: it combines "
                f"those of {', '.join(repr(_path(v)) for v in self._variables)}. Use another optimizer for them"
            )

    def _exchange_for(self, known: Sequence[Any]) -> KerasExchange:
        if self.exchange is None:
            local = {self._edge.key(v) for v in self.local}
            self._variables = [v for v in known if self._edge.key(v) not in local]
            exchange = self._edge.exchange(self._variables, self._groups, self.settings, not self.is_broadcast)
            # what may be refused comes before anything is given up
            if self._replaced is not None:
                exchange.inherit(self._replaced)
            if self._pending is not None:
                exchange.load_state_dict(self._pending)
            self.exchange, self._replaced, self._pending = exchange, None, None
        return self.exchange


class DistributedMethods:
    """Methods that every wrapped optimizer has."""

    # of the optimizer's class, in the Keras that has them
    _trainable_variables: list[Any]
    built: bool
    build: Callable[[list[Any]], None]
    iterations: Any

    _hvd: Distribution

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """A plain optimizer of the class that was wrapped; without settings there is nothing to wrap it with."""
        return cls.__bases__[1].from_config(config, *args, **kwargs)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        raise _no_copy(self, "copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_copy(self, "pickle")

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of `var` to this rank: divided by the number of ranks, but not combined.

        Raises:
            ValueError: gradients have been exchanged already.
        """
        if self._hvd.exchange is not None:
            raise ValueError("register_local_var() after the first step: register local variables before training")
        self._hvd.local.append(var)

    def compression_stats(self) -> dict[str, Any]:
        """Bytes, seconds and residual norms of this optimizer's steps so far on this rank; empty before the first one.

        Steps that were made before a state was loaded are not among them.

        Returns:
            A dict. "compressor" is a repr, "total" has counters, and "tensors" has `{path of the variable: counters}`.
            `DistributedOptimizer` of `hvd_compress.torch` tells what the counters are.
        """
        label = repr(self._hvd.settings["compression"])
        latest = self._hvd.latest
        return {"compressor": label, **({"total": {}, "tensors": {}} if latest is None else latest.stats())}

    def compression_state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, to be saved per rank: they are not the same on all ranks."""
        return self._hvd.state()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `compression_state_dict` returned on this rank; before the first step it is kept until then.

        The counters of `compression_stats` go on as they are.

        Raises:
            StateError: not such a state; now, or at the first step, of another rank or number of ranks, or of other
                variables.
        """
        self._hvd.load(state)

    def set_compression(self, compression: Any) -> None:
        """Use another compressor from the next step on; what is still owed is kept.

        All ranks must call it at the same step. A training function that is traced already must be made again, as
        `model.make_train_function(force=True)` does; `CompressionWarmupCallback` does both.

        Raises:
            TypeError: `compression` is no compressor.
            UnsupportedError: on TensorFlow, at the next step, a compressor without error feedback while something is
                owed. On torch what is owed goes with the next gradients.
        """
        self._hvd.replace_compression(compression)
        self._hvd.asked_for = self._hvd.settings["compression"]


class _Keras3(DistributedMethods):
    """Combines where Keras 3 clips: after local accumulation and unscaling, before clipping and the update."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._hvd.of_gradients = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:
        if all(g is None for g in grads):
            # Keras refuses a step without any gradient, and other ranks would wait for this one
            self._hvd.combine(list(grads), list(vars), self._trainable_variables)
        return super()._filter_empty_gradients(grads, vars)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        combined = self._hvd.combine(grads, self._hvd.of_gradients, self._trainable_variables)
        return super()._clip_gradients(combined)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer and MultiOptimizer do this to what they wrap; a property would not hear of it on
        # TensorFlow, where Keras first looks whether the value changes
        if name == "loss_scale_factor" and value is None and "_hvd" in self.__dict__:
            raise UnsupportedError(
                "a LossScaleOptimizer or a MultiOptimizer around hvd.DistributedOptimizer: the first would let each "
                "rank decide on its own gradients whether to take part in a step, and the others would wait for ever. "
                "Wrap the other way round: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), "
                "or hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(...)). model.compile adds a "
                "LossScaleOptimizer of its own where the model computes in float16"
            )
        super().__setattr__(name, value)


class _Keras3Apply(DistributedMethods):
    """Combines before anything else is done, for optimizers with an `apply` of their own.

    A LossScaleOptimizer decides by the gradients whether a step counts, which all ranks must do alike; a MultiOptimizer
    hands parts of them on to others.
    """

    def scale_loss(self, loss: Any) -> Any:
        self._hvd.has_scaled = True
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if self._hvd.adds_scale and not self._hvd.has_scaled:
            raise UnsupportedError(
                "hvd.DistributedOptimizer has put a LossScaleOptimizer around this optimizer, since the model computes "
                "in float16, as model.compile does; and gradients come that were not scaled. In a loop of your own "
                "call optimizer.scale_loss(loss) before you compute gradients, or wrap before you set the policy "
                "mixed_float16"
            )
        if not self.built:
            # the loss scale is a variable, which exists from here on
            self.build(list(trainable_variables))
            self.built = True
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        scale = self.dynamic_scale.value if hasattr(self, "dynamic_scale") else None
        combined = self._hvd.combine(list(grads), variables, self._trainable_variables, scale)
        super().apply(combined, trainable_variables)  # type: ignore[misc]


class _Keras2(DistributedMethods):
    """Combines where Keras 2 aggregates: before clipping, and before a LossScaleOptimizer checks what is finite."""

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        known = self._hvd.given or [v for _, v in pairs]
        gradients, variables = [g for g, _ in pairs if g is not None], [v for g, v in pairs if g is not None]
        combined = iter(self._hvd.combine(gradients, variables, known))
        # Keras leaves out those without a gradient, and tells of them
        return [(None if g is None else next(combined), v) for g, v in pairs]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(grads_and_vars)
        # the optimizers of Keras 1 leave out those without a gradient first, and they may have one in a later step
        self._hvd.given = [v for _, v in given]
        step = super().apply_gradients  # type: ignore[misc]
        if self._hvd.passes == 1:
            return step(given, *args, **kwargs)
        sums = self._hvd.accumulators.add([(g, v) for g, v in given if g is not None])

        def update() -> Any:
            total_of = {self._hvd.key(v): total for total, v in sums}
            totals = [(total_of.get(self._hvd.key(v)), v) for _, v in given]
            step([(None if t is None else t.read_value(), v) for t, v in totals], *args, **kwargs)
            return self._hvd.accumulators.clear()

        def wait() -> Any:
            return self.iterations.assign_add(1).op

        self._hvd.accumulators.when_full(update, wait)
        return self.iterations


class _Keras2Legacy(_Keras2):
    """The optimizers of `keras.optimizers.legacy`, which call it by another name."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        return self.aggregate_gradients(grads_and_vars)


def _no_copy(optimizer: Any, what: str) -> UnsupportedError:
    name = type(optimizer).__name__
    return UnsupportedError(
        f"cannot {what} {name}, which hvd.DistributedOptimizer has wrapped: what its ranks owe each other belongs to "
        f"this one, and Keras would make a plain {name}, which exchanges nothing. Make another one of its "
        "configuration and wrap that: hvd.DistributedOptimizer(optimizer.__class__.from_config("
        "optimizer.get_config()), ...). Saved models load without this, see hvd.load_model"
    )


def local_variables(local_layers: Any) -> list[Any]:
    """The trainable weights of one or several Keras layers.

    Raises:
        ValueError: not layers, or layers that have no weights yet.
    """
    given = [] if local_layers is None else local_layers
    layers = list(given) if isinstance(given, list | tuple | set) else [given]
    if not all(getattr(layer, "built", False) for layer in layers):
        raise ValueError(f"local_layers={local_layers!r}: must be a Keras layer, or a list of them, built")
    return [v for layer in layers for v in layer.trainable_weights]


def keras_of(optimizer: Any) -> Any:
    """The Keras package that an optimizer comes from: keras (2 or 3) or tf_keras."""
    for base in type(optimizer).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("keras", "tf_keras"):
            return sys.modules[root]
    raise TypeError(f"{optimizer!r} is no Keras optimizer; give one of keras.optimizers")


def wrap(
    optimizer: Any,
    edge: Edge,
    settings: dict[str, Any],
    groups: Any,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    scale_local_gradients: bool,
) -> Any:
    """An optimizer of the same class, name and configuration that combines gradients over all ranks.

    Raises:
        TypeError: no Keras optimizer.
        UnsupportedError: one that is distributed already.
        ValueError: passes are accumulated twice, or what was made of this optimizer before has trained.
    """
    keras = keras_of(optimizer)
    if distributed(optimizer) is not None:
        raise UnsupportedError(
            "this optimizer is distributed already: wrap it once. To wrap one with other settings, as when a "
            "cell of a notebook runs again, make the plain optimizer anew and wrap that, or use "
            "optimizer.set_compression(...)"
        )
    counted = getattr(optimizer, "inner_optimizer", optimizer)
    # those of Keras 1 have no `build`, and make their variables with the first step
    is_built = getattr(counted, "built", getattr(counted, "_built", not hasattr(counted, "build")))
    if not is_built and int(counted.iterations) > 0:
        raise ValueError(
            "this optimizer was wrapped before, and what was made of it has trained: both share the number of steps "
            "and the learning rate, and not the moments. Make a new one of its class, or begin with a copy: "
            "optimizer.from_config(optimizer.get_config())"
        )
    if int(keras.__version__.partition(".")[0]) < 3:
        return _wrap_keras2(optimizer, edge, settings, groups, backward_passes_per_step,
                            average_aggregated_gradients, scale_local_gradients)  # fmt: skip
    scale = 1.0
    if backward_passes_per_step > 1:
        _check_accumulation(keras, optimizer, backward_passes_per_step)
        # Keras divides by the number of passes, Horovod sums unless told otherwise
        # an update of AdaGrad is the same whatever factor its gradients have
        is_free = average_aggregated_gradients or settings["adagrad"] is not None
        scale = 1.0 if is_free else float(backward_passes_per_step)
    adds_scale = not _is_scaled(keras, optimizer) and keras.config.dtype_policy().name == "mixed_float16"
    if adds_scale:
        # what model.compile would do around our optimizer, where it would be too late
        optimizer = _with_loss_scale(keras, optimizer)
    if backward_passes_per_step > 1:
        optimizer = _accumulating(optimizer, backward_passes_per_step)
    has_own_apply = _has_own_apply(keras, optimizer)
    wrapped = _same_object(optimizer, _Keras3Apply if has_own_apply else _Keras3)
    if backward_passes_per_step > 1:
        getattr(wrapped, "inner_optimizer", wrapped).gradient_accumulation_steps = backward_passes_per_step
    wrapped._hvd = Distribution(edge, settings, groups, scale_local_gradients, scale)
    wrapped._hvd.adds_scale = adds_scale
    edge.keep_uncompiled(wrapped, "apply")
    return wrapped


def _is_scaled(keras: Any, optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _has_own_apply(keras: Any, optimizer: Any) -> bool:
    return type(optimizer).apply is not keras.optimizers.Optimizer.apply


def _check_accumulation(keras: Any, optimizer: Any, passes: int) -> None:
    counted = getattr(optimizer, "inner_optimizer", optimizer)
    if counted.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
            f"{counted.gradient_accumulation_steps}: give one of them"
        )
    if not _is_scaled(keras, optimizer) and _has_own_apply(keras, optimizer):
        raise UnsupportedError(
            f"backward_passes_per_step={passes} with {type(optimizer).__name__}, which applies gradients in a way of "
            "its own: give gradient_accumulation_steps to the optimizers in it"
        )


def _accumulating(optimizer: Any, passes: int) -> Any:
    """A built optimizer that adds up so many passes: the same one, or one of its state and attributes."""
    counted = getattr(optimizer, "inner_optimizer", optimizer)
    if not counted.built or counted.gradient_accumulation_steps == passes:
        # as it was saved by one that was wrapped
        return optimizer
    # Keras saves variables in the order in which they were made, and reads accumulators before those of the algorithm
    config = optimizer.get_config()
    (config if counted is optimizer else config["inner_optimizer"]["config"])["gradient_accumulation_steps"] = passes
    fresh = type(optimizer).from_config(config)
    fresh.build(counted._trainable_variables)
    now = getattr(fresh, "inner_optimizer", fresh)
    added = set(map(id, now._accumulated_gradients))
    _go_on_from(counted, now, [v for v in now.variables if id(v) not in added])
    if counted is not optimizer and optimizer.built:
        for name in ("step_counter", "dynamic_scale"):
            getattr(fresh, name).assign(getattr(optimizer, name))
    return fresh


def _with_loss_scale(keras: Any, optimizer: Any) -> Any:
    if not optimizer.built:
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    else:
        # it builds the optimizer in it, which would make the variables of a built one anew
        fresh = type(optimizer).from_config(optimizer.get_config())
        scaled = keras.optimizers.LossScaleOptimizer(fresh, name="loss_scale_optimizer")
        scaled.build(optimizer._trainable_variables)
        _go_on_from(optimizer, fresh, fresh.variables)
    return scaled


def _go_on_from(optimizer: Any, fresh: Any, variables: Sequence[Any]) -> None:
    """Give variables of an optimizer of the same configuration the values of another one, and its other attributes."""
    for variable, original in zip(variables, optimizer.variables, strict=True):
        variable.assign(original)
    # what weight decay leaves out is no part of a configuration
    for name, value in vars(optimizer).items():
        fresh.__dict__.setdefault(name, value)


def distributed(optimizer: Any) -> Any:
    """The wrapped optimizer in `optimizer`: itself, or what a LossScaleOptimizer of Keras 2 holds; None if neither."""
    for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        # not isinstance: a wrapped optimizer says that it is of its base's class
        if issubclass(type(candidate), DistributedMethods):
            return candidate
    return None


def _wrap_keras2(
    optimizer: Any,
    edge: Edge,
    settings: dict[str, Any],
    groups: Any,
    passes: int,
    average: bool,
    scale_local_gradients: bool,
) -> Any:
    if hasattr(optimizer, "inner_optimizer"):
        inner = _wrap_keras2(optimizer.inner_optimizer, edge, settings, groups, passes, average,
                             scale_local_gradients)  # fmt: skip
        # the same loss scale, which may have changed since the optimizer was made
        scaled = object.__new__(type(optimizer))
        scaled.__dict__.update({**optimizer.__dict__, "_optimizer": inner})
        return scaled
    is_legacy = not hasattr(optimizer, "aggregate_gradients")
    wrapped = _same_object(optimizer, _Keras2Legacy if is_legacy else _Keras2)
    scale = 1.0 / passes if average and settings["adagrad"] is None else 1.0
    wrapped._hvd = Distribution(edge, settings, groups, scale_local_gradients, scale, passes)
    return wrapped


def _same_object(optimizer: Any, methods: type) -> Any:
    """An optimizer with the attributes and variables of another one, and `methods` laid over those of its class.

    It says that it is of the class it was made from, so that what Keras saves of it names that class, and loads
    without this package.
    """
    base = type(optimizer)
    body = {"__module__": base.__module__, "__class__": property(lambda self: base)}
    wrapped: Any = object.__new__(type(base.__name__, (methods, base), body))
    wrapped.__dict__.update(optimizer.__dict__)
    return wrapped


def _path(variable: Any) -> str:
    return getattr(variable, "path", None) or str(variable.name)
