"""DASO's core on ranks that are threads: against equation 1 and plain averaging, typed anew in NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    DasoSchedule,
    NoCompression,
    OneBit,
    Percentile,
    Policy,
    Threshold,
    TopK,
)
from hvd_compress.averaging import FlatTensors, Nodes, share_sync
from hvd_compress.daso import DasoMember, DasoSettings
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.schedules import Moment
from hvd_compress.tensors import ParameterSpec
from tests.thorough import shown_by, witnessed_by
from tests.threads import World

TENSORS = [
    ParameterSpec("w", (40, 64)),
    ParameterSpec("b", (40,)),
    ParameterSpec("v", (7, 300)),
    ParameterSpec("s", ()),
]
MIXED = [*TENSORS, ParameterSpec("d", (50, 30), "float64"), ParameterSpec("e", (0, 5))]
NODES = {
    "2x2": Nodes.of_equal(4, 2),
    "4x1": Nodes.of_equal(4, 1),
    "1x4": Nodes.of_equal(4, 4),
    "3x2": Nodes.of_equal(6, 2),
    "uneven": Nodes.of_numbers([0, 0, 1, 1, 1]),
    "shuffled": Nodes.of_numbers([5, 9, 5, 9]),
    "alone": Nodes.of_equal(1, 1),
}
RAW = {"blocking_compression": NoCompression()}


def settings(*, form="sharded", merge="paper", average_state=False, compression=None, blocking=None, **schedule):
    schedule.setdefault("patience", None)
    return DasoSettings(
        DasoSchedule(**schedule),
        form,
        merge,
        NoCompression() if compression is None else compression,
        NoCompression() if blocking is None else blocking,
        average_state,
    )


def start_of(tensors):
    """Parameters that all ranks begin with."""
    draw = np.random.default_rng(1)
    return [draw.normal(size=t.numel).astype(t.dtype) for t in tensors]


def update(tensors, node, step):
    """What a node's averaged gradients change in a step; the same on its ranks."""
    draw = np.random.default_rng([2, node, step])
    return [(draw.normal(size=t.numel) * 0.1).astype(t.dtype) for t in tensors]


def train(member, groups, tensors, arrays, begin, end, trace=None, ends=()):
    node = groups.nodes.node_of(groups.rank)
    for step in range(begin, end):
        for x, change in zip(arrays, update(tensors, node, step), strict=True):
            x += change
        moment = member.batch()
        if moment != Moment():
            member.act(moment, arrays)
        if step in ends:
            member.end_epoch(arrays, float(step + groups.rank))
        if trace is not None:
            trace.append([x.copy() for x in arrays])


def run(nodes, chosen, tensors=TENSORS, steps=12, ends=(), world=None):
    """The trace of each rank."""
    world = World() if world is None else world

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        trace = []
        train(member, groups, tensors, start_of(tensors), 0, steps, trace, ends)
        return trace, member.stats()

    # a step changes arrays in place: start_of is made anew, so is kept in `train` only
    return world.run(nodes, program)


class Oracle:
    """DASO by equation 1, on nodes instead of ranks."""

    def __init__(self, nodes, merge, tensors):
        self.nodes, self.merge = nodes, merge
        self.x = [start_of(tensors) for _ in nodes.members]
        self.sent = None
        self.tensors = tensors

    def total(self, i, of):
        # weighted so that every rank counts the same
        total = None
        for node, x in enumerate(of):
            weight = x[i].dtype.type(len(self.nodes.members[node]) * self.nodes.count / self.nodes.size)
            part = x[i] if weight == 1 else weight * x[i]
            total = part.copy() if total is None else total + part
        return total

    def step(self, step, moment):
        for node, x in enumerate(self.x):
            for i, change in enumerate(update(self.tensors, node, step)):
                x[i] = x[i] + change
        if self.nodes.count == 1:
            return
        if moment.arrives is not None and not moment.blocks:
            self.x = [
                [self.merged(node, i, moment.arrives) for i in range(len(self.tensors))] for node in range(len(self.x))
            ]
        if moment.blocks:
            means = [self.total(i, self.x) / self.dtype(i).type(self.nodes.count) for i in range(len(self.tensors))]
            self.x = [[m.copy() for m in means] for _ in self.x]
        if moment.sends:
            self.sent = [[x.copy() for x in of_node] for of_node in self.x]

    def dtype(self, i):
        return np.dtype(self.tensors[i].dtype)

    def merged(self, node, i, staleness):
        x, total, kind = self.x[node][i], self.total(i, self.sent), self.dtype(i).type
        count = self.nodes.count
        if self.merge == "paper":
            return (kind(2 * staleness) * x + total) / kind(2 * staleness + count)
        mean = total / kind(count)
        if self.merge == "delta":
            return mean + kind(1) * (x - self.sent[node][i])
        w = self.merge
        return (kind(count * (1 - w) / w) * x + total) / kind(count / w)


OTHER_NODES = [name for name in NODES if name not in ("2x2", "uneven")]
FORMS, MERGES, PAIRS = ["sharded", "rotate"], ["paper", "delta", 0.5, 1], [(1, 0), (1, 1), (2, 1), (4, 2), (3, 3)]


@pytest.mark.parametrize(
    ("layout", "pair", "merge", "form"),
    shown_by(
        lambda layout, pair, merge, form: (
            layout == ("2x2", "uneven")[(PAIRS.index(pair) + MERGES.index(merge) + FORMS.index(form)) % 2]
        ),
        product(["2x2", "uneven"], PAIRS, MERGES, FORMS),
    )
    + [pytest.param(*c, marks=pytest.mark.thorough) for c in product(OTHER_NODES, PAIRS, MERGES, FORMS)],
)
def test_every_rank_follows_equation_1_bit_for_bit(layout, pair, merge, form):
    nodes = NODES[layout]
    chosen = settings(global_skips=pair[0], batches_to_wait=pair[1], steps_per_epoch=9, form=form, merge=merge)
    traces = run(nodes, chosen, MIXED, steps=20)
    clock, oracle = chosen.schedule.clock(), Oracle(nodes, merge, MIXED)
    for step in range(20):
        oracle.step(step, clock.batch())
        for node, ranks in enumerate(nodes.members):
            for rank in ranks:
                for x, expected in zip(traces[rank][0][step], oracle.x[node], strict=True):
                    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("form", ["sharded", "rotate"])
def test_ranks_issue_equally_many_collectives(form):
    for compression in (None, TopK(0.1), OneBit()):
        world = World()
        run(NODES["3x2"], settings(form=form, compression=compression, global_skips=2), steps=9, ends=[8], world=world)
        assert len(set(world.issued.values())) == 1
        assert set(world.issued) == set(range(6))


COMPRESSORS = [BF16(), Adaptive(8), OneBit(), TopK(0.1), Percentile(80, error_feedback=True), Threshold(0.05), QSGD(4)]
COMPRESSORS += [Policy([("w", OneBit())])]


@pytest.mark.parametrize("form", ["sharded", "rotate"])
@pytest.mark.parametrize("layout", ["2x2", "4x1", "uneven"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_a_compressed_blocking_synchronization_makes_all_ranks_equal(compressor, layout, form):
    chosen = settings(compression=compressor, batches_to_wait=0, global_skips=2, form=form)
    traces = run(NODES[layout], chosen, MIXED, steps=8)
    for step in (1, 3, 5, 7):
        for trace, _ in traces:
            for x, first in zip(trace[step], traces[0][0][step], strict=True):
                np.testing.assert_array_equal(x, first)


def owed(member, tensors):
    """All that a rank owes, in units of the sum over nodes, of each element of its share."""
    found = {t.name: np.zeros(t.numel) for t in tensors}
    for sync in member._syncs:
        out = sync.nodes._share_sync
        if out is None:
            continue
        for piece in out.share.pieces:
            part = found[piece.name][piece.within]
            if out._debt is not None:
                part += out._debt[out.share.place(piece)]
            if out._bucket is None:
                continue
            transfer = out._bucket.accounts[f"{piece.name}:{piece.within.start}"]
            if transfer.residual is not None:
                part += transfer.residual
            if transfer.owner_residual is not None:
                part[transfer.owned] += transfer.owner_residual
    return found


@pytest.mark.parametrize("form", ["sharded", "rotate"])
@pytest.mark.parametrize("compressor", [BF16(), Adaptive(8), OneBit(), TopK(0.1), Threshold(0.05)], ids=repr)
@pytest.mark.parametrize("layout", ["2x2", "4x1", "3x2", "uneven"])
def test_nothing_is_lost_but_only_delayed(compressor, layout, form):
    """Blocking: the mean of what all ranks would have is what they have, plus what they owe."""
    nodes = NODES[layout]
    chosen = settings(
        compression=compressor, blocking=BF16(), global_skips=2, batches_to_wait=0, form=form,
        total_epochs=4, warmup_epochs=1, cooldown_epochs=1, steps_per_epoch=4,
    )  # fmt: skip
    tensors = [t._replace(dtype="float64") for t in TENSORS]

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        arrays = start_of(tensors)
        train(member, groups, tensors, arrays, 0, 16)
        return arrays, owed(member, tensors)

    results = World().run(nodes, program)
    for i, t in enumerate(tensors):
        expected = start_of(tensors)[i]
        for step in range(16):
            expected = expected + sum(
                len(ranks) / nodes.size * update(tensors, node, step)[i] for node, ranks in enumerate(nodes.members)
            )
        due = sum(of_rank[t.name] for _, of_rank in results) / nodes.count
        for arrays, _ in results:
            np.testing.assert_allclose(arrays[i] + due, expected, rtol=0, atol=1e-6)
    assert any(np.abs(of_rank["w"]).max() > 0 for _, of_rank in results)


@pytest.mark.parametrize(("merge", "share"), [("paper", 2 / 4), ("delta", 1.0), (0.25, 0.75)])
def test_a_compressed_merge_keeps_a_share_of_the_local_progress(merge, share):
    """With 16 exact bits: reference + share * what the node did while it waited."""
    tensors = [ParameterSpec("w", (32, 64), "float64")]
    nodes = NODES["2x2"]
    chosen = settings(compression=BF16(), global_skips=2, batches_to_wait=1, merge=merge)

    def quarter(node, step):
        return np.full(tensors[0].numel, (1 + node) * (1 + step) / 4)

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        node = groups.nodes.node_of(groups.rank)
        arrays, trace = [np.zeros(tensors[0].numel)], []
        for step in range(5):
            arrays[0] += quarter(node, step)
            moment = member.batch()
            if moment != Moment():
                member.act(moment, arrays)
            trace.append(arrays[0].copy())
        return trace

    traces = World().run(nodes, program)
    # batch 2 sends values, batch 3 merges them; batch 4 sends changes, batch 5 merges these
    reference = np.mean([traces[rank][1] for rank in (0, 2)], axis=0)
    following = reference + np.mean([traces[rank][3] - reference for rank in (0, 2)], axis=0)
    for rank in range(4):
        expected = following + share * quarter(rank // 2, 4)
        np.testing.assert_allclose(traces[rank][4], expected, rtol=1e-12)


@pytest.mark.parametrize("form", ["sharded", "rotate"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_change_that_is_not_finite_poisons_no_reference(bad, form):
    tensors = [ParameterSpec("w", (40, 64))]
    chosen = settings(compression=OneBit(), global_skips=1, batches_to_wait=0, form=form)

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        arrays = start_of(tensors)
        trace = []
        for step in range(6):
            arrays[0] += update(tensors, groups.nodes.node_of(groups.rank), step)[0]
            good = arrays[0].copy()
            if step == 2 and groups.rank in (0, 1):
                arrays[0][5] = bad
            member.act(member.batch(), arrays)
            if step == 2:
                trace.append(arrays[0].copy())
                arrays[0] = good
        return arrays[0], trace[0]

    results = World().run(NODES["2x2"], program)
    assert all(np.isfinite(x).all() for x, _ in results)
    for x, _ in results:
        np.testing.assert_array_equal(x, results[0][0])
    # at once, and on all ranks alike: they are to be equal after a blocking synchronization
    for _, told in results:
        assert np.flatnonzero(~np.isfinite(told)).tolist() == [5]


def test_a_small_tensor_that_is_not_finite_poisons_no_reference():
    """What is too small to be compressed goes beside the others, and says so as well."""

    def program(groups):
        member = DasoMember(TENSORS, settings(compression=OneBit(), global_skips=1, batches_to_wait=0), groups)
        arrays = start_of(TENSORS)
        train(member, groups, TENSORS, arrays, 0, 2)
        good = arrays[1].copy()
        if groups.nodes.node_of(groups.rank) == 0:
            arrays[1][3] = np.nan
        member.act(member.batch(), arrays)
        arrays[1][...] = good
        member.act(member.batch(), arrays)
        return arrays[1]

    for x in World().run(NODES["2x2"], program):
        assert np.isfinite(x).all()


def test_float64_is_averaged_in_float64_among_three_nodes():
    tensors = [ParameterSpec("w", (40, 20), "float64")]
    traces = run(NODES["3x2"], settings(compression=OneBit(), global_skips=1, batches_to_wait=0), tensors, steps=3)
    expected = start_of(tensors)[0]
    for step in range(3):
        expected = expected + np.mean([update(tensors, node, step)[0] for node in range(3)], axis=0)
        np.testing.assert_allclose(traces[0][0][step][0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("merge", ["paper", "delta", 0.5])
@pytest.mark.parametrize("wait", [1, 2])
def test_a_debt_is_paid_as_far_as_it_has_got_into_the_parameters(merge, wait):
    """A phase with top-k is followed by one in full: with no updates any more, all of what was owed arrives."""
    tensors = [ParameterSpec("w", (40, 64), "float64")]
    chosen = settings(
        blocking=TopK(0.1), global_skips=3, batches_to_wait=wait, merge=merge, total_epochs=2, warmup_epochs=1,
        steps_per_epoch=4,
    )  # fmt: skip

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        arrays = start_of(tensors)
        train(member, groups, tensors, arrays, 0, 4)
        for _ in range(160):
            member.act(member.batch(), arrays)
        return arrays[0], owed(member, tensors)["w"]

    results = World().run(NODES["2x2"], program)
    expected = start_of(tensors)[0] + sum(
        0.5 * update(tensors, node, step)[0] for node in range(2) for step in range(4)
    )
    for x, due in results:
        np.testing.assert_allclose(x, expected, atol=1e-9)
        assert np.abs(due).max() < 1e-9


def test_values_that_are_not_finite_reach_all():
    tensors = [ParameterSpec("w", (40, 64))]

    def program(groups):
        member = DasoMember(tensors, settings(batches_to_wait=0, global_skips=1), groups)
        arrays = start_of(tensors)
        if groups.rank < 2:
            arrays[0][5] = np.nan
        member.act(member.batch(), arrays)
        return arrays[0]

    for x in World().run(NODES["2x2"], program):
        assert np.flatnonzero(~np.isfinite(x)).tolist() == [5]


WAYS = {
    "raw": {},
    "rotate": {"form": "rotate"},
    "delta": {"merge": "delta"},
    "adaptive": {"compression": Adaptive(8)},
    "adaptive-delta": {"compression": Adaptive(8), "merge": "delta"},
    "rotate-qsgd": {"compression": QSGD(4, seed=3), "form": "rotate"},
    "phases": {
        "compression": TopK(0.1),
        "blocking": BF16(),
        "total_epochs": 4,
        "warmup_epochs": 1,
        "cooldown_epochs": 1,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", witnessed_by(["2x2"], ["2x2", "4x1", "uneven"]))
def test_a_state_goes_on_exactly_from_every_step(layout, way):
    nodes = NODES[layout]
    chosen = settings(global_skips=3, batches_to_wait=2, steps_per_epoch=7, **WAYS[way])
    whole = run(nodes, chosen, steps=24)

    def program(groups):
        failures = []
        for after in range(1, 16):
            first = DasoMember(TENSORS, chosen, groups)
            arrays = start_of(TENSORS)
            train(first, groups, TENSORS, arrays, 0, after)
            state = first.state_dict()
            # the run that goes on is not disturbed by having been asked
            second = DasoMember(TENSORS, chosen, groups)
            second.load_state_dict(state)
            for member in (second, first):
                copied, trace = [x.copy() for x in arrays], []
                train(member, groups, TENSORS, copied, after, 24, trace)
                for step, of_step in enumerate(trace, after):
                    for x, expected in zip(of_step, whole[groups.rank][0][step], strict=True):
                        if not np.array_equal(x, expected):
                            failures.append((after, step))
        return failures

    assert World().run(nodes, program) == [[]] * nodes.size


def test_a_state_of_other_settings_or_ranks_is_refused():
    def program(groups):
        member = DasoMember(TENSORS, settings(), groups)
        other = DasoMember(TENSORS, settings(merge="delta"), groups)
        return member, other.state_dict(), member.state_dict()

    results = World().run(NODES["2x2"], program)
    member, other, _ = results[0]
    with pytest.raises(StateError, match="merge differ"):
        member.load_state_dict(other)
    with pytest.raises(StateError, match="rank 1, given to rank 0"):
        member.load_state_dict(results[1][2])
    with pytest.raises(StateError, match="its format is 'int'"):
        member.load_state_dict(3)


def test_losses_are_averaged_and_ranks_agree_on_b():
    results = run(NODES["2x2"], settings(patience=0, global_skips=4), steps=9, ends=[2, 5, 8])
    told = [stats["epochs"] for _, stats in results]
    assert told[1:] == told[:-1]
    assert [epoch["loss"] for epoch in told[0]] == [3.5, 6.5, 9.5]
    assert [epoch["global_skips"] for epoch in told[0]] == [4, 4, 2]
    assert results[0][1]["global_skips"] == 1


def test_a_state_knows_the_epochs_before_it():
    def program(groups):
        first, second = (DasoMember(TENSORS, settings(steps_per_epoch=2), groups) for _ in range(2))
        arrays = start_of(TENSORS)
        train(first, groups, TENSORS, arrays, 0, 4, ends=[1, 3])
        second.load_state_dict(first.state_dict())
        return first.stats()["epochs"], second.stats()["epochs"]

    for before, after in World().run(NODES["2x2"], program):
        assert len(before) == 2
        assert after == before


def test_a_loss_on_some_ranks_only_is_an_error_on_all():
    def program(groups):
        member = DasoMember(TENSORS, settings(), groups)
        with pytest.raises(MismatchError, match=r"a loss for epoch_end\(\)"):
            member.end_epoch(start_of(TENSORS), 1.0 if groups.rank else None)

    World().run(NODES["2x2"], program)


def test_ranks_that_disagree_are_told_so():
    def program(groups):
        with pytest.raises(MismatchError, match="global_skips"):
            DasoMember(TENSORS, settings(global_skips=4 + groups.rank), groups)

    World().run(NODES["2x2"], program)


def test_buffers_become_their_mean():
    def program(groups):
        member = DasoMember(TENSORS, settings(), groups)
        buffers = {"mean": np.full((2, 3), groups.rank, np.float32), "var": np.full(3, groups.rank, np.float64)}
        member.average(buffers)
        return buffers

    for buffers in World().run(NODES["uneven"], program):
        assert (buffers["mean"] == 2).all()
        assert (buffers["var"] == 2).all()


def test_bytes_between_nodes_are_those_of_the_issue():
    """At most twice the model, divided by ranks of a node and B, per rank and batch."""
    tensors = [ParameterSpec("w", (64, 512))]
    for form in ("sharded", "rotate"):
        results = run(NODES["2x2"], settings(form=form, global_skips=4), tensors, steps=32)
        sent = [stats["bytes_between_nodes"] / 32 for _, stats in results]
        assert all(x <= 2 * 4 * 64 * 512 / 2 / 4 for x in sent)
        compressed = run(NODES["2x2"], settings(form=form, compression=Adaptive(64)), tensors, steps=400)
        assert all(s["bytes_between_nodes"] / 400 < x / 20 for (_, s), x in zip(compressed, sent, strict=True))


@pytest.mark.parametrize("form", ["sharded", "rotate"])
@pytest.mark.parametrize("length", [9, 11, 12])
def test_large_values_go_in_parts_and_change_nothing(monkeypatch, form, length):
    nodes = NODES["2x2"]
    chosen = settings(global_skips=4, batches_to_wait=4, form=form)
    whole = run(nodes, chosen, MIXED, steps=12, ends=[length - 1])
    monkeypatch.setattr(share_sync, "_PART_BYTES", 1024)
    world = World()
    parts = run(nodes, chosen, MIXED, steps=12, ends=[length - 1], world=world)
    for (found, _), (expected, _) in zip(parts, whole, strict=True):
        for of_step, of_whole in zip(found, expected, strict=True):
            for x, y in zip(of_step, of_whole, strict=True):
                np.testing.assert_array_equal(x, y)
    assert any("part.3" in name for name in world.names)
    assert len(set(world.issued.values())) == 1


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_are_rows_and_cover_everything_once(shares):
    flat = FlatTensors(MIXED, "float32", shares)
    seen = np.zeros(flat.size, int)
    for share in flat.shares:
        for piece in share.pieces:
            seen[piece.at] += 1
            tensor = MIXED[piece.tensor]
            assert int(np.prod(piece.shape)) == piece.within.stop - piece.within.start == piece.at.stop - piece.at.start
            if tensor.name == "w":
                assert piece.shape[1:] == (64,)
    assert (seen == 1).all()
    assert max(s.size for s in flat.shares) <= flat.size / shares + 300


def test_more_shares_than_elements():
    nodes = Nodes.of_equal(8, 4)
    tensors = [ParameterSpec("w", (3,))]
    for compression in (None, TopK(0.5)):
        traces = run(nodes, settings(batches_to_wait=0, global_skips=1, compression=compression), tensors, steps=3)
        for trace, _ in traces:
            np.testing.assert_array_equal(trace[2][0], traces[0][0][2][0])


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"form": "ring"}, ValueError, "form must be one of 'sharded', 'rotate'"),
        ({"merge": "mean"}, ValueError, "must be 'paper', 'delta', or the weight"),
        ({"merge": 0}, ValueError, "greater than 0 and at most 1"),
        ({"merge": True}, ValueError, "greater than 0 and at most 1"),
        ({"compression": FP16()}, UnsupportedError, r"Use BF16\(\)"),
        ({"blocking_compression": Policy([("w", FP16())])}, UnsupportedError, r"Use BF16\(\)"),
        ({"compression": Percentile(90)}, UnsupportedError, r"Percentile\(percentile=90.* error_feedback=True"),
        ({"blocking_compression": Policy([("w", OneBit(error_feedback=False))])}, UnsupportedError, "would be lost"),
        ({"compression": 3}, TypeError, "compression=3: give a compressor"),
        ({"blocking_compression": "fp16"}, UnsupportedError, r"blocking_compression=FP16\(\): changes below"),
        ({"blocking_compression": 16}, TypeError, "blocking_compression=16: give a compressor"),
        ({"blocking_compression": OneBit}, TypeError, "blocking_compression=OneBit is a class"),
        ({"average_state": 1}, ValueError, "average_state must be True or False"),
        ({"schedule": 4}, TypeError, "give a DasoSchedule"),
    ],
)
def test_settings_out_of_range_are_refused(given, error, told):
    with pytest.raises(error, match=told):
        DasoSettings(**{"schedule": DasoSchedule(), **given})


@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("form", ["sharded", "rotate"])
@pytest.mark.parametrize("compressor", [NoCompression(), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("layout", ["4x1", "alone"])
def test_when_ranks_come_or_go_nothing_is_lost(layout, compressor, form, after):
    """With merge="delta" the mean of the parameters, once all has arrived and is paid, has every update of all ranks.

    It has those until the last commit, whatever was done since, and however far that had got.
    """
    nodes = NODES[layout]
    tensors = [t._replace(dtype="float64") for t in TENSORS]
    chosen = settings(compression=compressor, merge="delta", global_skips=3, batches_to_wait=2, form=form)

    def program(groups):
        member = DasoMember(tensors, chosen, groups)
        arrays = start_of(tensors)
        train(member, groups, tensors, arrays, 0, after)
        kept, then = member.keep(), [x.copy() for x in arrays]
        train(member, groups, tensors, arrays, after, after + 4)
        member.go_back(kept)
        assert member.batches == after
        member.land(then)
        member.pay(then, nodes.size)
        return then, member.agreed()

    results = World().run(nodes, program)
    agreed = results[0][1]
    for i, t in enumerate(tensors):
        mean = sum(arrays[i] for arrays, _ in results) / nodes.size
        expected = start_of(tensors)[i] + sum(
            len(ranks) / nodes.size * update(tensors, node, step)[i]
            for node, ranks in enumerate(nodes.members)
            for step in range(after)
        )
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-9, err_msg=t.name)

    def other(groups):
        member = DasoMember(tensors, chosen, groups)
        member.go_on_from(agreed, None)
        assert member.clock.sent_at is None
        arrays = start_of(tensors)
        train(member, groups, tensors, arrays, after, 12)
        return member.stats()["batches"], member.clock.steps

    assert World().run(NODES["3x2"], other) == [(12, 12)] * 6


@pytest.mark.parametrize("wrong", [0, 3, -1, 2.0, True])
def test_ranks_per_node_must_divide(wrong):
    with pytest.raises(ValueError, match="divides the 4 ranks"):
        Nodes.of_equal(4, wrong)


@pytest.mark.parametrize("compression", [None, TopK(0.1)], ids=["values", "changes"])
def test_a_state_that_some_ranks_have_loaded_is_an_error_on_all(compression):
    nodes = NODES["2x2"]
    chosen = settings(global_skips=3, batches_to_wait=1, compression=compression, blocking=compression)

    def program(groups):
        member, arrays = DasoMember(TENSORS, chosen, groups), start_of(TENSORS)
        train(member, groups, TENSORS, arrays, 0, 6, ends=[5])
        state, again = member.state_dict(), DasoMember(TENSORS, chosen, groups)
        if groups.rank < 2:
            again.load_state_dict(state)
        with pytest.raises(MismatchError, match="epoch"):
            train(again, groups, TENSORS, arrays, 6, 12)

    World().run(nodes, program)
