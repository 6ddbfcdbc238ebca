"""Nodes that train on their own and average their parameters now and then: one rank's part, on NumPy arrays.

Inside a node ranks average gradients, which is up to the edges. Between nodes a `DasoMember` asks its clock after each
batch what is due, and its `Merging` sends a snapshot, waits for what comes back and merges it. How that goes between
nodes, and is shared in a node, is up to `hvd_compress.averaging`.
"""

from __future__ import annotations

from hvd_compress.averaging import Groups, Nodes
from hvd_compress.daso.loss import number_of
from hvd_compress.daso.member import DasoMember
from hvd_compress.daso.settings import DasoSettings

__all__ = ["DasoMember", "DasoSettings", "Groups", "Nodes", "number_of"]
