"""Run N ranks of event-triggered averaging in one process, for tests and for teaching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import NoCompression
from hvd_compress.gossip.settings import GossipSettings
from hvd_compress.schedules import Trigger
from hvd_compress.tensors import ParameterSpec
from hvd_compress.topology import Ring, Topology

__all__ = ["GossipLoopback"]

Array = npt.NDArray[Any]


class GossipLoopback:
    """Simulated ranks that average with their neighbours, with the same code as real ones.

    Args:
        tensors: of each rank.
        ranks: how many.
        trigger: of all ranks.
        topology: of the ranks.
        compression: see `EventGraDOptimizer`, as all further arguments.
        mixing: as there.
        consensus_rate: as there.
        traced: as there.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import ConstantThreshold
        >>> from hvd_compress.gossip import GossipLoopback, ParameterSpec
        >>> ranks = GossipLoopback([ParameterSpec("w", (2,))], 2, ConstantThreshold(0))
        >>> values = [[np.full(2, rank, np.float32)] for rank in range(2)]
        >>> ranks.step(values)
        >>> values[0][0]
        array([0.5, 0.5], dtype=float32)
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        ranks: int,
        trigger: Trigger,
        topology: Topology = Ring(),
        compression: Any = NoCompression(),
        mixing: str = "auto",
        consensus_rate: float | None = None,
        traced: bool = False,
    ) -> None:
        settings = GossipSettings(
            trigger, topology, compression=compression, mixing=mixing, rate=consensus_rate, traced=traced
        )
        self.nodes = [settings.node(tensors, part) for part in topology.neighbours(ranks)]
        self._started = False

    def step(self, arrays: Sequence[Sequence[Array]]) -> None:
        """Run one pass of all ranks.

        Args:
            arrays: of each rank, flat, in the order of the tensors; averaged in place.
        """
        if not self._started:
            for node, own in zip(self.nodes, arrays, strict=True):
                node.start_from(own)
            self._started = True
        messages = []
        for node, own in zip(self.nodes, arrays, strict=True):
            sent = np.flatnonzero(node.decide(own))
            buffer = np.empty(node.capacity, np.uint8)
            message = buffer[: node.write(own, buffer)]
            node.count_sent(sent, message, len(node.part.receivers))
            messages.append(message)
        for node, own in zip(self.nodes, arrays, strict=True):
            for index, sender in enumerate(node.part.senders):
                node.read(index, messages[sender])
            node.mix(own)
