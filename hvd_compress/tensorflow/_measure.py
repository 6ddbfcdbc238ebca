"""The network and the machine as `Auto` sees them: Horovod's own collectives in a process set, timed, and kernels."""

from __future__ import annotations

from functools import cache

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.cost import HorovodCollectives, Network, measure_network
from hvd_compress.exchange import Hosts

__all__ = ["collectives_of", "network_of"]


def collectives_of(process_set: hvd.ProcessSet) -> HorovodCollectives:
    """Collectives among the ranks of a process set."""
    return HorovodCollectives(hvd, tf.constant, process_set.size(), process_set=process_set)


def network_of(process_set: hvd.ProcessSet, with_hosts: bool) -> Network:
    """What collectives take among these ranks, equal on all of them; measured once in a process, a few seconds."""
    return _network(process_set.process_set_id, with_hosts, process_set)


@cache
def _network(_: int, with_hosts: bool, process_set: hvd.ProcessSet) -> Network:
    collectives = collectives_of(process_set)
    hosts = Hosts.of_names(collectives.host_numbers()) if with_hosts else None
    return measure_network(collectives, hosts, process_set.rank())
