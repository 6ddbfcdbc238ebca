"""Drop-in for `horovod.tensorflow.keras`, for Keras 2 and Keras 3 on TensorFlow.

Example::

    import hvd_compress.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
    from hvd_compress import Adaptive

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=Adaptive(pi=64)), "mse")
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_compress.missing import missing_keras

try:
    import horovod.tensorflow.keras
except ImportError as error:
    raise missing_keras(error) from error

# every public name of horovod.tensorflow.keras; those below take the place of Horovod's
from horovod.tensorflow.keras import *  # noqa: F403
from tensorflow import keras

from hvd_compress._keras.binding import bound
from hvd_compress.submodules import offer
from hvd_compress.tensorflow.compression import Compression
from hvd_compress.tensorflow.keras._edge import EDGE

# those that an edge of Keras has of its own, in the place of Horovod's
_OWN = bound(keras, EDGE, __name__)
globals().update(_OWN)
offer(__name__, "horovod.tensorflow.keras")
# this one has imported more of it
offer("hvd_compress.tensorflow", "horovod.tensorflow")

__all__ = [
    *(name for name in dir(horovod.tensorflow.keras) if not name.startswith("_")),
    "Compression",
    *_OWN,
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
