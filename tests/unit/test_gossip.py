"""Averaging with neighbours in one process, against loops typed from the papers."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    ConstantThreshold,
    Exponential,
    FullyConnected,
    Graph,
    NoCompression,
    OneBit,
    Percentile,
    Policy,
    Ring,
    SlopeThreshold,
    Threshold,
    TopK,
)
from hvd_compress.errors import StateError, UnsupportedError, WireError
from hvd_compress.gossip import GossipLoopback, GossipSettings, Node, ParameterSpec
from hvd_compress.gossip.stats import GossipTally
from tests.outsider import RelativeThreshold, Star

TENSORS = [
    ParameterSpec("w", (40, 30)),
    ParameterSpec("b", (40,)),
    ParameterSpec("v", (3, 5, 7), "float64"),
    ParameterSpec("s", ()),
]
LOSSY = [OneBit(), Threshold(0.01), Adaptive(pi=8), TopK(0.05), Percentile(90), QSGD(bits=4), FP16(), BF16()]


def values(ranks, seed=0):
    """Parameters of each rank, all different."""
    random = np.random.default_rng(seed)
    return [[random.normal(size=t.numel).astype(t.dtype) for t in TENSORS] for _ in range(ranks)]


def gradients(ranks, step):
    return values(ranks, seed=1000 + step)


def train(group, arrays, steps, rate=0.05, begin=0):
    for step in range(begin, begin + steps):
        group.step(arrays)
        for own, grads in zip(arrays, gradients(len(arrays), step), strict=True):
            for x, g in zip(own, grads, strict=True):
                x -= x.dtype.type(rate) * g


def d_psgd(weights, arrays, steps, rate=0.05):
    """Lian et al. 2017, algorithm 1: x_i <- x_i + sum_j W_ij (x_j - x_i) - rate g_i, neighbours in their order."""
    for step in range(steps):
        before = [[x.copy() for x in own] for own in arrays]
        for i, (own, grads) in enumerate(zip(arrays, gradients(len(arrays), step), strict=True)):
            for t, (x, g) in enumerate(zip(own, grads, strict=True)):
                total = np.zeros_like(x)
                for j in np.flatnonzero(weights[i]):
                    if j != i:
                        total = total + x.dtype.type(weights[i, j]) * (before[j][t] - before[i][t])
                x[...] = before[i][t] + total
                x -= x.dtype.type(rate) * g


def mean(arrays):
    return [np.mean([own[t].astype(np.float64) for own in arrays], axis=0) for t in range(len(TENSORS))]


@pytest.mark.parametrize("topology", [Ring(), FullyConnected(), Exponential(), Graph(nx.star_graph(4))])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_threshold_zero_is_decentralized_sgd_bit_for_bit(topology, ranks):
    if isinstance(topology, Graph) and ranks != 5:
        topology = Graph(nx.star_graph(ranks - 1))
    ours, theirs = values(ranks), values(ranks)
    train(GossipLoopback(TENSORS, ranks, ConstantThreshold(0), topology), ours, 20)
    d_psgd(topology.matrix(ranks), theirs, 20)
    for own, expected in zip(ours, theirs, strict=True):
        for x, y in zip(own, expected, strict=True):
            assert x.tobytes() == y.tobytes()


def test_where_all_agree_averaging_changes_nothing():
    arrays = [[x.copy() for x in values(1)[0]] for _ in range(5)]
    group = GossipLoopback(TENSORS, 5, ConstantThreshold(0))
    for _ in range(100):
        group.step(arrays)
    for own in arrays:
        for x, y in zip(own, values(1)[0], strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(
    ("compressor", "rate"),
    [
        (NoCompression(), 1.0),
        (OneBit(), 0.3),
        (TopK(0.05), 0.05),
        pytest.param(Percentile(95), 0.05, marks=pytest.mark.thorough),
        pytest.param(QSGD(bits=4), 0.3, marks=pytest.mark.thorough),
    ],
)
def test_mean_preserving_mixing_keeps_the_mean_over_a_thousand_steps(compressor, rate):
    arrays = values(4)
    group = GossipLoopback(
        TENSORS, 4, SlopeThreshold(), compression=compressor, mixing="mean_preserving", consensus_rate=rate
    )
    before = mean(arrays)
    for step in range(1000):
        group.step(arrays)
        # changes whose sum over ranks is zero in float32 too: events, but no drift
        for own, sign in zip(arrays, (1, -1, 2, -2), strict=True):
            for t, x in enumerate(own):
                x += x.dtype.type(sign * 2.0**-8 * (1 if (step // 7 + t) % 2 else -1))
    for x, y in zip(mean(arrays), before, strict=True):
        assert np.abs(x - y).max() < 2e-5


def test_stale_mixing_moves_the_mean():
    arrays = values(4)
    group = GossipLoopback(TENSORS, 4, ConstantThreshold(1e6))
    group.step(arrays)
    for x in arrays[0]:
        # too little for an event, so the others never hear of it
        x += 1
    moved = mean(arrays)
    for _ in range(20):
        group.step(arrays)
    assert all(np.abs(x - y).max() > 0.2 for x, y in zip(mean(arrays), moved, strict=True))


@pytest.mark.parametrize("compressor", LOSSY, ids=lambda c: c.id)
def test_receivers_hold_what_the_sender_thinks_they_do(compressor):
    ranks = 3
    arrays = values(ranks)
    group = GossipLoopback(TENSORS, ranks, SlopeThreshold(), compression=compressor)
    train(group, arrays, 30)
    for node in group.nodes:
        for slot, sender in enumerate(node.part.senders):
            for t in range(len(TENSORS)):
                own = group.nodes[sender].copies.own[t]
                if own is not None:
                    assert node.copies.of_senders[t][slot].tobytes() == own.tobytes()
    assert group.nodes[0].copies.own[0] is not None


@pytest.mark.parametrize("compressor", LOSSY, ids=lambda c: c.id)
def test_nothing_is_lost_what_was_left_out_arrives_later(compressor):
    arrays = values(2)
    group = GossipLoopback(TENSORS, 2, ConstantThreshold(0), compression=compressor)
    group.step(arrays)
    target = values(2, seed=5)
    for _ in range(400):
        for own, wanted in zip(arrays, target, strict=True):
            for x, y in zip(own, wanted, strict=True):
                x[...] = y
        group.step(arrays)
    copy = group.nodes[1].copies.of_senders[0][0]
    # threshold leaves out for ever what is below its tau
    assert np.linalg.norm(copy - target[0][0]) < 0.02 * np.linalg.norm(target[0][0])


def test_compressed_messages_are_small():
    arrays = values(4)
    group = GossipLoopback(TENSORS, 4, ConstantThreshold(0), compression=OneBit())
    train(group, arrays, 50)
    report = group.nodes[0].report()
    assert report["total"]["messages_percent"] == 100
    assert report["tensors"]["w"]["bytes_percent"] < 20


def test_messages_and_bytes_are_counted():
    arrays = values(4)
    group = GossipLoopback(TENSORS, 4, ConstantThreshold(1e6), traced=True)
    for _ in range(10):
        group.step(arrays)
    report = group.nodes[0].report()
    raw = [40 + (t.numel * np.dtype(t.dtype).itemsize + 7) // 8 * 8 for t in TENSORS]
    total = report["total"]
    assert (total["passes"], total["messages"], total["messages_always"]) == (10, 8, 80)
    assert total["bytes"] == 2 * (sum(raw) + 10 * 48)
    assert total["bytes_always"] == 2 * 10 * (sum(raw) + 48)
    assert report["tensors"]["b"]["bytes"] == 2 * raw[1]
    assert report["trace"]["norms"].shape == (10, 4)
    assert report["trace"]["sent"].sum() == 4


@pytest.mark.parametrize("compressor", [NoCompression(), OneBit(), TopK(0.1)], ids=lambda c: c.id)
@pytest.mark.parametrize("measure", ["norm", "change"])
def test_what_is_not_finite_reaches_neighbours_and_is_forgotten_when_it_is_gone(compressor, measure):
    arrays = values(3)
    group = GossipLoopback(TENSORS, 3, ConstantThreshold(1e6, measure=measure), compression=compressor)
    train(group, arrays, 3)
    good = [[x.copy() for x in own] for own in arrays]
    arrays[0][0][7] = np.nan
    group.step(arrays)
    assert all(np.isnan(own[0]).any() for own in arrays)
    # the user goes back to good values on all ranks
    for own, kept in zip(arrays, good, strict=True):
        for x, y in zip(own, kept, strict=True):
            x[...] = y
    group.step(arrays)
    assert all(np.isfinite(x).all() for own in arrays for x in own)
    assert np.isfinite(group.nodes[1].copies.of_senders[0]).all()


@pytest.mark.parametrize("compressor", [NoCompression(), TopK(0.1), QSGD(bits=2)], ids=lambda c: c.id)
@pytest.mark.parametrize("mixing", ["stale", "mean_preserving"])
def test_a_saved_state_goes_on_bit_for_bit(compressor, mixing):
    def group():
        return GossipLoopback(TENSORS, 4, SlopeThreshold(), compression=compressor, mixing=mixing, consensus_rate=0.5)

    through, arrays = group(), values(4)
    train(through, arrays, 12)
    saved = [node.state_dict() for node in through.nodes]
    continued, restored = group(), [[x.copy() for x in own] for own in arrays]
    continued._started = True
    for node, state in zip(continued.nodes, saved, strict=True):
        node.load_state_dict(state)
    train(through, arrays, 12, begin=12)
    train(continued, restored, 12, begin=12)
    for own, expected in zip(restored, arrays, strict=True):
        for x, y in zip(own, expected, strict=True):
            assert x.tobytes() == y.tobytes()
    assert continued.nodes[2].report()["total"] == through.nodes[2].report()["total"]


def test_states_of_different_steps_are_noticed():
    group, arrays = GossipLoopback(TENSORS, 2, ConstantThreshold(0)), values(2)
    train(group, arrays, 2)
    early = group.nodes[0].state_dict()
    train(group, arrays, 2)
    group.nodes[0].load_state_dict(early)
    with pytest.raises(WireError, match=r"rank 1, message of rank 0: message 2 came where 4 was expected"):
        group.nodes[1].read(0, _message_of(group.nodes[0], arrays[0]))


def test_a_state_of_another_rank_or_network_is_refused():
    group, other = GossipLoopback(TENSORS, 3, ConstantThreshold(0)), GossipLoopback(TENSORS, 3, ConstantThreshold(0))
    state = other.nodes[1].state_dict()
    with pytest.raises(StateError, match=r"of rank 1 with senders \[0, 2\] given to rank 0"):
        group.nodes[0].load_state_dict(state)
    fewer = GossipLoopback(TENSORS[:2], 3, ConstantThreshold(0)).nodes[1]
    with pytest.raises(StateError, match="copies lack 'v'"):
        group.nodes[1].load_state_dict(fewer.state_dict())
    with pytest.raises(StateError, match="not an event state of format 1: its format is None"):
        group.nodes[1].load_state_dict({})


def _message_of(node, arrays):
    node.decide(arrays)
    buffer = np.zeros(node.capacity, np.uint8)
    return buffer[: node.write(arrays, buffer)]


@pytest.mark.parametrize("compressor", [NoCompression(), TopK(0.1), OneBit()], ids=lambda c: c.id)
def test_a_receiver_that_has_missed_messages_is_given_what_they_changed(compressor):
    first, second = Ring().neighbours(2)
    sender = Node(TENSORS, first, ConstantThreshold(0), [compressor] * 4, in_order=False)
    receiver = Node(TENSORS, second, ConstantThreshold(0), [compressor] * 4, in_order=False)
    (arrays,) = values(1)
    sender.start_from(arrays)
    receiver.start_from(arrays)
    receiver.read(0, _message_of(sender, arrays))
    for step in range(3):
        for x in arrays:
            x += x.dtype.type(0.1 * (step + 1))
        _message_of(sender, arrays)
    late = np.array([True, True, False, True])
    buffer = np.zeros(sender.capacity, np.uint8)
    sender.due[:] = [False, False, True, False]
    sender._payloads = {2: NoCompression().encode(arrays[2])}
    size = sender.write_for_late(arrays, late, buffer)
    receiver.read(0, buffer[:size])
    for t, x in enumerate(arrays):
        own = sender.copies.own[t]
        expected = x if own is None or t == 2 else own
        assert receiver.copies.of_senders[t][0].tobytes() == expected.tobytes()


def test_rounds_after_the_last_step_end_on_all_ranks_at_once():
    ranks, ends = 7, [3, 9, 1, 1, 12, 5, 5]
    parts = Ring().neighbours(ranks)
    nodes = [Node(TENSORS[:1], p, ConstantThreshold(1e6)) for p in parts]
    arrays = values(ranks)
    for node, own in zip(nodes, arrays, strict=True):
        node.start_from(own[:1])
    over = [0] * ranks
    for number in range(100):
        messages = []
        for rank, node in enumerate(nodes):
            node.finished = number >= ends[rank]
            buffer = np.zeros(node.capacity, np.uint8)
            if node.finished:
                messages.append(buffer[: node.write_nothing(buffer)])
            else:
                messages.append(_message_of(node, arrays[rank][:1]))
        for rank, node in enumerate(nodes):
            for slot, sender in enumerate(node.part.senders):
                node.read(slot, messages[sender])
            node.end_round()
            if node.is_over and not over[rank]:
                over[rank] = number
        if any(over):
            break
    assert over == [max(ends) + parts[0].reach] * ranks


def _quadratic(trigger, steps=400, **settings):
    """Distance to the optimum of the mean, and between the ranks, after SGD on quadratics with optima of their own."""
    optima = values(4, seed=9)
    arrays = [[x.copy() for x in values(1)[0]] for _ in range(4)]
    group = GossipLoopback(TENSORS, 4, trigger, **settings)
    for _ in range(steps):
        gradients_at = [[x - y for x, y in zip(own, opt, strict=True)] for own, opt in zip(arrays, optima, strict=True)]
        group.step(arrays)
        for own, grads in zip(arrays, gradients_at, strict=True):
            for x, g in zip(own, grads, strict=True):
                x -= x.dtype.type(0.05) * g
    middle, best = np.concatenate(mean(arrays)), np.concatenate(mean(optima))
    apart = max(np.linalg.norm(np.concatenate(own) - middle) for own in arrays)
    return np.linalg.norm(middle - best) / np.linalg.norm(best), apart / np.linalg.norm(best)


@pytest.mark.parametrize(
    "settings",
    [
        {"trigger": ConstantThreshold(0)},
        {"trigger": ConstantThreshold(0), "mixing": "mean_preserving"},
        {"trigger": SlopeThreshold(), "mixing": "mean_preserving"},
        {"trigger": SlopeThreshold(measure="change"), "mixing": "mean_preserving"},
        {"trigger": SlopeThreshold(horizon=5.0, measure="change"), "mixing": "mean_preserving"},
        # threshold leaves out what is below its tau for ever; 16 bits are mixed as the paper does, whose mean drifts
        *({"trigger": SlopeThreshold(), "compression": c} for c in LOSSY if not isinstance(c, Threshold | FP16 | BF16)),
        {"trigger": SlopeThreshold(), "compression": TopK(0.01)},
    ],
    ids=str,
)
def test_with_default_settings_ranks_stay_together_and_reach_the_optimum(settings):
    away, apart = _quadratic(**settings)
    assert away < 0.02
    assert apart < 2.0


def test_a_damaged_message_says_whose_it_is_and_which_tensor():
    group, arrays = GossipLoopback(TENSORS, 2, ConstantThreshold(0)), values(2)
    group.step(arrays)
    message = _message_of(group.nodes[0], arrays[0]).copy()
    message[-9] ^= 4
    with pytest.raises(WireError, match="rank 1, message of rank 0: 's': payload corrupted"):
        group.nodes[1].read(0, message)


def test_arrays_of_another_size_or_type_are_refused():
    group, arrays = GossipLoopback(TENSORS, 2, ConstantThreshold(0)), values(2)
    group.step(arrays)
    arrays[0][0] = arrays[0][0][:-1]
    with pytest.raises(ValueError, match=r"'w' has 1199 elements of float32, and had 1200"):
        group.step(arrays)
    arrays[0][0] = np.zeros(1200)
    with pytest.raises(ValueError, match="of float64, and had 1200 of float32"):
        group.nodes[0].mix(arrays[0])


def test_half_precision_that_overflows_goes_whole():
    arrays = values(2)
    group = GossipLoopback(TENSORS, 2, ConstantThreshold(0), compression=FP16(), consensus_rate=0.3)
    group.step(arrays)
    arrays[0][0][:] = 1e5
    group.step(arrays)
    assert all(np.isfinite(x).all() for own in arrays for x in own)
    assert (group.nodes[1].copies.of_senders[0][0] == 1e5).all()


def test_a_policy_says_which_tensor_is_compressed():
    settings = GossipSettings(ConstantThreshold(0), Ring(), compression=Policy([("w", OneBit())]))
    node = settings.node(TENSORS, Ring().neighbours(2)[0])
    assert [c.id for c in node.copies.compressors] == ["onebit", "none", "none", "none"]


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"trigger": 1.0}, TypeError, "trigger=1.0: give a trigger"),
        ({"topology": "ring"}, TypeError, "topology='ring'"),
        ({"transport": "mpi"}, ValueError, "transport='mpi'"),
        ({"mixing": "none"}, ValueError, "mixing='none'"),
        ({"rate": 1.5}, ValueError, "consensus_rate=1.5"),
        ({"compression": 3}, TypeError, "compression=3"),
        ({"transport": "one_sided", "overlap": True}, UnsupportedError, "Leave overlap out"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, told):
    with pytest.raises(error, match=told):
        GossipSettings(**{"trigger": ConstantThreshold(0), "topology": Ring(), **settings})


# -- of the user's own -----------------------------------------------------------------------------------------------


def test_a_topology_and_a_trigger_of_a_users_file_bring_ranks_together() -> None:
    size, numel = 5, 6
    ranks = GossipLoopback([ParameterSpec("w", (numel,))], size, RelativeThreshold(1e-3), Star())
    values = [[np.full(numel, 10.0 + rank, np.float32)] for rank in range(size)]
    for _ in range(60):
        ranks.step(values)
    found = np.stack([of_rank[0] for of_rank in values])
    np.testing.assert_allclose(found, 12.0, rtol=5e-3)
    assert len(ranks.nodes[0].part.senders) == size - 1
    assert all(node.part.senders == (0,) for node in ranks.nodes[1:])
    # nothing is sent once values stay
    assert all(node.watch.passes == 60 and node.watch.sent_at.max() < 60 for node in ranks.nodes)


def test_states_of_a_users_trigger_are_its_own() -> None:
    watch = RelativeThreshold(0.5).watch(2)
    watch.decide(np.array([1.0, 2.0]))
    watch.decide(np.array([4.0, 2.0]))
    again = RelativeThreshold(0.5).watch(2)
    again.load_state_dict(watch.state_dict())
    for norms in (np.array([4.4, 2.5]), np.array([8.0, 3.5])):
        assert again.decide(norms).tolist() == watch.decide(norms).tolist()
    for other in (RelativeThreshold(0.25), ConstantThreshold(0.5)):
        with pytest.raises(StateError, match="takes its own only"):
            other.watch(2).load_state_dict(watch.state_dict())


def test_counters_go_on_among_other_neighbours() -> None:
    def passes(tally: GossipTally, number: int) -> None:
        for _ in range(number):
            tally.count_pass(np.zeros(1), np.zeros(1), np.array([True]))

    before = GossipTally(["w"], [80], 8, receivers=2, traced=True)
    passes(before, 3)
    before.messages[:] = 6
    after = GossipTally(["w"], [80], 8, receivers=1, traced=True)
    after.inherit(before)
    passes(after, 4)
    after.messages += 4
    told = after.report(np.zeros(1))
    assert told["total"]["passes"] == 7
    # two neighbours in three passes, and one in four
    assert told["tensors"]["w"]["messages_always"] == 10
    assert told["tensors"]["w"]["messages_percent"] == 100
    assert len(told["trace"]["sent"]) == 7
    assert before.messages[0] == 6
