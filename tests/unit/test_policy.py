"""Which tensor gets which compressor."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import hvd_compress
from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Auto,
    ConstantThreshold,
    NoCompression,
    OneBit,
    Percentile,
    Policy,
    PowerSGD,
    Ring,
    SignSGD,
    Threshold,
    TopK,
    from_config,
)
from hvd_compress.async_server import AsyncServerSettings
from hvd_compress.compressors import Compressor
from hvd_compress.engine import (
    Defaults,
    Routing,
    Tensor,
    compressor_of_call,
    describe,
    exchanged,
    horovod_compressor,
    resolved,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import TwoPhase
from hvd_compress.gossip import GossipLoopback, GossipMember, GossipSettings
from hvd_compress.policy import Assigned, check_patterns, given_compression, meant
from hvd_compress.tensors import ParameterSpec

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


class NoneCompressor:
    """As Horovod's own are called, which live in a package of this name."""

    __module__ = "horovod.torch.compression"


class FP16Compressor:
    __module__ = "horovod.tensorflow.compression"


class Own(NoneCompressor):
    __module__ = "someones.models"


def test_rules_are_what_people_write() -> None:
    expected = Policy([("a*", NoCompression()), ("b", FP16()), ("c", Adaptive(pi=32))], default=OneBit())
    for rules in (
        {"a*": "none", "b": "fp16", "c": "adaptive:32"},
        {"a*": NoneCompressor, "b": FP16Compressor, "c": Adaptive()(pi=32)},
        [["a*", NoneCompressor()], ("b", FP16Compressor()), ("c", "adaptive:pi=32")],
        iter([("a*", "None"), ("b", "FP16"), ("c", "Adaptive: 32")]),
    ):
        assert Policy(rules, default="one-bit") == expected
    assert Policy({}, default=FP16Compressor).for_tensor("a") == FP16()
    with pytest.raises(TypeError, match=r"'c'=Adaptive is a class; give a compressor, such as Adaptive\(\.\.\.\)"):
        Policy({"c": Adaptive})
    with pytest.raises(TypeError, match="a rule is a pattern and a compressor"):
        Policy({"c": Own})
    with pytest.raises(ValueError, match="did you mean 'adaptive'"):
        Policy({"c": "adaptiv"})


def test_a_pattern_that_matches_nothing_is_told() -> None:
    policy = Policy({"*.bias": "none", "embeding*": TopK(0.05)}, default=OneBit())
    names = ["embedding.weight", "head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"'embeding\*' matches none of the 3 tensors, such as 'embedding.weight'"):
        policy.check_names(names)
    policy.check_names([*names, "embeding"])
    with pytest.raises(ValueError, match=r"'\*\.bias' matches none of the 0 tensors, such as none"):
        policy.check_names([])
    for compression in (policy, "onebit", None, Auto()):
        if compression is not policy:
            check_patterns(compression, names)
    with pytest.raises(ValueError, match="matches none"):
        check_patterns(policy, names)


def test_members_that_average_parameters_look_at_patterns() -> None:
    wrong = Policy({"nothing": TopK(0.1)}, default=TopK(0.2))
    tensors = [ParameterSpec("w", (40, 30))]
    with pytest.raises(ValueError, match="'nothing' matches none of the 1 tensors, such as 'w'"):
        GossipLoopback(tensors, 2, ConstantThreshold(0), compression=wrong)
    with pytest.raises(ValueError, match="'nothing' matches none"):
        GossipMember(tensors, GossipSettings(ConstantThreshold(0), Ring(), compression=wrong), None, pytest.fail)


NAMES = {
    "none": NoCompression(), "fp16": FP16(), "bf16": BF16(), "onebit": OneBit(), "adaptive": Adaptive(),
    "adaptive:32": Adaptive(pi=32), "adaptive:pi=32": Adaptive(pi=32), "topk:0.01": TopK(0.01), "topk:k=5": TopK(k=5),
    "qsgd:4": QSGD(4), "qsgd:bits=2,norm=max": QSGD(2, norm="max"), "qsgd:2,256": QSGD(2, 256),
    "threshold:1e-3": Threshold(1e-3), "percentile:90": Percentile(90), "auto": Auto(), " OneBit ": OneBit(),
    "top-k:0.5,coding=golomb": TopK(0.5, coding="golomb"), "onebit:tensor": OneBit(group="tensor"),
    "adaptive:group='tensor',error_feedback=False,sample=None": Adaptive(
        group="tensor", error_feedback=False, sample=None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_a_compression_wherever_one_is_given(name: str) -> None:
    expected = NAMES[name]
    assert meant(name) == resolved(name) == expected
    assert describe(name) == describe(expected)
    assert exchanged(name) == exchanged(expected)
    assert horovod_compressor(name, "none", "dense") == horovod_compressor(expected, "none", "dense")
    if isinstance(expected, Compressor):
        assert given_compression("compression", name) == expected
        assert compressor_of_call(name) == compressor_of_call(expected)
        assert AsyncServerSettings(compression=name, answer=name).answer == expected
    if isinstance(expected, Compressor) and expected.feedback:
        assert Auto([name]).candidates == (expected,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("onebot", "did you mean 'onebit'.*Known are 'onebit', 'threshold'"),
        ("", "Known are"),
        ("dgc", "names no compression"),
        ("adaptive:ratio=3", "'ratio=3' is no setting; those of adaptive are pi, group"),
        ("adaptive:pi=3,pi=4", "'pi=4' is no setting"),
        ("adaptive:pi=3,row", "'row' is no setting"),
        ("adaptive:x", "pi must be an integer"),
        ("threshold", "tau"),
        ("fp16:3", "the settings of fp16 are none"),
        ("topk:1", r"give TopK\(k=1\)"),
        ("percentile:0.9", r"Did you mean Percentile\(90\)"),
        ("qsgd:99", "from 1 to 8"),
        ("adaptive:nan", "pi must be an integer"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(name: str, said: str) -> None:
    for take in (meant, resolved, compressor_of_call, lambda n: given_compression("answer", n)):
        with pytest.raises(ValueError, match=said):
            take(name)


def test_ready_compressors_are_called_for_other_settings() -> None:
    assert Defaults.adaptive == Adaptive()
    assert Defaults.adaptive(pi=32) == Adaptive(pi=32)
    assert Defaults.adaptive(32) == Adaptive(32)
    assert Defaults.onebit(group="tensor") == OneBit(group="tensor")
    assert Defaults.topk(k=3)() == TopK()
    assert Defaults.threshold(1e-3) == Threshold(1e-3)
    assert Defaults.auto(["onebit"]) == Auto([OneBit()])
    assert Defaults.percentile(99) == Percentile(99)
    for uncalled in (Defaults.threshold, OneBit, Policy, Auto):
        for take in (lambda c: horovod_compressor(c, None, None), lambda c: given_compression("compression", c)):
            with pytest.raises(TypeError, match=f"compression={uncalled.__name__} is a class; give a compressor, such"):
                take(uncalled)
    with pytest.raises(TypeError, match="pie"):
        Defaults.adaptive(pie=3)


@pytest.mark.parametrize("given", [SignSGD(), PowerSGD(), Policy([("*.w", SignSGD())], default=OneBit())], ids=repr)
def test_what_needs_sums_of_gradients_is_refused_where_parameters_are_averaged(given: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"compression=.*Give"):
        given_compression("compression", given)


def test_settings_are_values_whatever_numbers_they_are_given() -> None:
    for one in (
        TopK(np.float32(0.25)), TopK(k=np.int64(7)), Adaptive(np.int16(8), group=np.int64(512)), QSGD(np.uint8(4)),
        Threshold(np.float64(0.5)), Percentile(np.int32(90)), OneBit(group=np.str_("tensor")), BF16(), FP16(),
        NoCompression(),
    ):  # fmt: skip
        assert eval(repr(one), vars(hvd_compress)) == one
        assert from_config(json.loads(json.dumps(one.get_config()))) == one
        assert hash(one) == hash(eval(repr(one), vars(hvd_compress)))
    for wrong in (None, [], "onebit", {"id": ["onebit"]}, {"id": "onebit", "pi": 3}, {"id": "topk", "ratio": 1}):
        with pytest.raises(ValueError, match=r"configuration|compressor id|ratio"):
            from_config(wrong)


def test_candidates() -> None:
    with pytest.raises(TypeError, match="candidates are compressors"):
        Auto([OneBit])
    with pytest.raises(TypeError, match="give a list of compressors"):
        Auto("onebit")
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
    routing = Routing(POLICY, TwoPhase(), min_numel=1000, bucket_bytes=4 * 30_000)
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


def test_a_rule_that_stands_behind_a_more_general_one_is_told() -> None:
    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"'head\*' never applies, since '\*' stands before it .* special rule first"):
        Policy({"*": OneBit(), "head*": NoCompression()}).check_names(names)
    Policy({"head*": NoCompression(), "*": OneBit()}).check_names(names)
    # what is left for tensors of other models, or the same in other words
    Policy({"head*": NoCompression(), "body*": OneBit(), "*": TopK(0.1)}).check_names(names)
    Policy({"*.weight": NoCompression(), "head.*": OneBit()}).check_names(names)
