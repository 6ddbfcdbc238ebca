"""The functions of `horovod.keras`, written once for both backends and both generations of Keras."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hvd_compress._keras.edge import Edge
from hvd_compress._keras.optimizer import distributed, local_variables, wrap
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL, exchange_of, resolved
from hvd_compress.exchange import AdaGrad, Exchange

__all__ = ["Interface"]


class Interface:
    """Functions that an edge exports as its own.

    Args:
        edge: of the framework.
        keras: the Keras that models are loaded with.
    """

    def __init__(self, edge: Edge, keras: Any) -> None:
        self._edge = edge
        self._keras = keras

    def DistributedOptimizer(
        self,
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: Any = None,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        *,
        exchange: str | Exchange = "auto",
        min_numel: int = DEFAULT_MIN_NUMEL,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        adagrad: AdaGrad | None = None,
    ) -> Any:
        """Wrap a Keras optimizer so that its updates work with the combined gradients of all ranks, sent compressed.

        Works under `fit`, `train_on_batch` and in loops of your own (`apply_gradients`). Class, name and configuration
        stay those of the wrapped optimizer, so that a saved model loads without this package. Both have the
        same variables: use the wrapped one only.

        Args:
            optimizer: of `keras.optimizers`, a `LossScaleOptimizer` too. Where the global dtype policy is
                mixed_float16, one is added, as `model.compile` would do.
            name: Horovod's prefix of operations; not used, since operations are named by variable.
            device_dense: of Horovod's allreduce on TensorFlow.
            device_sparse: of Horovod's allgathers of sparse gradients on TensorFlow.
            compression: a compressor of hvd_compress, `Auto` (or "auto"), a `Policy`, one of `Compression`, or one
                written for Horovod (default: none).
            sparse_as_dense: make sparse gradients dense and compress them; else they travel as Horovod sends them.
            gradient_predivide_factor: splits the averaging into a division before the sum and one after it; only for
                Average.
            op: Average (default) or Sum.
            backward_passes_per_step: gradients of this many steps are summed before an exchange and an update. With
                Keras 3 it becomes the optimizer's `gradient_accumulation_steps`. Within a LossScaleOptimizer gradients
                are exchanged in every step, since all ranks must know whether they are finite.
            average_aggregated_gradients: divide that sum by the number of passes.
            num_groups: old name of `groups`.
            groups: gradients that go together, compressed or not: a number of groups, or lists of variables. No effect
                on the torch backend.
            process_set: the ranks that take part, all by default; others go on with their own gradients.
            scale_local_gradients: divide the gradients of local variables by the number of ranks.
            exchange: "two_phase"; "allgather"; "auto" for the one of these two that sends fewer bytes, where each
                collective counts as 32 KiB more (with `Auto`: the faster one); "hierarchical", which sums gradients
                inside each host and exchanges the sums compressed between hosts; or an `Exchange`, such as
                `ParameterServer` ("parameter_server" for one with its defaults), in which one rank sums what all ranks
                send.
            min_numel: gradients with fewer elements are not compressed; those of float32 share an exchange with
                compressed ones.
            bucket_bytes: gradients share an exchange of up to this many bytes (as float32), in the reverse order of the
                variables; 0 gives each gradient an exchange of its own, and leaves small ones to Horovod's own
                allreduce.
            adagrad: make the combined gradients AdaGrad's updates; `optimizer` is then plain SGD with its learning
                rate. exchange="allgather" is not possible then. With one rank, and outside of the process set, it is
                applied to the rank's own gradients, but not to those of local variables.

        Raises:
            ValueError: a setting out of its range.
            TypeError: `compression` is no compressor, `adagrad` no AdaGrad, or `optimizer` no Keras optimizer.
            UnsupportedError: another `op`, an optimizer that is distributed already; `adagrad` with `Auto` or with
                exchange="allgather"; `Auto` with a parameter server; in an elastic run with a compressor, a process set
                or messages of MPI.

        Example, on one rank::

            import hvd_compress.keras as hvd
            from hvd_compress import Adaptive

            hvd.init()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=Adaptive(pi=64))
            model.compile(optimizer, "sparse_categorical_crossentropy")
        """
        groups = num_groups if num_groups and groups is None else groups
        compression = resolved(self._edge.none if compression is None else compression, exchange)
        settings = {
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "op": self._edge.average_op if op is None else op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "process_set": self._edge.all_ranks if process_set is None else process_set,
            "exchange": exchange_of(adagrad, exchange, compression, carries=True),
            "adagrad": adagrad,
            "min_numel": min_numel,
            "bucket_bytes": bucket_bytes,
            "device_dense": device_dense,
            "device_sparse": device_sparse,
        }
        self._edge.check(backward_passes_per_step=backward_passes_per_step, groups=groups, **settings)
        return wrap(
            optimizer, self._edge, settings, groups, backward_passes_per_step, average_aggregated_gradients,
            scale_local_gradients,
        )  # fmt: skip

    def PartialDistributedOptimizer(
        self, optimizer: Any, *arguments: Any, local_layers: Any = None, **settings: Any
    ) -> Any:
        """`DistributedOptimizer` that leaves the weights of some layers, built already, to each rank.

        Args:
            optimizer: to wrap.
            arguments: of `DistributedOptimizer`, in its order.
            local_layers: one Keras layer, or several.
            settings: of `DistributedOptimizer`, by name.

        Raises:
            ValueError: `local_layers` are no layers, or not built.
        """
        wrapped = self.DistributedOptimizer(optimizer, *arguments, **settings)
        for variable in local_variables(local_layers):
            # what a LossScaleOptimizer of Keras 2 holds
            distributed(wrapped).register_local_var(variable)
        return wrapped

    def DASO(self, optimizer: Any, ranks_per_node: int | None = None, **settings: Any) -> Any:
        """`DistributedOptimizer` that combines gradients inside of a node; `callbacks.DASOCallback` does the rest.

        Source: Coquelin et al., DASO (2021), figure 2. Start Horovod with
        `hvd.init(process_sets=hvd.daso_process_sets())`. All ranks must call this.

        Args:
            optimizer: to wrap.
            ranks_per_node: counted from rank 0 on; by default nodes are the hosts that Horovod reports.
            settings: of `DistributedOptimizer`, by name.

        Raises:
            ValueError: a setting out of its range.
            UnsupportedError: a process set is missing.
        """
        return self.DistributedOptimizer(
            optimizer, process_set=self._edge.nodes.sets(ranks_per_node).within, **settings
        )

    def daso_process_sets(self, ranks_per_node: int | None = None, size: int | None = None) -> list[Any]:
        """The process sets that `DASO` needs, for `hvd.init(process_sets=...)`.

        Args:
            ranks_per_node: as given to `DASO`; by default what the launcher says of this host.
            size: number of ranks; by default what the launcher says.

        Raises:
            UnsupportedError: the launcher does not say it.
            ValueError: the number of ranks is not a multiple of `ranks_per_node`. Where hosts differ, use
                `hvd.init(process_sets="dynamic")`.
        """
        return self._edge.nodes.process_sets(ranks_per_node, size)

    def load_model(
        self,
        filepath: str | os.PathLike[str],
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Any = None,
        legacy_opts: bool = False,
        **settings: Any,
    ) -> Any:
        """Load a saved Keras model; its optimizer is wrapped again, with the state that was saved.

        Args:
            filepath: of the model.
            custom_optimizers: optimizer classes that Keras does not know.
            custom_objects: other names that the model needs.
            compression: see `DistributedOptimizer`.
            legacy_opts: Horovod's; the saved model says itself which optimizer it has.
            settings: other arguments of `DistributedOptimizer`.
        """
        objects = {**{cls.__name__: cls for cls in custom_optimizers or ()}, **(custom_objects or {})}
        model = self._keras.models.load_model(filepath, custom_objects=objects)
        optimizer = getattr(model, "optimizer", None)
        if distributed(optimizer) is not None and compression is None and not settings:
            # a CompressedAdam, which has saved what it was told
            return model
        if optimizer is not None:
            # what was saved names the plain optimizer; compile anew, with its state
            # `utils`, since tf.keras of Keras 3 has no `saving`
            config = self._keras.utils.deserialize_keras_object(model.get_compile_config(), custom_objects=objects)
            wrapped = self.DistributedOptimizer(optimizer, compression=compression, **settings)
            model.compile(**{**config, "optimizer": wrapped})
        return model

    def broadcast_global_variables(self, root_rank: int) -> None:
        """Do what Horovod's function does, for TensorFlow 1.

        Raises:
            RuntimeError: always, as Horovod's does where there are no global variables.
        """
        raise RuntimeError(
            "there are no global variables: use hvd.callbacks.BroadcastGlobalVariablesCallback"
            f"({root_rank}) under fit, or hvd.broadcast_variables"
        )

    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: Any = None,
        compression: Any = None,
    ) -> Any:
        """Average or sum a value that can be made a tensor over all ranks; see `allreduce` of the backend's module."""
        compression = self._edge.none if compression is None else compression
        return self._edge.allreduce(
            value, average=average, name=name, compression=compression, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )  # fmt: skip

    def allgather(self, value: Any, name: str | None = None) -> Any:
        """Concatenate the values of all ranks, which can be made tensors, along the first axis."""
        return self._edge.allgather(value, name)

    def broadcast(self, value: Any, root_rank: int, name: str | None = None) -> Any:
        """The value of one rank, as a tensor."""
        return self._edge.broadcast_value(value, root_rank, name)

    def reducescatter(self, value: Any, name: str | None = None, op: Any = None) -> Any:
        """This rank's share, along the first axis, of the average or sum of values that can be made tensors."""
        return self._edge.reducescatter(value, name, self._edge.average_op if op is None else op)
