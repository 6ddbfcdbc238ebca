"""The pilot: what it predicts, typed by hand, and where it sends tensors when it is told how long steps took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hvd_compress import FP16, Adaptive, Auto, Blockwise, Hierarchical, NoCompression, OneBit, TwoPhase
from hvd_compress.cost import Line, LinkSpeed, Network, Speed, speeds
from hvd_compress.engine import Pilot, Routing, Tensor
from hvd_compress.engine.pilot import timed_compressors
from hvd_compress.exchange import checked_exchange, make_plan
from hvd_compress.policy import Assigned

RANKS = 4
FIXED, PER_BYTE = 1e-3, 1e-7
# in the order of the forward pass; the last three share the first bucket
TENSORS = [
    Tensor("a.weight", (64, 512)),
    Tensor("b.weight", (64, 512)),
    Tensor("b.bias", (64,)),
    Tensor("head.bias", (10,)),
]
BUCKETS = (["head.bias", "b.bias", "b.weight"], ["a.weight"])
# two steps after a change do not count, nine do
TRIAL = 11


def pilot(
    auto: Auto = Auto([OneBit(), Adaptive(pi=64)]),  # noqa: B008 - immutable
    tensors: Sequence[Tensor] = TENSORS,
    per_byte: float = PER_BYTE,
    min_numel: int = 1000,
    exchange: str = "auto",
    speed: Speed = Speed(),  # noqa: B008
    bucket_bytes: int = 4 * 64 * 520,
    hosts: int = 0,
) -> Pilot:
    line = Line(FIXED, per_byte)
    link = LinkSpeed(allreduce=line, allreduce_half=line, alltoall=line, allgather=line)
    network = Network(RANKS, link)
    if hosts:
        network = Network(RANKS, link, RANKS // hosts, inside=link, between=link)
    routing = Routing(None, checked_exchange(exchange), min_numel, bucket_bytes)
    return Pilot(auto, tensors, routing, network, dict.fromkeys((FP16(), *auto.candidates), speed))


def chosen(of: Pilot) -> list[str]:
    routing = of.routing()
    return [routing.compressor_of(tensor.name).id for tensor in TENSORS]


def test_buckets_and_what_each_way_takes() -> None:
    it = pilot(exchange="two_phase")
    report = it.report()
    assert [bucket["tensors"] for bucket in report["buckets"]] == list(BUCKETS)
    for bucket, numel in zip(report["buckets"], (64 * 512 + 74, 64 * 512), strict=True):
        assert bucket["predicted_seconds"].keys() == {"none", "fp16", "onebit", "adaptive"}
        for way, itemsize in (("none", 4), ("fp16", 2)):
            ring = 2 * (RANKS - 1) / RANKS * itemsize * numel
            assert bucket["predicted_seconds"][way] == pytest.approx(FIXED + PER_BYTE * ring)
    # one-bit in two phases: of each of 4 chunks a header of 40 bytes, a bit per element, two means for each of 16 rows
    hop = (RANKS - 1) * (40 + 16 * 512 // 8 + 16 * 8)
    onebit = report["buckets"][1]["predicted_seconds"]["onebit"]
    assert onebit == pytest.approx(2 * (FIXED + PER_BYTE * hop))
    assert report["link"]["alltoall"] == report["link"]["allgather"]


@pytest.mark.parametrize(
    ("rows", "per_byte", "auto", "expected"),
    [
        # alike: "auto" counts 32 KiB for a collective, here it takes the time of 100 kB
        (64, 1e-8, "allgather", "auto"),
        (1024, 1e-8, "two_phase", "auto"),
        # of 12 MB on the first link, and of 10 bytes on the other
        (1024, 8e-11, "two_phase", "allgather"),
        (64, 1e-4, "allgather", "two_phase"),
    ],
)
def test_the_link_says_what_a_collective_is_worth(rows: int, per_byte: float, auto: str, expected: str) -> None:
    shape = (rows, 512)
    it = pilot(Auto([OneBit()]), [Tensor("w", shape)], per_byte)
    assert make_plan("auto", OneBit(), shape, RANKS).exchange.id == auto
    assert it.report()["buckets"][0]["exchange"] == expected
    # 4 ranks: three times all payloads at once, or 3/4 of them twice, in chunks with a header of 40 bytes
    payload = rows * 512 // 8 + rows * 8
    in_one = FIXED + per_byte * (RANKS - 1) * (40 + payload)
    in_two = 2 * (FIXED + per_byte * (RANKS - 1) * (40 + payload // RANKS))
    assert it.report()["buckets"][0]["predicted_seconds"]["onebit"] == pytest.approx(min(in_one, in_two))
    asked = pilot(Auto([OneBit()]), [Tensor("w", shape)], per_byte, exchange=auto)
    assert asked.routing().exchange_of("w").id == auto


def test_kernels_are_called_for_every_piece_of_a_tensor() -> None:
    slow = Speed(encode=Line(0.5, 0.0))

    def more(tensors: Sequence[Tensor], **settings: int) -> list[float]:
        free, paid = (
            pilot(tensors=tensors, speed=s, exchange="two_phase", **settings).report()["buckets"]
            for s in (Speed(), slow)
        )
        assert all(
            a["predicted_seconds"]["none"] == b["predicted_seconds"]["none"] for a, b in zip(free, paid, strict=True)
        )
        return [
            b["predicted_seconds"]["onebit"] - a["predicted_seconds"]["onebit"] for a, b in zip(free, paid, strict=True)
        ]

    # alone: a piece for each owner, and the sum of its own piece; small tensors are together one more tensor
    assert more(TENSORS) == [pytest.approx(2 * 2.5), pytest.approx(2.5)]
    # together: each rank owns a half of one of them
    assert more(TENSORS[:2], bucket_bytes=2**20) == [pytest.approx(2.5)]


def test_what_is_too_small_is_not_compressed() -> None:
    it = pilot(min_numel=10**6)
    for bucket in it.report()["buckets"]:
        assert bucket["predicted_seconds"].keys() == {"none", "fp16"}
    it = pilot(tensors=[Tensor("nothing", (0, 3)), Tensor("w", (64, 512))])
    assert [bucket["tensors"] for bucket in it.report()["buckets"]] == [["w"]]


def test_without_tensors_there_is_nothing_to_choose() -> None:
    it = pilot(tensors=[])
    assert it.report()["configuration"] == "none"
    assert not it.observe([0.1] * 100)


def test_slow_links_compress_and_fast_ones_do_not() -> None:
    assert chosen(pilot(per_byte=1e-6)) == ["adaptive"] * 4
    assert chosen(pilot(per_byte=1e-12)) == ["none"] * 4


def test_a_hierarchy_is_predicted_as_two_phases() -> None:
    flat, deep = pilot(exchange="two_phase"), pilot(exchange="hierarchical")
    assert flat.report()["predicted_seconds"] == deep.report()["predicted_seconds"]
    assert deep.routing().exchange.id == "hierarchical"


def test_a_pilot_measures_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank measures alone another would not know, and they would choose differently."""

    def measured(*_: object) -> float:
        raise AssertionError("measured on this rank")

    monkeypatch.setattr(speeds, "_seconds", measured)
    speeds.copy_speed.cache_clear()
    for exchange in ("two_phase", "hierarchical"):
        pilot(exchange=exchange, hosts=2).report()


def follow(it: Pilot, truth: dict[str, float], rounds: int, noise: np.random.Generator | None = None) -> list[str]:
    """The configurations that were used, one for each comparison between ranks."""
    used = []
    for _ in range(rounds):
        report = it.report()
        name = report["rival"] or report["configuration"]
        used.append(name)
        factor = 1.0 if noise is None else noise.uniform(0.9, 1.1)
        it.observe([truth[name] * factor] * it.seconds_wanted)
    return used


def test_the_routing_follows_what_was_measured() -> None:
    it = pilot(per_byte=1e-6)
    ways = {"none": NoCompression(), "fp16": FP16(), "onebit": OneBit(), "adaptive": Adaptive(pi=64)}
    truth = {"none": 1.0, "fp16": 0.9, "onebit": 0.4, "adaptive": 0.8, "mixed": 9.0}
    seen = set()
    for _ in range(8):
        report, routing = it.report(), it.routing()
        assert isinstance(routing.compressor, Assigned)
        for bucket in report["buckets"]:
            for name in bucket["tensors"]:
                assert routing.compressor_of(name) == ways[bucket["choice"]]
        seen.add(report["configuration"])
        before = report["configuration"]
        changed = it.observe([truth[before]] * it.seconds_wanted)
        assert changed == (it.report()["configuration"] != before)
    assert len(seen) > 1
    assert it.report()["committed"]
    assert it.report()["configuration"] == "onebit"
    assert it.report()["measured_seconds"]["onebit"] == 0.4
    assert it.report()["reason"].startswith("onebit: measured per step: onebit 400 ms")


def test_before_it_is_measured_the_reason_is_a_prediction() -> None:
    report = pilot(per_byte=1e-6).report()
    assert not report["committed"]
    assert report["reason"].startswith("adaptive: predicted per step: adaptive ")
    assert report["measured_seconds"] == {}


def test_ranks_compare_after_a_trial_and_rarely_when_it_is_over() -> None:
    it = pilot(per_byte=1e-6)
    assert it.seconds_wanted == TRIAL
    truth = dict.fromkeys(("none", "fp16", "onebit", "adaptive", "mixed"), 0.1)
    for _ in range(60):
        follow(it, truth, 1)
        if it.report()["committed"]:
            break
    assert not it.explorer.trying
    assert it.seconds_wanted == 20
    # what was chosen stays so while another one has a turn, for which ranks compare as they did in the search
    chosen, wanted = it.report(), []
    for _ in range(40):
        assert it.report()["configuration"] == chosen["configuration"]
        assert it.report()["committed"]
        wanted.append(it.seconds_wanted)
        it.observe([0.1] * wanted[-1])
    assert set(wanted) == {20, TRIAL}


def test_seconds_after_a_change_belong_to_the_old_way() -> None:
    it = pilot(per_byte=1e-6)
    first = it.report()["configuration"]
    # one trial is full, the rest, whose steps went the same way, is no measurement of the next one
    assert it.observe([0.1] * TRIAL + [77.0] * 50)
    second = it.report()["configuration"]
    assert second != first
    assert it.observe([0.1] * TRIAL)
    assert it.report()["measured_seconds"] == {first: 0.1, second: 0.1}


def test_equal_seconds_give_equal_choices() -> None:
    truth = {"none": 0.3, "fp16": 0.28, "onebit": 0.26, "adaptive": 0.29, "mixed": 0.3}
    one, other = (follow(pilot(per_byte=1e-6), truth, 60, np.random.default_rng(3)) for _ in range(2))
    assert one == other
    assert len(set(one)) > 1


def test_two_of_a_kind_are_told_apart() -> None:
    several = Auto([Adaptive(pi=64), Adaptive(pi=16), OneBit()])
    it = pilot(several, per_byte=1e-6)
    assert it.report()["buckets"][0]["predicted_seconds"].keys() == {
        "none", "fp16", "onebit", repr(Adaptive(pi=64)), repr(Adaptive(pi=16)),
    }  # fmt: skip
    assert it.routing().compressor_of("a.weight") == Adaptive(pi=64)


def test_no_more_steps_are_timed_than_a_turn_needs() -> None:
    it = pilot(per_byte=1e-6)
    truth = dict.fromkeys(("none", "fp16", "onebit", "adaptive", "mixed"), 0.021)
    counted = 0
    for _ in range(400):
        report = it.report()
        counted += it.seconds_wanted if report["rival"] else 0
        it.observe([truth[report["rival"] or report["configuration"]]] * it.seconds_wanted)
        if counted and not it.explorer.trying:
            break
    assert counted == 12  # a fifth of a second, and two that do not count


def test_the_speed_of_what_compresses_inside_of_hosts_is_measured_once() -> None:
    auto = Auto([OneBit(), Blockwise()])
    assert (
        timed_compressors(auto, TwoPhase())
        == timed_compressors(auto, Hierarchical())
        == [FP16(), OneBit(), Blockwise()]
    )
    assert timed_compressors(auto, Hierarchical(inside=Blockwise())) == [FP16(), OneBit(), Blockwise()]
    assert timed_compressors(auto, Hierarchical(inside=Adaptive())) == [FP16(), OneBit(), Blockwise(), Adaptive()]


def test_what_compresses_inside_of_hosts_counts() -> None:
    seconds = []
    for inside in (None, Blockwise()):
        line = Line(0, 1e-8)
        link = LinkSpeed(line, line, line, line)
        network = Network(4, link, 2, inside=link, between=link)
        routing = Routing(None, Hierarchical(inside), 1000)
        speeds = dict.fromkeys(timed_compressors(Auto([OneBit()]), routing.exchange), Speed())
        report = Pilot(Auto([OneBit()]), TENSORS, routing, network, speeds).report()
        seconds.append(report["buckets"][0]["predicted_seconds"]["onebit"])
    assert seconds[1] < 0.6 * seconds[0]
