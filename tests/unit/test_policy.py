"""Which tensor gets which compressor."""

from __future__ import annotations

import json
from typing import Any

import pytest

import hvd_compress
from hvd_compress import FP16, QSGD, Adaptive, Auto, NoCompression, OneBit, Percentile, Policy, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.engine import Routing, Tensor, compressor_of_call, describe, exchanged, horovod_compressor, resolved
from hvd_compress.errors import UnsupportedError
from hvd_compress.policy import Assigned

POLICY = Policy(
    [
        ("embedding*", TopK(0.05)),
        ("block.[0-9].*.weight", OneBit()),
        ("*.head.weight", FP16()),
        ("*.weigh?", QSGD(4)),
    ],
    default=Adaptive(pi=16),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.weight", TopK(0.05)),
        ("embeddings", TopK(0.05)),
        ("block.3.head.weight", OneBit()),
        ("block.12.head.weight", FP16()),
        ("top.weight", QSGD(4)),
        ("top.weights", Adaptive(pi=16)),
        ("top.Weight", Adaptive(pi=16)),
        ("my.embedding.bias", Adaptive(pi=16)),
    ],
)
def test_the_first_pattern_that_matches_the_whole_name_decides(name: str, expected: Compressor) -> None:
    assert POLICY.for_tensor(name) == expected


def test_without_a_default_the_others_go_uncompressed() -> None:
    assert Policy([("a", OneBit())]).for_tensor("b") == NoCompression()


def test_both_are_values() -> None:
    for one in (POLICY, Auto(), Auto([OneBit(), TopK(0.02)])):
        again = eval(repr(one), vars(hvd_compress))
        assert again == one
        assert hash(again) == hash(one)
        assert json.loads(json.dumps(one.get_config())) == one.get_config()
    assert Policy([["a", OneBit()]]) == Policy((("a", OneBit()),))


def test_ranks_compare_every_setting() -> None:
    others = [
        Policy([*POLICY.rules], default=Adaptive(pi=32)),
        Policy(POLICY.rules[::-1], default=POLICY.default),
        Policy([("Embedding*", TopK(0.05)), *POLICY.rules[1:]], default=POLICY.default),
        Policy([("embedding*", TopK(0.06)), *POLICY.rules[1:]], default=POLICY.default),
        Auto(),
        Auto([OneBit()]),
        Auto([Adaptive(pi=64), OneBit()]),
    ]
    told = [json.dumps(describe(one)) for one in (POLICY, *others)]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize(
    "rules",
    [[("a",)], [(OneBit(), "a")], [("a", OneBit(), 1)], ["ab"], [("a", Auto())], [("a", "auto")], [("a", None)]],
)
def test_what_is_no_rule_is_refused(rules: Any) -> None:
    with pytest.raises(TypeError, match="a rule is a pattern and a compressor"):
        Policy(rules)


def test_what_is_no_default_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a rule is a pattern and a compressor.*None"):
        Policy([], default=None)
    for rules in (None, 3, "onebit"):
        with pytest.raises(TypeError, match="give pairs"):
            Policy(rules)


def test_candidates() -> None:
    with pytest.raises(TypeError, match="candidates are compressors"):
        Auto([OneBit])
    with pytest.raises(ValueError, match="at least one"):
        Auto([])
    for no_candidate in (NoCompression(), FP16(), QSGD(4), OneBit(error_feedback=False), Percentile(90)):
        with pytest.raises(ValueError, match=f"{type(no_candidate).__name__}.* is no candidate"):
            Auto([OneBit(), no_candidate])


def test_what_the_edges_make_of_them() -> None:
    assert resolved("auto") == Auto()
    assert resolved("adaptive") == Adaptive()
    for one in (POLICY, Auto()):
        assert exchanged(one) is one
        assert horovod_compressor(one, "none", "dense") == "dense"
    for one in (POLICY, Auto(), "auto"):
        with pytest.raises(UnsupportedError, match="of an optimizer; give the compressor of this one"):
            compressor_of_call(one)


def test_a_policy_routes_tensors() -> None:
    routing = Routing(POLICY, "two_phase", min_numel=1000, bucket_bytes=4 * 30_000)
    tensors = [
        Tensor("embedding.weight", (100, 100)),
        Tensor("block.1.a.weight", (100, 100)),
        Tensor("block.12.head.weight", (100, 100)),
        Tensor("bias", (100,)),
        Tensor("wide", (100,), "float64", 8),
    ]
    compressed = [tensor.name for tensor in tensors if routing.compresses(tensor, ranks=4)]
    assert compressed == ["embedding.weight", "block.1.a.weight"]
    # two compressors and a small tensor in one bucket; fp16 and a small float64 go through Horovod
    assert routing.divided(tensors, ranks=4) == [["bias", "block.1.a.weight", "embedding.weight"]]


def test_what_auto_chose_is_for_exact_names() -> None:
    chosen = Assigned({"a*": OneBit()})
    assert chosen.for_tensor("a*") == OneBit()
    assert chosen.for_tensor("ab") == NoCompression()
    assert chosen.get_config()["compressors"]["a*"] == OneBit().get_config()
