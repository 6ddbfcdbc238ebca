"""DiLoCo's core on ranks that are threads: against the definition in NumPy, and trajectories that others computed."""

from __future__ import annotations

import itertools
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    NoCompression,
    OneBit,
    Percentile,
    Policy,
    Threshold,
    TopK,
)
from hvd_compress.averaging import Nodes
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, OuterSGD
from hvd_compress.errors import MismatchError, StateError
from hvd_compress.schedules import Turn
from hvd_compress.tensors import ParameterSpec
from tests.diloco_oracle import Nesterov, Oracle
from tests.thorough import shown_by, witnessed_by
from tests.threads import World

GOLDEN = Path(__file__).parents[1] / "golden" / "diloco.json"
TENSORS = [
    ParameterSpec("w", (40, 64)),
    ParameterSpec("b", (40,)),
    ParameterSpec("v", (7, 300)),
    ParameterSpec("s", ()),
]
MIXED = [*TENSORS, ParameterSpec("d", (50, 30), "float64"), ParameterSpec("e", (0, 5))]
NODES = {
    "2x1": Nodes.of_equal(2, 1),
    "3x1": Nodes.of_equal(3, 1),
    "2x2": Nodes.of_equal(4, 2),
    "uneven": Nodes.of_numbers([0, 0, 1, 1, 1]),
    "1x2": Nodes.of_equal(2, 2),
    "alone": Nodes.of_equal(1, 1),
}


class NumpyOuter:
    """The outer optimizer of the tests, with the protocol of the core around the oracle's arithmetic."""

    def __init__(self, tensors, arrays, make=Nesterov):
        self.names, self.arrays, self.inner = [t.name for t in tensors], arrays, make()
        self.seen = []

    def step(self, gradients):
        given = {n: g.copy() for n, g in zip(self.names, gradients, strict=True) if g is not None}
        self.seen.append(given)
        after = self.inner.step({n: a.copy() for n, a in zip(self.names, self.arrays, strict=True)}, given)
        for name, array in zip(self.names, self.arrays, strict=True):
            array[...] = after[name]

    def describe(self):
        return [self.inner.lr, self.inner.momentum]

    def state_dict(self):
        return {name: buffer.copy() for name, buffer in self.inner.buffers.items()}

    def check(self, state):
        return dict(state)

    def load(self, checked):
        self.inner.buffers = {name: buffer.copy() for name, buffer in checked.items()}


def start_of(tensors):
    draw = np.random.default_rng(1)
    return [draw.normal(size=t.numel).astype(t.dtype) for t in tensors]


def update(tensors, node, step):
    """What a node's steps change; the same on its ranks."""
    draw = np.random.default_rng([2, node, step])
    return [(draw.normal(size=t.numel) * 0.1).astype(t.dtype) for t in tensors]


def taken(arrays):
    return lambda numbers: [arrays[n] for n in numbers]


def train(member, tensors, arrays, begin, end, trace=None):
    """Steps of a rank; returns the problems that it was told of."""
    node = member.groups.nodes.node_of(member.groups.rank)
    problems = []
    for step in range(begin, end):
        member.begin(taken(arrays))
        for x, change in zip(arrays, update(tensors, node, step), strict=True):
            x += change
        turn = member.step()
        if turn != Turn():
            problems.append(member.act(turn, taken(arrays)).problem)
        if trace is not None:
            trace.append([x.copy() for x in arrays])
    return [problem for problem in problems if problem]


def run(nodes, settings, tensors=TENSORS, steps=12, make=NumpyOuter, world=None):
    """The trace of each rank, and its statistics."""

    def program(groups):
        member, arrays, trace = DiLoCoMember(tensors, settings, groups, make), start_of(tensors), []
        train(member, tensors, arrays, 0, steps, trace)
        return trace, member.stats()

    return (world or World()).run(nodes, program)


# -- trajectories --------------------------------------------------------------------------------------------------


def golden_runs():
    told = json.loads(GOLDEN.read_text())
    return [pytest.param(told["setting"], r, id=f"delay={r['delay']}-alpha={r['alpha']}") for r in told["runs"]]


@pytest.mark.parametrize(("setting", "golden"), golden_runs())
def test_trajectories_of_another_implementation_are_followed_exactly(setting, golden):
    """All numbers are multiples of 1/4 below 64, which float32 holds: there is nothing to tolerate."""
    tensors = [ParameterSpec(str(i), (1,)) for i in range(setting["fragments"])]
    settings = DiLoCoSettings(setting["sync_every"], setting["fragments"], golden["delay"], golden["alpha"])

    def program(groups):
        member = DiLoCoMember(
            tensors, settings, groups, lambda t, a: NumpyOuter(t, a, lambda: Nesterov(2.0, 0.0, False))
        )
        arrays = [np.full(1, setting["start"], np.float32) for _ in tensors]
        agreed = {}
        for step in range(len(golden["local"])):
            assert [float(x[0]) for x in arrays] == golden["local"][step]
            if str(step) in golden["agreed"] and step:
                assert agreed[step] == golden["agreed"][str(step)]
            member.begin(taken(arrays))
            for x in arrays:
                x -= np.float32(setting["gradient"])
            member.act(member.step(), taken(arrays))
            agreed[step + 1] = [float(f._references[0][0]) for f in member._fragments]

    World().run(Nodes.of_equal(setting["replicas"], 1), program)


# sync_every, fragments, delay: all delays that are possible for some distances
PLACES = [(h, f, d) for h, f in ((1, 1), (3, 1), (4, 2), (6, 2), (6, 3)) for d in range(h // f)]


OTHER_NODES = [name for name in NODES if name not in ("2x2", "uneven")]
ALPHAS = [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("layout", "place", "alpha"),
    shown_by(
        lambda layout, place, alpha: layout == ("2x2", "uneven")[(PLACES.index(place) + ALPHAS.index(alpha)) % 2],
        product(["2x2", "uneven"], PLACES, ALPHAS),
    )
    + [pytest.param(*c, marks=pytest.mark.thorough) for c in product(OTHER_NODES, PLACES, ALPHAS)],
)
def test_every_rank_follows_the_definition(layout, place, alpha):
    """Sums of a few float32 numbers are made in another order here: a few roundings at values of about 3."""
    sync_every, count, delay = place
    nodes = NODES[layout]
    settings = DiLoCoSettings(sync_every, count, delay, alpha)
    traces = run(nodes, settings, MIXED, steps=4 * sync_every + 2)
    cut = [[MIXED[n].name for n in numbers] for numbers in settings.cut(MIXED)]
    weights = [len(ranks) / nodes.size for ranks in nodes.members]
    start = {t.name: x for t, x in zip(MIXED, start_of(MIXED), strict=True)}
    oracle = Oracle(start, nodes.count, cut, sync_every, delay, alpha, weights=weights)
    for step in range(4 * sync_every + 2):
        changes = [update(MIXED, node, step) for node in range(nodes.count)]
        oracle.step([{t.name: c for t, c in zip(MIXED, of_node, strict=True)} for of_node in changes])
        for node, ranks in enumerate(nodes.members):
            for rank, (t, i) in itertools.product(ranks, zip(MIXED, range(len(MIXED)), strict=True)):
                tolerance = {"float32": 1e-5, "float64": 1e-13}[t.dtype]
                expected = oracle.local[node][t.name]
                np.testing.assert_allclose(traces[rank][0][step][i], expected, rtol=0, atol=tolerance)


def test_one_step_and_an_outer_rate_of_one_is_the_mean_of_all():
    nodes = NODES["3x1"]
    traces = run(nodes, DiLoCoSettings(1), steps=5, make=lambda t, a: NumpyOuter(t, a, lambda: Nesterov(1.0, 0.0)))
    expected = start_of(TENSORS)
    for step in range(5):
        for i in range(len(TENSORS)):
            expected[i] = expected[i] + np.mean([update(TENSORS, node, step)[i] for node in range(3)], axis=0)
            np.testing.assert_allclose(traces[0][0][step][i], expected[i], atol=1e-5)


def test_ranks_hold_the_same_bits_after_a_synchronization():
    for nodes in NODES.values():
        traces = run(nodes, DiLoCoSettings(3), MIXED, steps=6)
        for trace, _ in traces:
            for x, first in zip(trace[5], traces[0][0][5], strict=True):
                np.testing.assert_array_equal(x, first)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_outside_is_that_of_torch(momentum, nesterov, dtype):
    torch = pytest.importorskip("torch")
    tensors = [ParameterSpec("w", (3, 4), dtype), ParameterSpec("b", (4,), dtype)]
    arrays = start_of(tensors)
    others = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in arrays]
    ours = OuterSGD(0.7, momentum, nesterov)(tensors, arrays)
    theirs = torch.optim.SGD(others, lr=0.7, momentum=momentum, nesterov=nesterov)
    for step in range(6):
        gradients = update(tensors, 0, step)
        if step == 3:
            gradients[1] = None
        ours.step(gradients)
        for p, g in zip(others, gradients, strict=True):
            p.grad = None if g is None else torch.from_numpy(g)
        theirs.step()
        for x, p in zip(arrays, others, strict=True):
            np.testing.assert_allclose(x, p.detach().numpy(), rtol=0, atol=2e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"learning_rate": 0}, "learning_rate must be a finite number greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be"),
        ({"momentum": 1.0}, "momentum must be a number from 0 on, less than 1"),
        ({"momentum": True}, "momentum must be a number"),
        ({"nesterov": 1}, "nesterov must be True or False"),
    ],
)
def test_settings_of_sgd_outside_are_checked(given, told):
    with pytest.raises(ValueError, match=told):
        OuterSGD(**given)


# -- compression ---------------------------------------------------------------------------------------------------

COMPRESSORS = [
    BF16(), FP16(), Adaptive(8), OneBit(), TopK(0.1), Percentile(80, error_feedback=True), Percentile(80),
    Threshold(0.05), QSGD(4), OneBit(error_feedback=False), Policy([("w", OneBit())]),
]  # fmt: skip


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("layout", ["2x1", "3x1", "uneven"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_ranks_agree_on_is_the_same_whatever_is_sent(compressor, layout, delay):
    settings = DiLoCoSettings(6, 2, delay, compression=compressor, feedback_decay=0.9)
    traces = run(NODES[layout], settings, MIXED, steps=12)
    # the second fragment arrives after step 6, and the first one after step 9
    for step, numbers in ((5, settings.cut(MIXED)[1]), (8, settings.cut(MIXED)[0])):
        for trace, _ in traces:
            for n in numbers:
                np.testing.assert_array_equal(trace[step][n], traces[0][0][step][n])


def owed(member, tensor):
    """What a rank owes of the only tensor, by hop, in units of the sum over nodes."""
    (account,) = member._fragments[0].syncs[0]._share_sync._bucket.accounts.values()
    hops = [np.zeros(tensor.numel, tensor.dtype) for _ in range(2)]
    if account.residual is not None:
        hops[0] += account.residual
    if account.owner_residual is not None:
        hops[1][account.owned] += account.owner_residual
    return hops


@pytest.mark.parametrize("compressor", [TopK(0.05), OneBit(), Adaptive(8)], ids=repr)
@pytest.mark.parametrize("layout", ["2x1", "3x1"])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
def test_what_is_sent_and_what_is_owed_is_what_was_moved_and_a_share_of_what_was_owed(decay, layout, compressor):
    """Conservation, in each synchronization: mean sent = mean moved + decay x owed before - owed now."""
    tensor = ParameterSpec("w", (40, 64), "float64")
    nodes = NODES[layout]
    settings = DiLoCoSettings(2, compression=compressor, feedback_decay=decay)

    def program(groups):
        outer = []
        member = DiLoCoMember([tensor], settings, groups, lambda t, a: outer.append(NumpyOuter(t, a)) or outer[0])
        arrays, found = start_of([tensor]), []
        for step in range(8):
            member.begin(taken(arrays))
            arrays[0] += update([tensor], groups.rank, step)[0]
            moved = member._fragments[0]._references[0] - arrays[0]
            turn = member.step()
            member.act(turn, taken(arrays))
            if turn.arrives is not None:
                found.append((moved, owed(member, tensor)))
        return found, [given["w"] for given in outer[0].seen]

    results = World().run(nodes, program)
    before = np.zeros(tensor.numel)
    for i in range(4):
        moved = np.mean([found[i][0] for found, _ in results], axis=0)
        # what is sent is the change, the other way round than the outer gradient
        now = -np.sum([sum(found[i][1]) for found, _ in results], axis=0) / nodes.count
        for _, seen in results:
            np.testing.assert_allclose(seen[i] + now, moved + decay * before, rtol=0, atol=1e-6)
        before = now
    assert np.abs(before).max() > 0


def test_decay_of_zero_is_no_error_feedback():
    whole = run(NODES["2x1"], DiLoCoSettings(2, compression=TopK(0.05), feedback_decay=0.0), steps=8)
    without = run(NODES["2x1"], DiLoCoSettings(2, compression=TopK(0.05, error_feedback=False)), steps=8)
    for x, y in zip(whole[0][0][7], without[0][0][7], strict=True):
        np.testing.assert_array_equal(x, y)


def test_bytes_are_counted_and_compression_saves_them():
    tensors = [ParameterSpec("w", (256, 512))]
    sent = {}
    for name, compressor in {"raw": None, "topk": TopK(0.01)}.items():
        for _, stats in run(NODES["2x1"], DiLoCoSettings(4, compression=compressor), tensors, steps=16):
            sent[name] = stats["bytes_between_nodes"]
            assert stats["synchronizations"] == {"sent": 4, "merged": 4, "not_finite": 0}
    assert 4 * 4 * 256 * 512 <= sent["raw"] <= 1.01 * 4 * 4 * 256 * 512
    assert sent["topk"] < sent["raw"] / 40


def test_ranks_issue_equally_many_collectives():
    for settings in (DiLoCoSettings(6, 2, 2), DiLoCoSettings(6, 2, 2, compression=OneBit())):
        world = World()
        run(NODES["2x2"], settings, MIXED, steps=13, world=world)
        assert len(set(world.issued.values())) == 1


# -- what is not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("compressor", [None, OneBit(), TopK(0.1), BF16()], ids=repr)
@pytest.mark.parametrize("layout", ["2x1", "3x1", "2x2", "alone"])
def test_what_is_not_finite_spoils_nothing(layout, compressor, delay, bad):
    """One synchronization is left out: the outer state and what was agreed on are as if it had not been due."""
    settings = DiLoCoSettings(4, 2, delay, compression=compressor, feedback_decay=0.5)
    nodes = NODES[layout]

    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, settings, groups, NumpyOuter), start_of(TENSORS)
        train(member, TENSORS, arrays, 0, 8)
        before = [(f.outer.state_dict(), [r.copy() for r in f._references]) for f in member._fragments]
        is_spoiled = groups.nodes.node_of(groups.rank) == 0
        if is_spoiled:
            arrays[0][5] = arrays[2][7] = bad
        (told,) = train(member, TENSORS, arrays, 8, 10)
        assert "not finite in fragment 0, so this synchronization is left out" in told
        assert ("are again what the ranks agreed on last" in told) == is_spoiled
        after = [(f.outer.state_dict(), f._references) for f in member._fragments]
        for (state, references), (kept, same) in zip(before, after, strict=True):
            assert all(np.array_equal(state[name], kept[name]) for name in state)
            assert all(np.array_equal(x, y) for x, y in zip(references, same, strict=True))
        if is_spoiled:
            # all fragments: the other one would spoil this one again
            for x, reference in zip((arrays[n] for f in member._fragments for n in f.numbers),
                                    (r for f in member._fragments for r in f._references), strict=True):  # fmt: skip
                assert np.array_equal(x, reference)
        train(member, TENSORS, arrays, 10, 18)
        assert all(np.isfinite(x).all() for x in arrays)
        assert member.stats()["synchronizations"]["not_finite"] == 1
        return [r.copy() for f in member._fragments for r in f._references]

    results = World().run(nodes, program)
    for references in results:
        for x, y in zip(references, results[0], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["2x1", "3x1"])
def test_residuals_decay_once_for_a_synchronization_that_was_left_out(layout):
    """A healthy rank's next average is what it had been without the bad one."""
    tensor = ParameterSpec("w", (40, 64))
    settings = DiLoCoSettings(2, compression=TopK(0.05), feedback_decay=0.5)

    def program(groups):
        def sent_with(bad):
            outer = []
            member = DiLoCoMember([tensor], settings, groups, lambda t, a: outer.append(NumpyOuter(t, a)) or outer[0])
            arrays = start_of([tensor])
            train(member, [tensor], arrays, 0, 4)
            good = arrays[0].copy()
            if bad:
                arrays[0][3] = np.nan
                # steps that move nothing else
                member.act(member.step(), taken(arrays))
                assert member.act(member.step(), taken(arrays)).problem
                arrays[0][...] = good
            train(member, [tensor], arrays, 4, 6)
            return outer[0].seen[-1]["w"]

        np.testing.assert_allclose(sent_with(True), sent_with(False), rtol=0, atol=1e-6)

    World().run(NODES[layout], program)


@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_what_arrived_beside_what_is_not_finite_is_owed_as_before(layout):
    """Of two types of values, or of two shares in a node, one is finite; nothing of it may be sent twice."""
    tensors = [ParameterSpec("w", (40, 64)), ParameterSpec("v", (40, 64)), ParameterSpec("d", (50, 30), "float64")]
    settings = DiLoCoSettings(2, compression=TopK(0.05), feedback_decay=0.5)

    def residuals(member):
        found = {}
        for sync in member._fragments[0].syncs:
            accounts = sync._share_sync._bucket.accounts
            # small pieces are sent as they are
            found |= {name: a.residual.copy() for name, a in accounts.items() if a.residual is not None}
        return found

    def program(groups):
        member, arrays = DiLoCoMember(tensors, settings, groups, NumpyOuter), start_of(tensors)
        train(member, tensors, arrays, 0, 4)
        before = residuals(member)
        if groups.nodes.node_of(groups.rank) == 0:
            # in the first share
            arrays[0][3] = np.nan
        assert len(train(member, tensors, arrays, 4, 6)) == 1
        after = residuals(member)
        assert after
        # the next synchronization does not let them fade again
        for name, x in after.items():
            np.testing.assert_allclose(x, np.float32(0.5) * before[name], rtol=0, atol=1e-6)
        state = member.state_dict()
        again = DiLoCoMember(tensors, settings, groups, NumpyOuter)
        again.load_state_dict(state)
        copied = [x.copy() for x in arrays]
        train(member, tensors, arrays, 6, 9)
        train(again, tensors, copied, 6, 9)
        assert all(np.array_equal(x, y) for x, y in zip(arrays, copied, strict=True))
        assert all(np.isfinite(x).all() for x in arrays)

    World().run(NODES[layout], program)


def test_an_infinite_sum_of_finite_changes_is_left_out():
    tensor = ParameterSpec("w", (2048,))

    def program(groups):
        member = DiLoCoMember([tensor], DiLoCoSettings(1), groups, NumpyOuter)
        arrays = [np.zeros(2048, np.float32)]
        member.begin(taken(arrays))
        arrays[0][...] = 3e38
        outcome = member.act(member.step(), taken(arrays))
        assert "the parameters of this rank are finite, and stay" in outcome.problem
        assert (arrays[0] == np.float32(3e38)).all()
        assert not member._fragments[0]._references[0].any()

    World().run(NODES["3x1"], program)


# -- what is frozen, averages, disagreement ------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
def test_a_frozen_parameter_stays_whatever_the_momentum(delay):
    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, DiLoCoSettings(2, delay=delay), groups, NumpyOuter), start_of(TENSORS)
        train(member, TENSORS, arrays, 0, 4)
        kept, moving = arrays[2].copy(), arrays[0].copy()
        for _ in range(4):
            member.act(member.step(), taken(arrays), frozen=["v"])
        assert np.array_equal(arrays[2], kept)
        # what is not frozen goes on with the outer momentum
        assert not np.array_equal(arrays[0], moving)

    World().run(NODES["2x1"], program)


def owed_of(sync, name):
    """What a rank owes of the part of a tensor that is in its share."""
    share, owed = sync.share, sync.owed()
    return [owed[share.place(piece)].copy() for piece in share.pieces if piece.name == name]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("layout", ["2x1", "3x1", "2x2"])
def test_what_is_owed_of_a_frozen_parameter_waits(layout, decay):
    def program(groups):
        settings = DiLoCoSettings(2, compression=OneBit(), feedback_decay=decay)
        member, arrays = DiLoCoMember(TENSORS, settings, groups, NumpyOuter), start_of(TENSORS)
        train(member, TENSORS, arrays, 0, 4)
        sync = member._fragments[0].syncs[0]._share_sync
        moving, before = owed_of(sync, "w"), owed_of(sync, "v")
        for _ in range(4):
            member.act(member.step(), taken(arrays), frozen=["v"])
        moved, after = owed_of(sync, "w"), owed_of(sync, "v")
        train(member, TENSORS, arrays, 8, 10)
        return before, after, owed_of(sync, "v"), moving, moved

    ranks = World().run(NODES[layout], program)
    for before, after, unfrozen, moving, moved in ranks:
        for old, new, sent_again in zip(before, after, unfrozen, strict=True):
            np.testing.assert_array_equal(new, old)
            assert not (old.any() and np.array_equal(sent_again, old))
        for old, new in zip(moving, moved, strict=True):
            # small pieces are sent as they are
            assert not (old.any() and np.array_equal(new, old))
    assert any(old.any() for before, *_ in ranks for old in before)
    assert any(old.any() for *_, moving, _ in ranks for old in moving)


def test_ranks_that_freeze_different_parameters_are_told_so():
    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, DiLoCoSettings(1), groups, NumpyOuter), start_of(TENSORS)
        member.begin(taken(arrays))
        with pytest.raises(MismatchError, match="the number of what is frozen"):
            member.act(member.step(), taken(arrays), frozen=["v"] if groups.rank else [])

    World().run(NODES["2x1"], program)


@pytest.mark.parametrize("layout", list(NODES))
def test_an_average_makes_all_ranks_equal_and_keeps_the_outer_state(layout):
    nodes = NODES[layout]
    settings = DiLoCoSettings(6, 2, 2, 0.5, compression=TopK(0.1))

    def program(groups):
        member, arrays = DiLoCoMember(MIXED, settings, groups, NumpyOuter), start_of(MIXED)
        # the second fragment is under way after step 10
        train(member, MIXED, arrays, 0, 10)
        assert member.stats()["under_way"] == 1
        buffers = {"mean": np.full(3, groups.rank, np.float32)}
        member.average_parameters(taken(arrays), buffers)
        assert member.stats()["under_way"] is None
        state = [f.outer.state_dict() for f in member._fragments]
        equal = [x.copy() for x in arrays]
        # once more changes nothing, and training goes on
        member.average_parameters(taken(arrays), {})
        assert all(np.allclose(x, y, atol=1e-6) for x, y in zip(arrays, equal, strict=True))
        for kept, fragment in zip(state, member._fragments, strict=True):
            assert all(np.array_equal(kept[n], v) for n, v in fragment.outer.state_dict().items())
            for n, reference in zip(fragment.numbers, fragment._references, strict=True):
                assert np.array_equal(reference, arrays[n])
        train(member, MIXED, arrays, 10, 24)
        assert member.stats()["synchronizations"]["sent"] == 8
        return equal, buffers["mean"][0]

    results = World().run(nodes, program)
    for equal, mean in results:
        assert mean == np.float32((nodes.size - 1) / 2)
        for x, y in zip(equal, results[0][0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_mean_that_is_not_finite_is_seen_and_not_kept():
    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, DiLoCoSettings(2, 2), groups, NumpyOuter), start_of(TENSORS)
        train(member, TENSORS, arrays, 0, 2)
        if groups.rank == 0:
            arrays[0][1] = np.nan
        member.average_parameters(taken(arrays), {})
        assert np.isnan(arrays[0][1])
        assert all(np.isfinite(r).all() for f in member._fragments for r in f._references)

    World().run(NODES["2x1"], program)


@pytest.mark.parametrize("ahead", [1, 2])
def test_ranks_with_other_numbers_of_steps_are_told_so(ahead):
    """The others average at the end; one rank has made more steps, and has perhaps begun one more synchronization."""

    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, DiLoCoSettings(2), groups, NumpyOuter), start_of(TENSORS)

        def train_and_average():
            train(member, TENSORS, arrays, 0, 2 + ahead * groups.rank)
            member.average_parameters(taken(arrays), {})

        with pytest.raises(MismatchError, match=r"disagree on DiLoCo's moment: .* after 2 steps"):
            train_and_average()

    World().run(NODES["2x1"], program)


def test_ranks_that_begin_with_other_parameters_are_told_so():
    def program(groups):
        member, arrays = DiLoCoMember(TENSORS, DiLoCoSettings(2, delay=1), groups, NumpyOuter), start_of(TENSORS)
        arrays[0][0] += groups.rank
        with pytest.raises(MismatchError, match=r"what they agreed on last \(start from equal parameters, as after"):
            train(member, TENSORS, arrays, 0, 4)

    World().run(NODES["2x1"], program)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sync_every": 4}, "schedule.sync_every"),
        ({"delay": 1}, "schedule.delay"),
        ({"alpha": 0.5}, "alpha"),
        ({"feedback_decay": 0.5}, "feedback_decay"),
        ({"compression": TopK(0.1)}, "compression"),
        ({"fragments": 2}, "fragments"),
    ],
)
def test_ranks_that_disagree_are_told_so(changed, told):
    def program(groups):
        chosen = {"sync_every": 2, "fragments": 1, **(changed if groups.rank else {})}
        with pytest.raises(MismatchError, match=told):
            DiLoCoMember(TENSORS, DiLoCoSettings(**chosen), groups, NumpyOuter)

    World().run(NODES["2x1"], program)


def test_ranks_with_other_outer_optimizers_are_told_so():
    def program(groups):
        make = lambda t, a: NumpyOuter(t, a, lambda: Nesterov(0.7 + groups.rank))  # noqa: E731
        with pytest.raises(MismatchError, match="outer"):
            DiLoCoMember(TENSORS, DiLoCoSettings(), groups, make)

    World().run(NODES["2x1"], program)


# -- states --------------------------------------------------------------------------------------------------------

WAYS = {
    "raw": {},
    "fragments": {"fragments": 2},
    "mixed": {"fragments": 2, "alpha": 0.25},
    "topk": {"compression": TopK(0.1), "feedback_decay": 0.9},
    "qsgd": {"compression": QSGD(4, seed=3), "fragments": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", witnessed_by(["2x2", "alone"], ["2x1", "3x1", "2x2", "alone"]))
def test_a_state_goes_on_exactly_from_every_step(layout, way):
    settings = DiLoCoSettings(6, delay=2, **WAYS[way])
    whole = run(NODES[layout], settings, MIXED, steps=20)

    def program(groups):
        failures = []
        for after in range(14):
            first, arrays = DiLoCoMember(MIXED, settings, groups, NumpyOuter), start_of(MIXED)
            train(first, MIXED, arrays, 0, after)
            state = first.state_dict()
            # the run that goes on is not disturbed by having been asked
            second = DiLoCoMember(MIXED, settings, groups, NumpyOuter)
            second.load_state_dict(state)
            for member in (second, first):
                copied, trace = [x.copy() for x in arrays], []
                train(member, MIXED, copied, after, 20, trace)
                for step, of_step in enumerate(trace, after):
                    for x, expected in zip(of_step, whole[groups.rank][0][step], strict=True):
                        if not np.array_equal(x, expected):
                            failures.append((after, step))
        return failures

    assert World().run(NODES[layout], program) == [[]] * NODES[layout].size


def test_a_state_of_other_settings_ranks_or_moments_is_refused():
    def program(groups):
        member = DiLoCoMember(TENSORS, DiLoCoSettings(4, delay=2), groups, NumpyOuter)
        other = DiLoCoMember(TENSORS, DiLoCoSettings(4, delay=1), groups, NumpyOuter)
        train(member, TENSORS, start_of(TENSORS), 0, 3)
        return member, other.state_dict(), member.state_dict()

    results = World().run(NODES["2x1"], program)
    member, other, mine = results[0]
    with pytest.raises(StateError, match="schedule differ"):
        member.load_state_dict(other)
    with pytest.raises(StateError, match="rank 1, given to rank 0"):
        member.load_state_dict(results[1][2])
    with pytest.raises(StateError, match="its format is 'int'"):
        member.load_state_dict(3)
    with pytest.raises(StateError, match="is under way after 4 steps, when it is not"):
        member.load_state_dict({**mine, "steps": 4})
    with pytest.raises(StateError, match="does not say of the same fragment"):
        member.load_state_dict({**mine, "under_way": None})


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"alpha": -0.1}, ValueError, "alpha=-0.1: alpha must be a number from 0 to 1"),
        ({"alpha": True}, ValueError, "alpha must be a number"),
        ({"alpha": float("nan")}, ValueError, "alpha must be a number"),
        ({"feedback_decay": 1.5}, ValueError, "feedback_decay must be a number from 0 to 1"),
        ({"sync_every": 0}, ValueError, "sync_every must be an integer from 1"),
        ({"delay": 30}, ValueError, "delay must be less than sync_every / fragments = 30"),
        ({"fragments": 0}, ValueError, "give at least 1"),
        ({"fragments": []}, ValueError, "at least one fragment"),
        ({"fragments": True}, TypeError, "give their number, or a list of lists of parameter names"),
        ({"fragments": ["w", "b"]}, TypeError, "a list of lists of parameter names"),
        ({"fragments": 4}, ValueError, "sync_every=30 with 4 fragments"),
        ({"compression": 3}, TypeError, "compression=3: give a compressor"),
        ({"compression": OneBit}, TypeError, "compression=OneBit is a class"),
    ],
)
def test_settings_out_of_range_are_refused(given, error, told):
    with pytest.raises(error, match=told):
        DiLoCoSettings(**given)


@pytest.mark.parametrize(
    ("fragments", "told"),
    [
        (5, "fragments=5 of 4 parameters"),
        ([["w", "b"], ["v"]], "leave out 's', 1 of 4"),
        ([["w", "b", "v", "s", "x"]], r"fragments\[0\] names 'x', which is no parameter here: there are 'b', 's'"),
        ([["w", "b"], ["v", "s", "w"]], r"fragments\[1\] names 'w', which is in a fragment already"),
        ([["w", "b", "v", "s"], ["frozen"]], r"fragments\[1\] has no parameter that takes gradients"),
        ([["w", "b", "v", "s"], []], r"fragments\[1\] has no parameter"),
    ],
)
def test_fragments_that_do_not_fit_are_refused(fragments, told):
    with pytest.raises(ValueError, match=told):
        DiLoCoSettings(60, fragments).cut(TENSORS, others=["frozen"])


def test_a_number_of_fragments_cuts_about_equally():
    tensors = [ParameterSpec(str(i), (n,)) for i, n in enumerate((100, 1, 1, 50, 48, 200))]
    assert DiLoCoSettings(4, 2).cut(tensors) == [(0, 1, 2, 3, 4), (5,)]
    assert DiLoCoSettings(6, 3).cut(tensors) == [(0, 1, 2, 3), (4,), (5,)]
    for count in range(1, 7):
        cut = DiLoCoSettings(60, count).cut(tensors)
        assert len(cut) == count
        assert [n for numbers in cut for n in numbers] == list(range(6))
        assert all(cut)


def test_no_compression_is_none():
    assert DiLoCoSettings().compression == NoCompression()


# -- other ranks ---------------------------------------------------------------------------------------------------


def plain_sum(tensors, arrays):
    return NumpyOuter(tensors, arrays, lambda: Nesterov(1.0, 0.0, False))


def gone_on(before, count, groups, steps):
    """A member among `count` of the ranks of before, with its parameters, after further steps."""
    member = DiLoCoMember(MIXED, before[0][0].settings, groups, plain_sum)
    old, arrays = before[groups.rank]
    member.go_on_from(before[0][0].agreed())
    member.inherit(old, len(before))
    assert member.steps == old.steps
    assert member.stats()["bytes_between_nodes"] == old.stats()["bytes_between_nodes"]
    assert old.owed().keys() == member.owed().keys()
    assert len(before) == 1 or any(key.endswith("float64") for key in old.owed())
    for key, debt in old.owed().items():
        np.testing.assert_allclose(member.owed()[key], debt * (count / len(before)), rtol=1e-6)
    train(member, MIXED, arrays, old.steps, old.steps + steps)
    return member, arrays


def test_who_stays_goes_on_owing_with_the_same_weight_and_tells_it_when_alone():
    settings = DiLoCoSettings(2, compression=TopK(0.1))

    def begin(groups):
        member, arrays = DiLoCoMember(MIXED, settings, groups, plain_sum), start_of(MIXED)
        train(member, MIXED, arrays, 0, 4)
        return member, arrays

    three = World().run(NODES["3x1"], begin)
    two = World().run(NODES["2x1"], lambda groups: gone_on(three, 2, groups, 2))
    alone, arrays = World().run(NODES["alone"], lambda groups: gone_on(two[:2], 1, groups, 0))[0]
    owed = alone.owed()
    state = alone.state_dict()
    again = World().run(NODES["alone"], lambda groups: DiLoCoMember(MIXED, settings, groups, plain_sum))[0]
    again.load_state_dict(state)
    assert all(np.array_equal(again.owed()[key], debt) for key, debt in owed.items())
    before = [sync.reference.copy() for sync in alone._fragments[0].syncs]
    # parameters that do not move: what arrives is what was owed
    for moment in (alone.step(), alone.step()):
        if moment != Turn():
            alone.act(moment, taken(arrays))
    for sync, reference, debt in zip(alone._fragments[0].syncs, before, owed.values(), strict=True):
        np.testing.assert_allclose(sync.reference, reference + debt, atol=1e-6)
    assert alone.owed() == {}


def test_a_debt_of_one_node_is_kept_where_a_change_is_not_finite_and_states_without_one_are_read():
    settings = DiLoCoSettings(1)

    def program(groups):
        member, arrays = DiLoCoMember(MIXED, settings, groups, plain_sum), start_of(MIXED)
        member.begin(taken(arrays))
        debts = [np.full(sync.flat.size, 0.5, sync.flat.dtype) for sync in member._fragments[0].syncs]
        for sync, debt in zip(member._fragments[0].syncs, debts, strict=True):
            sync.owe(debt)
        arrays[0][0] = np.inf
        assert "not finite" in member.act(member.step(), taken(arrays)).problem
        assert all(np.array_equal(a, b) for a, b in zip(member.owed().values(), debts, strict=True))
        state = member.state_dict()
        for of_sync in state["fragments"][0]["syncs"]:
            del of_sync["debt"]
        member.load_state_dict(state)
        assert member.owed() == {}

    World().run(NODES["alone"], program)


def test_a_member_goes_back_without_a_wait_for_what_is_under_way():
    settings = DiLoCoSettings(4, 2, 1, compression=TopK(0.1))

    def program(groups):
        member, arrays = DiLoCoMember(MIXED, settings, groups, NumpyOuter), start_of(MIXED)
        train(member, MIXED, arrays, 0, 5)
        member.rest()
        state, kept = member.state_dict(), [x.copy() for x in arrays]
        train(member, MIXED, arrays, 5, 9)
        # nobody will ever complete what was sent after the ninth step
        for fragment in member._fragments:
            for sync in fragment.syncs:
                sync._share_sync._change = "never"
        member._meeting._end_agreement = lambda: pytest.fail("waited")
        member.restore(state)
        assert member.stats()["under_way"] == 0
        train(member, MIXED, kept, 5, 8)
        return kept

    for found, (trace, _) in zip(World().run(NODES["2x1"], program), run(NODES["2x1"], settings, MIXED), strict=True):
        for x, expected in zip(found, trace[7], strict=True):
            np.testing.assert_array_equal(x, expected)
