"""Event-triggered averaging with neighbours: one rank's part, on NumPy arrays. Nothing here communicates.

A step of a rank: `Node.decide` what is sent, `Node.write` it, a transport carries the message, `Node.read` those of the
neighbours, and `Node.mix` averages.
"""

from __future__ import annotations

from hvd_compress.gossip.alltoall import Alltoall
from hvd_compress.gossip.averager import Transport
from hvd_compress.gossip.loopback import GossipLoopback
from hvd_compress.gossip.member import GossipMember, LateGossipMember, OneSided
from hvd_compress.gossip.node import Node
from hvd_compress.gossip.settings import GossipSettings
from hvd_compress.tensors import ParameterSpec

__all__ = [
    "Alltoall",
    "GossipLoopback",
    "GossipMember",
    "GossipSettings",
    "LateGossipMember",
    "Node",
    "OneSided",
    "ParameterSpec",
    "Transport",
]
