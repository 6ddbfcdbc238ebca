"""`CompressedAdam` for Keras 2 and 3 on either backend: mixins, which edges join with the optimizer of their Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hvd_compress._keras.adam_config import compression_of, exchange_of, saved_compression
from hvd_compress._keras.adam_steps import AdamSettings, AdamSteps, AdamVariables
from hvd_compress._keras.edge import Edge
from hvd_compress._keras.moments import Betas
from hvd_compress._keras.optimizer import DistributedMethods, Distribution
from hvd_compress.compressors import OneBit
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL, resolved
from hvd_compress.engine.momentum import LATE, check_betas, check_option, is_renewed, refuse_auto
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange, checked_exchange
from hvd_compress.feedback import check_state
from hvd_compress.schedules import Renewals

__all__ = ["compressed_adam"]

_KIND = "CompressedAdam"
_FLOATS = ("float32", "float64")


class _CompressedAdam(DistributedMethods):
    """Adam with decoupled weight decay, whose ranks exchange compressed momentum after a warm-up.

    It makes the same steps as `CompressedAdam` of `hvd_compress.torch`, whose documentation has the algorithm and its
    differences from the papers. Source: Tang et al., 1-bit Adam (arXiv 2102.02888, 2021), algorithm 1; for
    variance="renewed" Lu et al., 0/1 Adam (arXiv 2202.06009, 2022), algorithm 1, without local steps.

    It is an optimizer of its own, for `model.compile` or `apply_gradients`: do not wrap it. Each rank keeps its own
    gradients, and Keras clips them as such. A gradient that is None counts as zeros, a sparse one becomes dense. If
    what is exchanged is not finite on some rank, no rank makes the step, and there is a warning; `iterations` still
    goes on, and with it a schedule of the learning rate. All ranks must make the same steps. With one rank nothing is
    exchanged or compressed. Trained variables are float32 or float64, of any shape. Beside momentum and variance a rank
    keeps one more array of each variable's size, for gradients of elements that have no variance.

    A saved model has momentum, variance and the number of steps, the same on all ranks. Each rank has its own
    residuals, and its own sums for elements without a variance: these are in `compression_state_dict()`, which
    `CompressionCheckpointCallback` saves. `get_config()` has all settings but `process_set`; `hvd.load_model` needs no
    arguments for it.

    Args:
        learning_rate: a float, or one of Keras' schedules.
        beta_1: decay of the momentum for each step, in [0, 1).
        beta_2: decay of the variance for each gradient that it sees, in [0, 1).
        epsilon: added to the root of the variance.
        weight_decay: AdamW's: each step multiplies variables by 1 - learning_rate · weight_decay; see
            `exclude_from_weight_decay` of Keras. None is 0.
        compression: for the momentum; a compressor of hvd_compress or a `Policy`. Patterns match names of layer and
            variable, such as "first/kernel".
        warmup_steps: steps with uncompressed gradients, at least 1. The papers take 15 to 20 % of all steps.
        variance: "frozen" or "renewed".
        renewals: after the warm-up every second step may be a renewal, and the interval doubles after this many
            renewals.
        exchange: see `DistributedOptimizer`.
        min_numel: see `DistributedOptimizer`.
        bucket_bytes: see `DistributedOptimizer`.
        process_set: the ranks that take part, all by default.
        name: of the optimizer.
        settings: other arguments of Keras' optimizers, such as `clipnorm` and, in Keras 3,
            `gradient_accumulation_steps`.

    Raises:
        ValueError: a setting out of its range.
        TypeError: `compression` is no compressor; a trained variable is not float32 or float64.
        UnsupportedError: `Auto`; an elastic run; a MultiOptimizer or a LossScaleOptimizer around it, which
            `model.compile` adds where the dtype policy is mixed_float16.
        MismatchError: in the first step, if the ranks disagree; raised on all of them.

    Example, on one rank::

        import hvd_compress.keras as hvd
        from hvd_compress import OneBit

        hvd.init()
        model.compile(hvd.CompressedAdam(1e-3, warmup_steps=500, compression=OneBit()), "mse")
        model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    edge: ClassVar[Edge]
    # of the optimizer of Keras that this is laid over
    add_variable: Callable[..., Any]
    add_variable_from_reference: Callable[..., Any]
    weight_decay: float | None
    _use_weight_decay: Callable[[Any], bool]

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float | None = None,
        *,
        compression: Any = OneBit(),
        warmup_steps: int = 100,
        variance: str = "frozen",
        renewals: int = 16,
        exchange: str | Exchange = "auto",
        min_numel: int = DEFAULT_MIN_NUMEL,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        process_set: Any = None,
        name: str = "compressed_adam",
        **settings: Any,
    ) -> None:
        if is_elastic():
            raise UnsupportedError(
                f"{_KIND} of Keras in an elastic run: no state of Keras hands over what a rank keeps for elements "
                "without a variance. Use hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=...), "
                f"{_KIND} of hvd_compress.torch, or a fixed number of ranks"
            )
        numbers = {"epsilon": epsilon, "weight_decay": weight_decay or 0.0}
        if isinstance(learning_rate, int | float):
            numbers["learning_rate"] = learning_rate
        for option, value in numbers.items():
            check_option(_KIND, option, value, 0.0)
        check_betas(_KIND, beta_1=beta_1, beta_2=beta_2)
        refuse_auto(_KIND, compression)
        self._init_keras(learning_rate, weight_decay, name, settings)
        self._settings = AdamSettings(
            Betas(beta_1, beta_2, epsilon), weight_decay or 0.0, Renewals(warmup_steps, renewals),
            is_renewed(_KIND, variance),
        )  # fmt: skip
        exchanged = {
            "compression": resolved(compression, exchange), "exchange": checked_exchange(exchange),
            "min_numel": min_numel, "bucket_bytes": bucket_bytes, "op": self.edge.average_op,
            "process_set": self.edge.all_ranks if process_set is None else process_set, "adagrad": None,
            "gradient_predivide_factor": 1.0, "sparse_as_dense": True, "device_dense": "", "device_sparse": "",
        }  # fmt: skip
        self.edge.check(**exchanged)
        uncompressed = {**exchanged, "compression": self.edge.none, "exchange": checked_exchange("auto")}
        self._plain = Distribution(self.edge, uncompressed, None, False, 1.0)
        self._adam: AdamSteps | None = None
        self._own: dict[str, Any] = {}
        self._hvd = Distribution(self.edge, exchanged, None, False, 1.0)
        self.edge.keep_uncompiled(self, "apply")

    def _init_keras(self, learning_rate: Any, weight_decay: Any, name: str, settings: dict[str, Any]) -> None:
        raise NotImplementedError

    # -- steps -------------------------------------------------------------------------------------------------------

    def _build_adam(self, variables: Sequence[Any]) -> None:
        """Make what is kept of the model's variables."""
        for v in variables:
            if self._dtype_of(v) not in _FLOATS:
                raise TypeError(
                    f"{_KIND} with the variable {getattr(v, 'path', v.name)!r} of {self._dtype_of(v)}: must be float32 "
                    "or float64. A dtype policy of mixed_bfloat16 computes in bfloat16 and keeps variables in float32"
                )
        pairs = [[self.add_variable_from_reference(v, name) for name in ("momentum", "velocity")] for v in variables]
        counts = [self.add_variable(shape=(), dtype="int64", initializer="zeros", name=n) for n in ("steps", "seen")]
        kept = AdamVariables(list(variables), [m for m, _ in pairs], [v for _, v in pairs], *counts)
        adam = AdamSteps(self.edge, self._settings, self._plain, self._hvd, kept)
        adam.load_own(adam.checked_own(self._own))
        self._adam, self._own = adam, {}

    def _step(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        if self._adam is None:
            raise RuntimeError("a step before the optimizer is built")
        # what is set, or excluded, after the optimizer was built counts, too
        decay = float(self.weight_decay or 0.0)
        decays = [decay if decay and self._use_weight_decay(v) else 0.0 for v in variables]
        self._adam.apply(gradients, variables, decays, learning_rate)

    def _filled(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return [self.edge.arithmetic.dense(g, v) for g, v in zip(gradients, variables, strict=True)]

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: a step that is taken back must not decay."""

    @staticmethod
    def _dtype_of(variable: Any) -> str:
        return str(getattr(variable.dtype, "name", variable.dtype))

    # -- what this rank keeps ----------------------------------------------------------------------------------------

    def compression_stats(self) -> dict[str, Any]:
        """Bytes, seconds and residual norms of what was exchanged compressed on this rank; see `DistributedOptimizer`.

        Returns:
            What its `compression_stats` returns; "uncompressed": the total counters of steps with uncompressed
            gradients; "steps_by_way": how many steps were "warm-up", "renewal" and "compressed"; "steps_taken_back":
            how many steps no rank has made because something was not finite. Before the optimizer is built, only the
            first is not empty.
        """
        return {**super().compression_stats(), **({} if self._adam is None else self._adam.stats())}

    def compression_state_dict(self) -> dict[str, Any]:
        """What only this rank has, such as residuals of compression, to be saved on each rank."""
        state = super().compression_state_dict()
        own = self._own if self._adam is None else self._adam.own_entries()
        return {**state, "residuals": {**state["residuals"], **own}}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `compression_state_dict` returned on this rank; called before the first step, it takes effect
        there.

        Raises:
            StateError: not such a state; now, or at the first step, of another rank or number of ranks, or of other
                variables.
        """
        checked = check_state(state)
        residuals = checked["residuals"]
        own = {label: entry for label, entry in residuals.items() if label.startswith(f"{LATE} of ")}
        rest = {**checked, "residuals": {label: entry for label, entry in residuals.items() if label not in own}}
        taken = None if self._adam is None else self._adam.checked_own(own)
        super().load_compression_state_dict(rest)
        if self._adam is None or taken is None:
            self._own = own
        else:
            self._adam.load_own(taken)

    def set_compression(self, compression: Any) -> None:
        """See `DistributedOptimizer`; of momentum."""
        refuse_auto(_KIND, compression)
        super().set_compression(compression)

    def register_local_var(self, var: Any) -> None:
        """Raise UnsupportedError: all ranks share the momentum of all variables."""
        raise UnsupportedError(
            f"register_local_var({var!r}) of a {_KIND}: all ranks share the momentum of all variables. Train it with "
            "another optimizer"
        )

    # -- configurations ----------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """All settings but `process_set`, JSON-able."""
        settings, exchanged = self._settings, self._hvd.settings
        return {
            **super().get_config(),  # type: ignore[misc]
            **self._keras_config(),
            "beta_1": settings.betas.first,
            "beta_2": settings.betas.second,
            "epsilon": settings.betas.epsilon,
            "compression": saved_compression(self._hvd.asked_for),
            "warmup_steps": settings.schedule.warmup_steps,
            "variance": "renewed" if settings.is_renewed else "frozen",
            "renewals": settings.schedule.renewals,
            "exchange": exchanged["exchange"].get_config(),
            "min_numel": exchanged["min_numel"],
            "bucket_bytes": exchanged["bucket_bytes"],
        }

    def _keras_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer that `get_config` was called on, as it began, for all ranks."""
        made = {
            **config,
            "compression": compression_of(config["compression"]),
            "exchange": exchange_of(config["exchange"]),
        }
        return super(DistributedMethods, cls).from_config(made, *args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> Any:
        raise _no_copy("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_copy("pickled")


class _OfKeras3(_CompressedAdam):
    """Steps where Keras 3 updates: after accumulation and clipping."""

    def _init_keras(self, learning_rate: Any, weight_decay: Any, name: str, settings: dict[str, Any]) -> None:
        super(DistributedMethods, self).__init__(  # type: ignore[call-arg]
            learning_rate=learning_rate, weight_decay=weight_decay, name=name, **settings
        )

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._build_adam(variables)

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:
        return self._filled(list(grads), list(vars)), list(vars)

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        self._step(grads, trainable_variables, learning_rate)

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer.__init__ does this to what it wraps
        if name == "loss_scale_factor" and value is None and "_hvd" in self.__dict__:
            raise _no_loss_scale()
        super().__setattr__(name, value)


class _OfKeras2(_CompressedAdam):
    """Steps where Keras 2 updates."""

    _learning_rate: Any
    learning_rate: Any
    iterations: Any
    use_ema: bool
    ema_overwrite_frequency: int | None
    _update_model_variables_moving_average: Callable[[Any], None]
    _overwrite_model_variables_with_average_value: Callable[[Any], None]

    def _init_keras(self, learning_rate: Any, weight_decay: Any, name: str, settings: dict[str, Any]) -> None:
        # XLA cannot compile an exchange
        settings = {**settings, "jit_compile": False}
        super(DistributedMethods, self).__init__(name=name, weight_decay=weight_decay, **settings)  # type: ignore[call-arg]
        self._learning_rate = self._build_learning_rate(learning_rate)  # type: ignore[attr-defined]

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if self._adam is None:
            self._build_adam(list(var_list))
            # a state is taken over only after this
            self._built = True

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        if skip_gradients_aggregation or kwargs.get("experimental_aggregate_gradients") is False:
            raise _no_loss_scale()
        gradients, variables = zip(*grads_and_vars, strict=True)
        filled = zip(self._filled(gradients, variables), variables, strict=True)
        return super().apply_gradients(filled, name, skip_gradients_aggregation=True)  # type: ignore[misc]

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        self._step(gradients, variables, self.learning_rate)
        if self.use_ema:
            self._take_averages(variables)
        return self.iterations.assign_add(1)

    def _take_averages(self, variables: Sequence[Any]) -> None:
        """What Keras 2 does after its own steps."""
        self._update_model_variables_moving_average(variables)
        if not self.ema_overwrite_frequency:
            return

        def overwrite() -> bool:
            self._overwrite_model_variables_with_average_value(variables)
            return True

        is_due = (self.iterations + 1) % self.ema_overwrite_frequency == 0
        self.edge.arithmetic.choose(is_due, overwrite, lambda: False)

    def _keras_config(self) -> dict[str, Any]:
        return {"learning_rate": self._serialize_hyperparameter(self._learning_rate)}  # type: ignore[attr-defined]


def compressed_adam(keras: Any, edge: Edge, module: str) -> type:
    """The class for a Keras and an edge, as an export of `module`; models that were saved with it find it again."""
    # `tf.keras` does not say which Keras it is
    mixin = _OfKeras3 if hasattr(keras.optimizers.Optimizer, "apply") else _OfKeras2
    body = {"edge": edge, "__doc__": _CompressedAdam.__doc__, "__module__": module}
    made: type = type(_KIND, (mixin, keras.optimizers.Optimizer), body)
    register = keras.utils.register_keras_serializable(package="hvd_compress")
    registered: type = register(made)
    return registered


def _no_copy(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a {_KIND} cannot be {what}: what its ranks owe each other belongs to this one. Make another one of its "
        f"configuration: hvd.{_KIND}.from_config(optimizer.get_config())"
    )


def _no_loss_scale() -> UnsupportedError:
    return UnsupportedError(
        f"a LossScaleOptimizer or a MultiOptimizer around hvd.{_KIND}: the first would let each rank decide on its own "
        "gradients whether to take part in a step, and the others would wait for ever; the second would give it some "
        "of the variables. model.compile adds a LossScaleOptimizer where the dtype policy is mixed_float16: use "
        "mixed_bfloat16, or hvd.DistributedOptimizer(optimizer, compression=...) of a LossScaleOptimizer or a "
        "MultiOptimizer around Keras' Adam"
    )
