"""Say which ranks are neighbours, and with which weights they average.

A topology turns a number of ranks into a doubly stochastic matrix W: `W[i, j]` is the weight of rank j's values on rank
i, rows and columns sum to one, and every rank is reached from every other. Then averaging with neighbours again and
again brings all ranks to the mean (Lian et al., NeurIPS 2017, section 3).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

__all__ = ["ALONE", "Exponential", "FullyConnected", "Graph", "Neighbours", "Ring", "Topology"]

Matrix = npt.NDArray[np.float64]

_TOLERANCE = 1e-9


class Topology(ABC):
    """Base class of topologies, also of your own, which say which ranks are neighbours among any number of ranks.

    A subclass is a frozen dataclass whose fields are the settings, equal on all ranks. It has an `id` and the method
    `matrix`, whose weights keep the mean: every row and every column must sum up to 1. Each rank needs a weight for
    itself, and a path to every other rank.

    Example:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from hvd_compress import Topology
        >>> @dataclass(frozen=True)
        ... class Pairs(Topology):
        ...     own: float = 0.5
        ...     id = "pairs"
        ...     def matrix(self, size):
        ...         other = np.roll(np.eye(size), 1, axis=0)
        ...         return self.own * np.eye(size) + (1 - self.own) * other
        >>> Pairs(0.75).get_config()
        {'id': 'pairs', 'own': 0.75}
        >>> [part.senders for part in Pairs().neighbours(3)]
        [(2,), (0,), (1,)]
    """

    id: ClassVar[str]

    @abstractmethod
    def matrix(self, size: int) -> Matrix:
        """Return the weights among `size` ranks: float64 of shape (size, size)."""

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        own: Any = self
        return {"id": self.id, **(asdict(own) if hasattr(own, "__dataclass_fields__") else {})}

    def neighbours(self, size: int) -> list[Neighbours]:
        """Check the weights among `size` ranks and return the part of each rank.

        Raises:
            ValueError: `size` below 1, or weights that do not bring all ranks to their mean.
        """
        if size < 1:
            raise ValueError(f"{self!r} of {size} ranks: must be at least 1")
        weights = np.array(self.matrix(size), np.float64)
        _check(self, weights, size)
        weights[np.abs(weights) <= _TOLERANCE] = 0
        # messages go from j to i where W[i, j] counts
        messages = (weights != 0).T
        away, back = _steps(messages), _steps(messages.T)
        apart = np.flatnonzero((away < 0) | (back < 0)).tolist()
        if apart:
            raise ValueError(f"{self!r} of {size} ranks: ranks {apart} are not reached from all others")
        if _period(messages, away) > 1:
            raise ValueError(
                f"{self!r} of {size} ranks: values would go round for ever; give ranks a weight of their own"
            )
        # by way of rank 0: the diameter itself would take a search from every rank
        reach = int(away.max() + back.max())
        return [_part_of(weights, rank, reach) for rank in range(size)]


@dataclass(frozen=True)
class Neighbours:
    """Describes one rank's part in a topology.

    Args:
        position: of the rank.
        senders: the ranks whose values this rank takes, in order, without itself.
        weights: of the senders.
        receivers: the ranks that take this rank's values, in order, without itself.
        reach: number of steps after which values of any rank have reached all others; the diameter of the graph or
            more.
    """

    position: int
    senders: tuple[int, ...]
    weights: tuple[float, ...]
    receivers: tuple[int, ...]
    reach: int


ALONE = Neighbours(0, (), (), (), 0)
"""The part of a rank that has no neighbours."""


@dataclass(frozen=True)
class Ring(Topology):
    """Each rank averages with the one before and the one after it, all with equal weights.

    With two ranks, each is the other's only neighbour.

    Example:
        >>> from hvd_compress import Ring
        >>> Ring().matrix(4).round(2).tolist()[0]
        [0.33, 0.33, 0.0, 0.33]
    """

    id: ClassVar[str] = "ring"

    def matrix(self, size: int) -> Matrix:
        """The weights among `size` ranks."""
        return _circulant(size, {0, 1, size - 1})


@dataclass(frozen=True)
class FullyConnected(Topology):
    """Every rank averages with all others, with equal weights.

    Example:
        >>> from hvd_compress import FullyConnected
        >>> FullyConnected().matrix(4).tolist()[0]
        [0.25, 0.25, 0.25, 0.25]
    """

    id: ClassVar[str] = "fully_connected"

    def matrix(self, size: int) -> Matrix:
        """The weights among `size` ranks."""
        return np.full((size, size), 1.0 / size)


@dataclass(frozen=True)
class Exponential(Topology):
    """Each rank averages with those 1, 2, 4, 8, … places before it, all weights equal: few messages, quick consensus.

    Source: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training (NeurIPS 2021), the
    static graph.

    Example:
        >>> from hvd_compress import Exponential
        >>> Exponential().neighbours(8)[0].senders
        (4, 6, 7)
    """

    id: ClassVar[str] = "exponential"

    def matrix(self, size: int) -> Matrix:
        """The weights among `size` ranks."""
        return _circulant(size, {0, *(size - 2**k for k in range(size.bit_length()) if 2**k < size)})


class Graph(Topology):
    """Takes the neighbours from any networkx graph whose nodes are the ranks 0, 1, 2, ….

    An edge's attribute "weight" gives its weight, and a rank's own weight is what is missing to 1. An edge of a
    directed graph points from the sender to the receiver. Without that attribute an undirected graph gets the weights
    of Metropolis and Hastings, 1 / (1 + larger degree of the two), which suit every graph (Xiao, Boyd and Kim, 2007).

    Args:
        graph: networkx Graph or DiGraph.

    Raises:
        TypeError: `graph` is no networkx graph.
        ValueError: nodes are not 0, 1, 2, …; a MultiGraph; a directed graph, or only some edges, without weights.

    Example:
        >>> import networkx as nx
        >>> from hvd_compress import Graph
        >>> Graph(nx.star_graph(3)).matrix(4)[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    id: ClassVar[str] = "graph"

    def __init__(self, graph: Any) -> None:
        if not hasattr(graph, "is_multigraph"):
            raise TypeError(
                f"Graph: got {type(graph).__name__}; give a networkx Graph or DiGraph (pip install networkx)"
            )
        if graph.is_multigraph():
            raise ValueError("Graph: several edges between two ranks; give a Graph or a DiGraph")
        size = graph.number_of_nodes()
        if set(graph.nodes) != set(range(size)):
            raise ValueError(f"Graph: nodes must be the ranks 0 to {size - 1}, got {sorted(graph.nodes, key=str)}")
        edges = [(a, b, data.get("weight")) for a, b, data in graph.edges(data=True) if a != b]
        weighted = [weight is not None for *_, weight in edges]
        if any(weighted) != all(weighted):
            raise ValueError('Graph: some edges have a "weight" and some have none; give it to all or to none')
        if edges and not any(weighted) and graph.is_directed():
            raise ValueError('Graph: a directed graph needs the attribute "weight" on its edges')
        self._matrix = np.zeros((size, size))
        degrees = {node: len(set(graph.neighbors(node)) - {node}) for node in graph.nodes}
        for a, b, weight in edges:
            share = 1.0 / (1 + max(degrees[a], degrees[b])) if weight is None else float(weight)
            self._matrix[b, a] = share
            if not graph.is_directed():
                self._matrix[a, b] = share
        np.fill_diagonal(self._matrix, 1.0 - self._matrix.sum(axis=1))

    def __repr__(self) -> str:
        return f"Graph({len(self._matrix)} ranks, {int((self._matrix != 0).sum() - len(self._matrix))} messages a step)"

    def matrix(self, size: int) -> Matrix:
        """Return the weights; `size` must be the number of nodes."""
        if size != len(self._matrix):
            raise ValueError(f"{self!r} was given to {size} ranks; it needs a node for each")
        return self._matrix.copy()

    def get_config(self) -> dict[str, Any]:
        """Return a digest of the weights, which ranks compare."""
        return {"id": self.id, "weights": hashlib.sha256(self._matrix.tobytes()).hexdigest()[:16]}


def _circulant(size: int, offsets: set[int]) -> Matrix:
    """Make equal weights for the ranks at these offsets after each rank."""
    distinct = {offset % size for offset in offsets}
    weights = np.zeros((size, size))
    for rank in range(size):
        for offset in distinct:
            weights[rank, (rank + offset) % size] = 1.0 / len(distinct)
    return weights


def _check(topology: Topology, weights: Matrix, size: int) -> None:
    if weights.shape != (size, size):
        raise ValueError(f"{topology!r}: weights of shape {weights.shape} for {size} ranks, must be {(size, size)}")
    if not (np.isfinite(weights).all() and (weights >= -_TOLERANCE).all()):
        row, column = np.argwhere(~(weights >= -_TOLERANCE) | ~np.isfinite(weights))[0].tolist()
        raise ValueError(
            f"{topology!r}: the weight of rank {column} on rank {row} is {weights[row, column]:g}, must be 0 or more"
        )
    for axis, sums in (("values of", weights.sum(axis=0)), ("values on", weights.sum(axis=1))):
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > _TOLERANCE:
            raise ValueError(
                f"{topology!r}: the weights of the {axis} rank {worst} sum to {sums[worst]:g}, must be 1: "
                "else the mean of the ranks would drift"
            )


def _steps(messages: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Count the steps until news of rank 0 has come to each rank; -1 where it never comes."""
    steps = np.full(len(messages), -1, np.int64)
    front = np.arange(len(messages)) == 0
    step = 0
    while front.any():
        steps[front] = step
        step += 1
        front = messages[front].any(axis=0) & (steps < 0)
    return steps


def _period(messages: npt.NDArray[np.bool_], steps: npt.NDArray[np.int64]) -> int:
    """Find what divides the length of every cycle, given that every rank is reached; above 1, values go round."""
    senders, receivers = np.nonzero(messages)
    return int(np.gcd.reduce(steps[senders] + 1 - steps[receivers]))


def _part_of(weights: Matrix, rank: int, reach: int) -> Neighbours:
    others = [other for other in range(len(weights)) if other != rank]
    senders = tuple(other for other in others if weights[rank, other] > 0)
    receivers = tuple(other for other in others if weights[other, rank] > 0)
    return Neighbours(rank, senders, tuple(float(weights[rank, s]) for s in senders), receivers, reach)
