"""Drop-in for `horovod.keras`, for Keras 3 on the TensorFlow and on the torch backend.

Example, `KERAS_BACKEND=torch horovodrun -np 4 python train.py`::

    import hvd_compress.keras as hvd  # was: import horovod.keras as hvd
    from hvd_compress import Adaptive

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=Adaptive(pi=64)), "mse")
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvd_compress._keras.binding import bound
from hvd_compress.errors import UnsupportedError
from hvd_compress.missing import missing_keras

try:
    import keras
except ImportError as error:
    raise missing_keras(error) from error

# of the backend that Keras runs on, and of no other: (the package for it, what Keras asks of that)
_EDGES = {
    "tensorflow": ("hvd_compress.tensorflow", "hvd_compress.tensorflow.keras._edge"),
    "torch": ("hvd_compress.torch", "hvd_compress.torch._keras_edge"),
}
if keras.backend.backend() not in _EDGES:
    raise UnsupportedError(
        f"Keras runs on the {keras.backend.backend()} backend, which Horovod does not know: set "
        "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before importing Keras"
    )
_framework = import_module(_EDGES[keras.backend.backend()][0])
_edge = import_module(_EDGES[keras.backend.backend()][1]).EDGE

# what horovod.keras takes from horovod.tensorflow
_OF_HOROVOD = [
    "Adasum", "Average", "Compression", "Sum", "ProcessSet", "add_process_set", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_initialized",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank",
    "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip
globals().update({name: getattr(_framework, name) for name in _OF_HOROVOD})

# those that an edge of Keras has of its own, in the place of Horovod's
_OWN = bound(keras, _edge, __name__)
globals().update(_OWN)

__all__ = [*_OF_HOROVOD, *_OWN]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
