"""Gradient compression for Horovod: compressors written once, plugged into PyTorch, TensorFlow and Keras.

Importing this package imports neither a framework nor Horovod. `hvd_compress.torch` is the drop-in for
`horovod.torch`.
"""

from __future__ import annotations

from hvd_compress import errors
from hvd_compress.compressors import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    Compressor,
    EFSignSGD,
    Key,
    Natural,
    NoCompression,
    OneBit,
    Percentile,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    decode,
    from_config,
    register,
)
from hvd_compress.exchange import AdaGrad, AllGather, Exchange, Hierarchical, ParameterServer, TwoPhase
from hvd_compress.policy import Auto, Policy
from hvd_compress.ranks import Ranks
from hvd_compress.schedules import ConstantThreshold, DasoSchedule, SlopeThreshold, Trigger
from hvd_compress.thread_ranks import ThreadRanks
from hvd_compress.topology import Exponential, FullyConnected, Graph, Ring, Topology

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "AdaGrad",
    "Adaptive",
    "AllGather",
    "Auto",
    "Blockwise",
    "ChunkedTopK",
    "Compressor",
    "ConstantThreshold",
    "DasoSchedule",
    "EFSignSGD",
    "Exchange",
    "Exponential",
    "FullyConnected",
    "Graph",
    "Hierarchical",
    "Key",
    "Natural",
    "NoCompression",
    "OneBit",
    "ParameterServer",
    "Percentile",
    "Policy",
    "PowerSGD",
    "RandomK",
    "Ranks",
    "Ring",
    "SignSGD",
    "SlopeThreshold",
    "TernGrad",
    "ThreadRanks",
    "Threshold",
    "TopK",
    "Topology",
    "Trigger",
    "TwoPhase",
    "decode",
    "errors",
    "from_config",
    "register",
]

__version__ = "0.2.0"
