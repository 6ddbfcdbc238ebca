"""Drop-in for `horovod.tensorflow.keras`, for Keras 2 and Keras 3 on TensorFlow.

Example::

    import hvd_compress.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
    from hvd_compress import Adaptive

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=Adaptive(pi=64)), "mse")
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import horovod.tensorflow.keras

# every public name of horovod.tensorflow.keras; those below take the place of Horovod's
from horovod.tensorflow.keras import *  # noqa: F403
from tensorflow import keras

from hvd_compress._keras.binding import bound_callbacks
from hvd_compress._keras.interface import Interface
from hvd_compress.tensorflow.compression import Compression
from hvd_compress.tensorflow.keras._link import LINK

_interface = Interface(LINK, keras)
DistributedOptimizer = _interface.DistributedOptimizer
PartialDistributedOptimizer = _interface.PartialDistributedOptimizer
allgather = _interface.allgather
allreduce = _interface.allreduce
broadcast = _interface.broadcast
broadcast_global_variables = _interface.broadcast_global_variables
load_model = _interface.load_model
reducescatter = _interface.reducescatter
callbacks = sys.modules[f"{__name__}.callbacks"] = bound_callbacks(keras, LINK, f"{__name__}.callbacks")

__all__ = [
    *(name for name in dir(horovod.tensorflow.keras) if not name.startswith("_")),
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "load_model",
    "reducescatter",
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
