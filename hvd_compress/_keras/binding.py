"""Joins the callbacks of this package with the Keras and the edge that an edge's module is for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from hvd_compress._keras import callbacks, compression_callbacks, daso, eventgrad
from hvd_compress._keras.interface import Interface
from hvd_compress._keras.link import Link

__all__ = ["bound"]

_MIXINS = [
    *(callbacks.__dict__[name] for name in callbacks.__all__ if name not in ("ALL_RANKS", "LinkedCallback")),
    *(compression_callbacks.__dict__[name] for name in compression_callbacks.__all__),
    daso.DASOCallback,
    eventgrad.EventGraDCallback,
]


def bound(keras: Any, link: Link, module: str) -> dict[str, Any]:
    """What an edge's module named `module` has of its own: functions, and the module `callbacks`, importable too."""
    interface = Interface(link, keras)
    functions = {name: getattr(interface, name) for name in dir(interface) if not name.startswith("_")}
    callbacks = sys.modules[f"{module}.callbacks"] = _bound_callbacks(keras, link, f"{module}.callbacks")
    return {**functions, "callbacks": callbacks}


def _bound_callbacks(keras: Any, link: Link, module: str) -> ModuleType:
    """A module named `module` with all callbacks, as subclasses of `keras.callbacks.Callback`."""
    made = ModuleType(module, "Callbacks for `fit`: Horovod's, and those that tell of compression.")
    for mixin in _MIXINS:
        body = {"link": link, "__doc__": mixin.__doc__, "__module__": module}
        setattr(made, mixin.__name__, type(mixin.__name__, (mixin, keras.callbacks.Callback), body))
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
