from __future__ import annotations

from typing import Any

import pytest

from hvd_compress import QSGD, Adaptive, NoCompression, OneBit, Percentile, TopK
from hvd_compress._keras.names import stable_name, unique
from hvd_compress._keras.warmup import compression_at, described, later_of, same, tightened, warmup_stages


def test_topk_tightens_as_in_deep_gradient_compression() -> None:
    # Lin et al. 2018, section 3.3: sparsity 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 %
    ratios = [tightened(TopK(0.001), epoch).ratio for epoch in range(1, 6)]
    assert ratios == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]


def test_percentile_drops_what_topk_does_not_keep() -> None:
    percentiles = [tightened(Percentile(99), epoch).percentile for epoch in range(1, 5)]
    assert percentiles == [75, 93.75, 98.4375, 99]
    assert tightened(Percentile(50, error_feedback=True), 1) == Percentile(50, error_feedback=True)


def test_adaptive_tightens_likewise() -> None:
    assert [tightened(Adaptive(pi=64), epoch).pi for epoch in range(1, 5)] == [4, 16, 64, 64]
    assert tightened(Adaptive(pi=2), 1).pi == 2


@pytest.mark.parametrize("compression", [OneBit(), QSGD(bits=4), TopK(k=7), NoCompression(), "someone's"])
def test_others_stay_as_they_are(compression: Any) -> None:
    assert tightened(compression, 1) is compression


@pytest.mark.parametrize(
    ("dense", "warmup", "expected"),
    [
        (0, 0, {0: 0.01}),
        (2, 0, {0: None, 2: 0.01}),
        (0, 1, {0: 0.25, 1: 0.01}),
        (1, 2, {0: None, 1: 0.25, 2: 0.0625, 3: 0.01}),
    ],
)
def test_stages(dense: int, warmup: int, expected: dict[int, float | None]) -> None:
    stages = warmup_stages(TopK(0.01), dense, warmup)
    assert {epoch: getattr(c, "ratio", None) for epoch, c in stages.items()} == expected


def test_a_stage_lasts_until_the_next_begins() -> None:
    stages = {0: "a", 3: "b", 5: "c"}
    assert [compression_at(stages, epoch) for epoch in range(7)] == list("aaabbcc")


def test_same_compares_what_a_compressor_does() -> None:
    assert same(TopK(0.1), TopK(0.1))
    assert not same(TopK(0.1), TopK(0.2))
    assert not same(OneBit(), NoCompression())


def test_the_later_stage_counts() -> None:
    stages = warmup_stages(TopK(0.01), dense_epochs=1, warmup_epochs=1)
    dense, quarter, last = stages[0], stages[1], stages[2]
    assert later_of(stages, dense, described(quarter)) == quarter
    assert later_of(stages, last, described(quarter)) == last
    assert later_of(stages, quarter, described(dense)) is quarter
    # what is no stage says nothing
    assert later_of(stages, quarter, described(OneBit())) is quarter


def test_names_survive_the_models_around_a_layer() -> None:
    assert stable_name("sequential_3/dense/kernel") == stable_name("dense/kernel") == "dense/kernel"
    assert stable_name("w") == "w"
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a.2", "a.3"]
    awkward = unique(["v", "v", "v.1", "v.1", "v.1.3"])
    assert len(set(awkward)) == 5
    assert awkward[0] == "v"
