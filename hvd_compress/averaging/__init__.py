"""Average parameters between nodes, as it is or as the change since the last time: one rank's part, on NumPy arrays.

What is due when, and what is done with a mean that has arrived, is up to those who use it: `daso` and `diloco`. What
carries arrays between ranks is `hvd_compress.ranks.Ranks`.
"""

from __future__ import annotations

from hvd_compress.averaging.flat_tensors import Array, FlatTensors, Share, kept_at
from hvd_compress.averaging.groups import Groups
from hvd_compress.averaging.meeting import Meeting
from hvd_compress.averaging.node_sync import CHANGES, FORMS, VALUES, Arrived, NodeSync
from hvd_compress.averaging.nodes import Nodes
from hvd_compress.averaging.states import own_state

__all__ = [
    "CHANGES",
    "FORMS",
    "VALUES",
    "Array",
    "Arrived",
    "FlatTensors",
    "Groups",
    "Meeting",
    "NodeSync",
    "Nodes",
    "Share",
    "kept_at",
    "own_state",
]
