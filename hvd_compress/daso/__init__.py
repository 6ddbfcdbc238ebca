"""Nodes that train on their own and average their parameters now and then: one rank's part, on NumPy arrays.

Inside a node ranks average gradients, which is up to the edges. Between nodes a `Member` asks its clock after each
batch what is due, and its `NodeSync` sends a snapshot, waits for what comes back, shares it in the node and merges it.
What carries arrays between ranks is `hvd_compress.ranks.Ranks`.
"""

from __future__ import annotations

from hvd_compress.daso.groups import Groups
from hvd_compress.daso.loss import number_of
from hvd_compress.daso.member import Member
from hvd_compress.daso.nodes import Nodes
from hvd_compress.daso.settings import DasoSettings

__all__ = ["DasoSettings", "Groups", "Member", "Nodes", "number_of"]
