"""Weights of the topologies, and who is whose neighbour."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest

from hvd_compress import Exponential, FullyConnected, Graph, Ring
from hvd_compress.topology import Topology, _period, _steps


@pytest.mark.parametrize("topology", [Ring(), FullyConnected(), Exponential()])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 17])
def test_weights_are_doubly_stochastic_and_averaging_reaches_the_mean(topology, size):
    weights = topology.matrix(size)
    assert np.allclose(weights.sum(axis=0), 1)
    assert np.allclose(weights.sum(axis=1), 1)
    assert (weights >= 0).all()
    assert np.allclose(np.linalg.matrix_power(weights, 400), 1 / size, atol=1e-3)
    assert len(topology.neighbours(size)) == size


def test_of_two_ranks_each_is_one_neighbour():
    first, second = Ring().neighbours(2)
    assert (first.senders, first.receivers, first.weights) == ((1,), (1,), (0.5,))
    assert second.senders == (0,)


def test_one_rank_has_no_neighbours():
    (alone,) = Ring().neighbours(1)
    assert (alone.senders, alone.receivers, alone.reach) == ((), (), 0)


def test_ring_of_four():
    part = Ring().neighbours(4)[0]
    assert part.senders == part.receivers == (1, 3)
    assert part.weights == (1 / 3, 1 / 3)
    assert part.reach >= 2


def test_news_reaches_all_in_so_many_steps():
    for topology, size in [(Exponential(), 13), (Ring(), 9), (Graph(nx.lollipop_graph(5, 6)), 11)]:
        steps = (topology.matrix(size) > 0).astype(int)
        reach = topology.neighbours(size)[0].reach
        assert (np.linalg.matrix_power(steps, reach) > 0).all()


def test_exponential_is_directed():
    part = Exponential().neighbours(8)[0]
    assert part.senders == (4, 6, 7)
    assert part.receivers == (1, 2, 4)


def test_senders_and_receivers_belong_together():
    for topology, size in [(Exponential(), 13), (Graph(nx.star_graph(6)), 7)]:
        parts = topology.neighbours(size)
        messages = {(s, p.position) for p in parts for s in p.senders}
        assert messages == {(p.position, r) for p in parts for r in p.receivers}


def test_metropolis_hastings_of_any_connected_graph():
    graph = nx.barabasi_albert_graph(12, 2, seed=3)
    weights = Graph(graph).matrix(12)
    assert np.allclose(weights, weights.T)
    assert np.allclose(weights.sum(axis=0), 1)
    degrees = dict(graph.degree)
    for a, b in graph.edges:
        assert weights[a, b] == pytest.approx(1 / (1 + max(degrees[a], degrees[b])))
    Graph(graph).neighbours(12)


def test_weights_of_edges_are_taken_and_their_direction_is_that_of_messages():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 2, 0.25), (2, 0, 0.25)])
    parts = Graph(graph).neighbours(3)
    assert parts[1].senders == (0,)
    assert parts[0].receivers == (1,)
    assert parts[1].weights == (0.25,)


def _directed(*edges):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(3))
    graph.add_weighted_edges_from(edges)
    return graph


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (nx.MultiGraph([(0, 1)]), "several edges"),
        (nx.Graph([(1, 2)]), r"nodes must be the ranks 0 to 1, got \[1, 2\]"),
        (nx.DiGraph([(0, 1), (1, 0)]), 'needs the attribute "weight"'),
        (nx.Graph([(0, 1, {"weight": 0.5}), (1, 2)]), "some have none"),
    ],
)
def test_graphs_that_say_too_little_are_refused(graph, told):
    with pytest.raises(ValueError, match=told):
        Graph(graph)


@pytest.mark.parametrize(
    ("graph", "size", "told"),
    [
        (nx.Graph([(0, 1), (2, 3)]), 4, r"ranks \[2, 3\] are not reached"),
        (_directed((0, 1, 0.5), (1, 2, 0.25), (2, 0, 0.25)), 3, "values of rank 0 sum to 1.25"),
        (_directed((0, 1, 1.5), (1, 2, 1.5), (2, 0, 1.5)), 3, "weight of rank 0 on rank 0 is -0.5"),
        (nx.path_graph(3), 4, "given to 4 ranks"),
        (nx.Graph([(0, 1, {"weight": 1.0})]), 2, "go round for ever"),
    ],
)
def test_weights_that_do_not_average_are_refused(graph, size, told):
    with pytest.raises(ValueError, match=told):
        Graph(graph).neighbours(size)


def test_a_topology_of_ones_own_is_checked():
    class Broken(Topology):
        id = "broken"

        def matrix(self, size):
            return np.eye(size + 1)

    with pytest.raises(ValueError, match=r"weights of shape \(4, 4\) for 3 ranks"):
        Broken().neighbours(3)


def test_settings_of_ones_own_are_compared():
    @dataclass(frozen=True)
    class Steps(Topology):
        rows: int = 2
        id = "steps"

        def matrix(self, size):
            return FullyConnected().matrix(size)

    assert [Steps(rows).get_config() for rows in (2, 3)] == [{"id": "steps", "rows": rows} for rows in (2, 3)]


def test_configs_differ_with_the_weights():
    one, other = Graph(nx.path_graph(4)), Graph(nx.cycle_graph(4))
    assert one.get_config() != other.get_config()
    assert one.get_config() == Graph(nx.path_graph(4)).get_config()


def test_checks_agree_with_networkx():
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(300):
        size = int(rng.integers(2, 8))
        graph = nx.gnp_random_graph(size, rng.uniform(0.1, 0.6), seed=int(rng.integers(1 << 30)), directed=True)
        messages = nx.to_numpy_array(graph, nodelist=range(size)) > 0
        away, back = _steps(messages), _steps(messages.T)
        connected, aperiodic = bool((away >= 0).all() and (back >= 0).all()), None
        assert connected == nx.is_strongly_connected(graph)
        if connected:
            assert away.max() == nx.eccentricity(graph, 0)
            assert back.max() == nx.eccentricity(graph.reverse(), 0)
            aperiodic = _period(messages, away) == 1
            assert aperiodic == nx.is_aperiodic(graph)
        kinds.add((connected, aperiodic))
    assert kinds == {(False, None), (True, True), (True, False)}


def test_topologies_need_no_networkx(monkeypatch):
    path = Graph(nx.path_graph(4))
    monkeypatch.setitem(sys.modules, "networkx", None)
    for topology in (Ring(), FullyConnected(), Exponential(), path):
        assert len(topology.neighbours(4)) == 4


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match="got ndarray; give a networkx Graph or DiGraph"):
        Graph(np.eye(3))
