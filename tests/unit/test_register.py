"""A compressor of somebody else: registered, found by name, number and entry point, and told what is wrong with it."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import re
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import hvd_compress
from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Auto,
    Blockwise,
    Compressor,
    ConstantThreshold,
    EFSignSGD,
    Key,
    Natural,
    NoCompression,
    OneBit,
    ParameterServer,
    Percentile,
    Policy,
    RandomK,
    Ring,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    from_config,
    register,
)
from hvd_compress._keras.warmup import tightened
from hvd_compress.cli.predict import predict
from hvd_compress.compressors import NOT_FINITE, Body, named, registry
from hvd_compress.cost import Network, speed_of
from hvd_compress.engine import exchanged
from hvd_compress.errors import ContractError, WireError
from hvd_compress.gossip.settings import GossipSettings
from hvd_compress.loopback import Loopback
from hvd_compress.testing import check_compressor
from hvd_compress.wire import open_payload
from tests.outsider import SignSum


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def variant(**members: Any) -> type[Compressor]:
    """A class like SignSum with other members, not registered."""
    body = {"id": "variant", "codec": 201, "__annotations__": {"id": ClassVar[str], "codec": ClassVar[int]}, **members}
    kind = types.new_class("Variant", (SignSum,), exec_body=lambda of: of.update(body))
    return dataclasses.dataclass(frozen=True)(kind)


# -- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", [SignSum(), SignSum(0.5), SignSum(error_feedback=False)], ids=repr)
def test_it_keeps_the_contract(compressor: Compressor) -> None:
    check_compressor(compressor)


def test_it_is_found_by_configuration_name_and_number() -> None:
    assert from_config(SignSum(2.0).get_config()) == SignSum(2.0)
    assert named("signsum:3") == named("sign-sum:factor=3") == SignSum(3)
    assert exchanged("signsum") == SignSum()
    x = np.array([1.0, -3.0], np.float32)
    assert hvd_compress.decode(SignSum(2.0).encode(x)).tolist() == [4.0, -4.0]
    assert Policy({"*.weight": "signsum:3"}).for_tensor("a.weight") == SignSum(3)
    assert Auto(["signsum"]).candidates == (SignSum(),)


@pytest.mark.parametrize(
    ("exchange", "settings"),
    [("two_phase", {}), ("allgather", {}), ("hierarchical", {"ranks_per_host": 2}), (ParameterServer(), {})],
    ids=["two_phase", "allgather", "hierarchical", "parameter_server"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_works_in_every_exchange(exchange: Any, settings: Any, dtype: str) -> None:
    ranks = Loopback(4, SignSum(), exchange, **settings)
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((37, 101)).astype(dtype) for _ in range(4)]
    total, steps = np.zeros((37, 101)), 40
    for _ in range(steps):
        results = ranks.allreduce(given, name="w")
        assert len({result.tobytes() for result in results}) == 1
        total += results[0]
    # with error feedback what is left out comes later
    assert np.abs(total / steps - np.mean(given, axis=0)).mean() < 0.2


def test_a_step_that_is_taken_back_restores_its_residuals() -> None:
    ranks = Loopback(2, SignSum(), "two_phase")
    given = [np.random.default_rng(rank).standard_normal(1000).astype(np.float32) for rank in range(2)]
    ranks.allreduce(given, name="w")
    before = [ranks.residual("w", rank) for rank in range(2)]
    bad = [given[0].copy(), given[1]]
    bad[0][7] = np.nan
    assert not np.isfinite(ranks.allreduce(bad, name="w")[1]).all()
    for rank in range(2):
        np.testing.assert_allclose(ranks.residual("w", rank), before[rank], atol=2e-6)


def test_advise_predicts_it() -> None:
    network = Network.on_paper(bandwidth=1e9, latency=50e-6, ranks=4)
    rows = predict([(1024, 1024)], network, {SignSum(): speed_of(SignSum())})
    assert {row.exchange for row in rows if row.compressor == SignSum()} == {"two_phase", "allgather"}
    assert not any(row.is_free for row in rows if row.compressor == SignSum())


def test_others_ask_it_instead_of_its_class() -> None:
    class Tightening:
        def keeping(self, share: float) -> Any:
            return dataclasses.replace(self, factor=share)  # type: ignore[type-var]

        def kept_share(self, numel: int) -> float:
            return 0.125

    kind = register(variant(**{k: v for k, v in vars(Tightening).items() if not k.startswith("_")}))
    assert tightened(kind(), 2).factor == 0.0625  # type: ignore[call-arg]
    assert tightened(SignSum(), 1) == SignSum()
    assert kind().kept_share(100) == 0.125


# -- registering -----------------------------------------------------------------------------------------------------


def test_a_cell_that_runs_again_replaces_its_class() -> None:
    first, second = register(variant()), register(variant())
    assert first is not second
    assert type(named("variant")) is second
    exchanged(first())  # instances that are left over stay usable
    with pytest.raises(ValueError, match="id='variant' is taken by"):
        register(variant(codec=202))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"id": "onebit"}, "id='onebit' is taken by hvd_compress.compressors.onebit.OneBit"),
        ({"id": "auto"}, "id='auto' is taken by this package"),
        ({"id": "signsum"}, "id='signsum' is taken by tests.outsider.SignSum"),
        ({"id": "Sign-Sum"}, "lower-case letters and digits"),
        ({"id": 3}, "lower-case letters and digits"),
        ({"codec": 1}, "codec=1 must be an integer from 192 to 255"),
        ({"codec": 256}, "codec=256 must be an integer from 192 to 255"),
        ({"codec": "200"}, "codec='200' must be"),
        ({"codec": 200}, "codec=200 is taken by tests.outsider.SignSum"),
        ({"coded_codec": 200}, "coded_codec=200 is taken by"),
        ({"coded_codec": 201}, "must differ"),
    ],
    ids=str,
)
def test_ids_and_numbers_that_are_taken_or_out_of_range(members: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        register(variant(**members))


def test_classes_that_are_no_compressors() -> None:
    class Unfinished(Compressor):
        def body_bytes(self, numel: int, group: int) -> int:
            return 0

    class Plain(SignSum):
        pass

    bad: list[tuple[Any, str]] = [
        (3, "derive it from hvd_compress.Compressor"),
        (SignSum(), "give its class"),
        (Unfinished, "does not define decode_body, encode_body"),
        (Plain, "frozen dataclass"),
        (dataclasses.dataclass(frozen=True)(type("Ownless", (SignSum,), {})), "an id and a codec of its own"),
        (variant(reducible=True), "reducible"),
        (variant(__post_init__=lambda self: 1 / 0), "decoder"),
    ]
    for kind, said in bad:
        with pytest.raises(TypeError, match=said):
            register(kind)


def test_what_is_not_registered_is_refused_where_it_is_used() -> None:
    for use in (exchanged, check_compressor, lambda c: Policy({"*": c})):
        with pytest.raises(TypeError, match="not registered"):
            use(variant(id="nobody", codec=3)())
        with pytest.raises(TypeError, match="not registered"):
            use(variant(id="nobody", codec=222)())


# -- entry points ----------------------------------------------------------------------------------------------------


def points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    made = [importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: made if group == registry.ENTRY_POINTS else []
    )


def test_an_entry_point_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = SignSum().encode(np.ones(3, np.float32))
    monkeypatch.setattr(registry, "_registered", {})
    points(monkeypatch, broken="nowhere.at.all:Broken", signsum="tests.outsider:SignSum")
    assert named("onebit") == hvd_compress.OneBit()
    assert not registry._registered
    with pytest.raises(ValueError, match=r"known are.*signsum"):
        from_config({"id": "nothing"})
    assert not registry._registered
    assert hvd_compress.decode(payload).tolist() == [1, 1, 1]
    assert registry._registered == {"signsum": SignSum}
    monkeypatch.setattr(registry, "_registered", {})
    assert named("signsum:2") == SignSum(2)


def test_an_entry_point_that_fails_is_told_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, broken="nowhere.at.all:Broken", other="tests.outsider:SignSum")
    said = r"entry point 'broken' = 'nowhere.at.all:Broken'.*ModuleNotFoundError"
    for ask in (lambda: named("broken"), lambda: from_config({"id": "broken"})):
        with pytest.raises(ValueError, match=said):
            ask()
    with pytest.raises(ValueError, match="its name must be that id"):
        named("other")
    kind = register(variant())
    payload = kind().encode(np.ones(3, np.float32))
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(WireError, match=said):
        hvd_compress.decode(payload)


# -- mistakes --------------------------------------------------------------------------------------------------------


def _encoding(change: Callable[..., Any]) -> dict[str, Any]:
    def encode_body(self: Any, x: Any, gradient: Any, body: Any, group: int, key: Any) -> Any:
        return change(self, x, gradient, body, group, key)

    return {"encode_body": encode_body}


def _encode(*arguments: Any) -> Body:
    return SignSum.encode_body(*arguments)


def _forgets_feedback(self: Any, x: Any, gradient: Any, *rest: Any) -> Body:
    return _encode(self, x + gradient if gradient.size else x, np.empty(0, x.dtype), *rest)


def _owes_too_much(self: Any, x: Any, gradient: Any, *rest: Any) -> Body:
    done = _encode(self, x, gradient, *rest)
    x *= 1.5 if gradient.size else 1
    return done


def _writes_gradient(self: Any, x: Any, gradient: Any, *rest: Any) -> Body:
    done = _encode(self, x, gradient, *rest)
    (gradient if gradient.size else x)[:] = 0
    return done


def _hides_nan(self: Any, x: Any, gradient: Any, *rest: Any) -> Body:
    np.nan_to_num(x, copy=False, posinf=1, neginf=1)
    return _encode(self, x, np.nan_to_num(gradient, posinf=1, neginf=1), *rest)


def _poisons(self: Any, x: Any, gradient: Any, *rest: Any) -> Body:
    if not np.isfinite(gradient).all():
        x += gradient
        return NOT_FINITE
    return _encode(self, x, gradient, *rest)


def _draws(self: Any, x: Any, gradient: Any, body: Any, *rest: Any) -> Body:
    done = _encode(self, x, gradient, body, *rest)
    return done._replace(used=min(done.used + 8, body.size))


def _overruns(self: Any, x: Any, gradient: Any, body: Any, *rest: Any) -> Body:
    behind = np.lib.stride_tricks.as_strided(body, (body.size + 4,))
    behind[-4:] = 1
    return _encode(self, x, gradient, body, *rest)


def _fails(self: Any, x: Any, *rest: Any) -> Body:
    raise IndexError("list index out of range")


def _decode_to(change: Callable[..., Any]) -> dict[str, Any]:
    def decode_body(self: Any, header: Any, body: Any, out: Any, scale: Any, add: bool) -> Any:
        return change(SignSum.decode_body, self, header, body, out, scale, add)

    return {"decode_body": decode_body}


MISTAKES = {
    "body too small": ({"body_bytes": lambda self, numel, group: numel // 16}, "encode_body of .* bytes"),
    "body_bytes is no int": ({"body_bytes": lambda self, numel, group: numel / 8}, r"body_bytes\(.* must be an int"),
    "body_bytes is None": ({"body_bytes": lambda self, numel, group: None}, "is None; it must be an int"),
    "group 0": ({"group_numel": lambda self, shape: 0}, "group_numel.* must be an int from 1"),
    "raises": (_encoding(_fails), "IndexError: list index out of range"),
    "returns None": (_encoding(lambda *a: _encode(*a) and None), "returned None; it must return a Body"),
    "returns a number": (_encoding(lambda *a: _encode(*a).used), r"returned \d+; it must return a Body"),
    "uses more": (_encoding(lambda *a: Body(10**9)), "at most the"),
    "entries of 33 bits": (_encoding(lambda *a: _encode(*a)._replace(entries=2**32)), "32 bits"),
    "forgets feedback": (_encoding(_forgets_feedback), "it must leave .* With error feedback"),
    "owes too much": (_encoding(_owes_too_much), "it must leave"),
    "writes the gradient": (_encoding(_writes_gradient), "changed? the gradient|changes the gradient"),
    "hides NaN": (_encoding(_hides_nan), "nan was hidden|changes the gradient"),
    "poisons": (_encoding(_poisons), "residual"),
    "padding": (_encoding(_draws), "too long|different bytes|residual cannot be put back"),
    "overruns": (_encoding(_overruns), "beyond the body"),
    "decode raises": (_decode_to(lambda f, *a: 1 / 0), "cannot be decoded.*ZeroDivisionError"),
    "decode returns None": (_decode_to(lambda f, *a: f(*a) and None), "returned None; it must return True"),
    "decode ignores scale": (_decode_to(lambda f, s, h, b, o, c, add: f(s, h, b, o, np.float32(1), add)), "scale=0.5"),
    "decode ignores add": (_decode_to(lambda f, s, h, b, o, c, add: f(s, h, b, o, c, False)), "add=True"),
    "decode leaves bytes": (_decode_to(lambda f, s, h, b, o, c, add: bool(b.take(1, "f4").size)), "too long"),
    "decode by settings": (
        _decode_to(lambda f, s, h, b, o, c, add: f(s, h, b, o, c * np.float32(s.factor), add)),
        "take all from header and body",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_compressor_tells_a_mistake(mistake: str) -> None:
    members, said = MISTAKES[mistake]
    compressor = register(variant(**members))(factor=2.0)  # type: ignore[call-arg]
    with pytest.raises(ContractError, match=said) as error:
        check_compressor(compressor)
    assert "Variant(factor=2.0" in str(error.value)
    assert isinstance(error.value, AssertionError)


@pytest.mark.parametrize("mistake", ["body too small", "raises", "returns None", "uses more", "decode raises"])
def test_an_exchange_tells_a_mistake_with_the_name(mistake: str) -> None:
    compressor = register(variant(**MISTAKES[mistake][0]))()
    with pytest.raises((ContractError, WireError), match=r"Variant\(factor=1\.0"):
        Loopback(3, compressor, "two_phase").allreduce([np.ones(1000, np.float32)] * 3)


def test_event_triggered_averaging_takes_it() -> None:
    settings = GossipSettings(ConstantThreshold(0), Ring(), compression="signsum:2")
    assert settings.compression == SignSum(2)
    assert settings.mixing == "mean_preserving"


# classes of this package, of which users derive their own
DERIVED: list[Compressor] = [
    OneBit(), Threshold(0.5), Adaptive(pi=4), TopK(0.2), TopK(0.2, coding="golomb"), TopK(0.25, chunk=64), QSGD(bits=4),
    Percentile(90), Percentile(90, coding="golomb"), EFSignSGD(), SignSGD(), TernGrad(), Natural(), Blockwise(bits=8),
    RandomK(0.2), NoCompression(), BF16(), FP16(),
]  # fmt: skip


@pytest.mark.parametrize("compressor", DERIVED, ids=repr)
def test_a_class_that_is_derived_from_one_of_ours_reads_what_it_has_written(compressor: Compressor) -> None:
    kind = type(compressor)
    members = {"id": "derived", "codec": 230, "coded_codec": None if kind.coded_codec is None else 231}
    derived = copy.copy(compressor)
    # as a class statement does, for compressors that are dataclasses
    object.__setattr__(derived, "__class__", type("Derived", (kind,), members))
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    payload = derived.encode(x, key=Key("w"))
    assert open_payload(payload)[0].codec in (230, 231)
    np.testing.assert_array_equal(derived.decode(payload), compressor.decode(compressor.encode(x, key=Key("w"))))
    with pytest.raises(WireError, match="payload of codec"):
        compressor.decode(payload)
