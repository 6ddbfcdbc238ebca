"""Joins the callbacks of this package with the Keras and the edge that an edge's module is for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hvd_compress._keras import callbacks, compression_callbacks, daso, diloco, elastic, eventgrad
from hvd_compress._keras.adam import compressed_adam
from hvd_compress._keras.edge import Edge
from hvd_compress._keras.interface import Interface

__all__ = ["bound"]

_NO_CALLBACKS = ("ALL_RANKS", "EdgeCallback", "sums_of_passes", "variables_of")

_MIXINS = [
    *(callbacks.__dict__[name] for name in callbacks.__all__ if name not in _NO_CALLBACKS),
    *(compression_callbacks.__dict__[name] for name in compression_callbacks.__all__),
    daso.DASOCallback,
    diloco.DiLoCoCallback,
    eventgrad.EventGraDCallback,
]

_OF_ELASTIC_RUNS = [elastic.CommitStateCallback, elastic.UpdateBatchStateCallback, elastic.UpdateEpochStateCallback]


def bound(keras: Any, edge: Edge, module: str) -> dict[str, Any]:
    """What an edge's module named `module` has of its own: functions; an optimizer; two modules, importable too."""
    interface = Interface(edge, keras)
    functions = {name: getattr(interface, name) for name in dir(interface) if not name.startswith("_")}
    submodules = {"callbacks": _bound_callbacks, "elastic": _bound_elastic}
    made = {name: bind(keras, edge, f"{module}.{name}") for name, bind in submodules.items()}
    sys.modules.update({f"{module}.{name}": submodule for name, submodule in made.items()})
    return {**functions, "CompressedAdam": compressed_adam(keras, edge, module), **made}


def _joined(mixins: Sequence[type], base: type, edge: Edge, module: str) -> dict[str, type]:
    """Subclasses of `base`, each with one of the mixins before it, by their names."""
    return {
        mixin.__name__: type(
            mixin.__name__, (mixin, base), {"edge": edge, "__doc__": mixin.__doc__, "__module__": module}
        )
        for mixin in mixins
    }


def _bound_elastic(keras: Any, edge: Edge, module: str) -> ModuleType:
    """A module named `module` with what elastic runs need: `run`, a state and its callbacks."""
    made = ModuleType(module, "Elastic runs, whose ranks come and go.")
    made.__dict__.update(_joined(_OF_ELASTIC_RUNS, keras.callbacks.Callback, edge, module))
    made.__dict__.update(_joined([elastic.KerasState], edge.object_state, edge, module))
    made.__dict__.update(run=edge.elastic_run, TensorFlowKerasState=made.__dict__["KerasState"])
    return made


def _bound_callbacks(keras: Any, edge: Edge, module: str) -> ModuleType:
    """A module named `module` with all callbacks, as subclasses of `keras.callbacks.Callback`."""
    made = ModuleType(module, "Callbacks for `fit`: Horovod's, and those that tell of compression.")
    made.__dict__.update(_joined(_MIXINS, keras.callbacks.Callback, edge, module))
    setattr(made, "BestModelCheckpoint", _best_model_checkpoint(keras, module))  # noqa: B010, a module has no such name
    return made


def _best_model_checkpoint(keras: Any, module: str) -> type:
    class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
        """`ModelCheckpoint` that keeps the best model only; every rank of a run would write the same file.

        Args:
            monitor: the metric that decides.
            verbose: 1 prints a line when it saves.
            mode: "min", "max" or "auto".
            save_freq: "epoch", or a number of batches.
            filepath: of the model; Horovod's has none, which Keras 3 does not take.
        """

        def __init__(
            self,
            monitor: str = "val_loss",
            verbose: int = 0,
            mode: str = "auto",
            save_freq: str | int = "epoch",
            filepath: str = "best_model.keras",
        ) -> None:
            super().__init__(
                filepath=filepath, monitor=monitor, verbose=verbose, save_best_only=True, save_weights_only=False,
                mode=mode, save_freq=save_freq,
            )  # fmt: skip

    BestModelCheckpoint.__module__ = module
    BestModelCheckpoint.__qualname__ = "BestModelCheckpoint"
    return BestModelCheckpoint
