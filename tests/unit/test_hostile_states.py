"""Whatever a state holds: it is taken over, or a StateError says why not and nothing has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_compress import ConstantThreshold, OneBit, PowerSGD, SlopeThreshold, TopK
from hvd_compress.async_server.gradient_encoder import GradientEncoder
from hvd_compress.daso import DasoMember
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, OuterSGD
from hvd_compress.engine import Ledger, refuse_residuals
from hvd_compress.engine import Tensor as EngineTensor
from hvd_compress.errors import StateError
from hvd_compress.exchange import Bucket
from hvd_compress.feedback import check_state, read_state, redistribute, write_state
from hvd_compress.gossip import GossipLoopback
from hvd_compress.gossip.averager import Averager
from hvd_compress.tensors import ParameterSpec
from tests.hostile import damaged, same
from tests.threads import World
from tests.unit import test_accumulators, test_daso, test_diloco, test_ledger, test_powersgd
from tests.unit.test_feedback import states

torch = pytest.importorskip("torch")

Load = Callable[[Any], Any]


def check_refusals(state: Any, load: Load, kept: Callable[[], Any], least: int) -> None:
    """Load every damaged form of a state; at least so many must be refused, and none may do harm."""
    load(state)
    before, refused = kept(), 0
    for said, wrong in damaged(state):
        try:
            load(wrong)
        except StateError:
            refused += 1
            assert same(kept(), before), f"{said}: refused, but something has changed"
        except Exception as error:
            raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
        else:
            load(state)
    assert refused >= least


def ledger_of(kind: str) -> Ledger[Bucket]:
    plain = test_ledger.ledgers(test_ledger.ROUTINGS["two_phase"])
    test_ledger.step(plain, 0)
    moved = test_ledger.ledgers(test_ledger.DENSE)
    for other, ledger in zip(moved, plain, strict=True):
        other.inherit(ledger)
    adagrad = test_accumulators.ledgers(2)
    test_accumulators.train(adagrad, 0)
    return {"residuals": plain, "debts": moved, "adagrad": adagrad}[kind][1]


@pytest.mark.parametrize("kind", ["residuals", "debts", "adagrad"])
def test_a_ledger_takes_a_state_wholly_or_not_at_all(kind: str) -> None:
    ledger = ledger_of(kind)
    state = ledger.state_dict()
    check_refusals(state, ledger.load_state_dict, ledger.state_dict, 200)


def test_where_nothing_is_exchanged() -> None:
    state = {"format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": {}, "owner_residuals": {}}
    check_refusals(state, refuse_residuals, dict, 50)
    check_refusals(states(1)[0], check_state, dict, 100)


@pytest.mark.parametrize("trigger", [ConstantThreshold(0.1), SlopeThreshold(horizon=1.0)], ids=lambda t: t.id)
def test_an_event_state_is_taken_wholly_or_not_at_all(trigger: Any) -> None:
    tensors = [ParameterSpec("w", (40, 30)), ParameterSpec("v", (3, 5), "float64")]
    group = GossipLoopback(tensors, 3, trigger, compression=TopK(0.05))
    arrays = [[np.full(t.numel, rank + 1.0, t.dtype) for t in tensors] for rank in range(3)]
    for _ in range(4):
        group.step(arrays)
    averager = Averager(group.nodes[1], None)
    check_refusals(averager.state_dict(), lambda s: averager.load(averager.check(s)), averager.state_dict, 250)


def test_an_infinite_slope_would_silence_a_tensor() -> None:
    watch = SlopeThreshold(horizon=1.0).watch(2)
    state = watch.state_dict()
    with pytest.raises(StateError, match=r"slopes .* not finite"):
        watch.load_state_dict({**state, "slopes": np.full(state["slopes"].shape, np.inf)})


@pytest.mark.parametrize("way", ["raw", "adaptive-delta", "rotate-qsgd"])
def test_a_daso_state_is_taken_wholly_or_not_at_all(way: str) -> None:
    def program(groups: Any) -> int:
        chosen = test_daso.settings(global_skips=2, batches_to_wait=1, steps_per_epoch=6, **test_daso.WAYS[way])
        member = DasoMember(test_daso.TENSORS, chosen, groups)
        arrays = test_daso.start_of(test_daso.TENSORS)
        test_daso.train(member, groups, test_daso.TENSORS, arrays, 0, 10, ends=[5])
        state = member.state_dict()
        assert any(of_sync["flight"] is not None for of_sync in state["syncs"])
        if groups.rank in (0, 3):
            check_refusals(state, member.load_state_dict, member.state_dict, 300)
        return groups.rank

    assert World().run(test_daso.NODES["2x2"], program) == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["raw", "adaptive-delta"])
def test_what_is_under_way_in_a_daso_state_is_finite(way: str) -> None:
    def program(groups: Any) -> None:
        chosen = test_daso.settings(global_skips=2, batches_to_wait=1, steps_per_epoch=6, **test_daso.WAYS[way])
        member = DasoMember(test_daso.TENSORS, chosen, groups)
        arrays = test_daso.start_of(test_daso.TENSORS)
        test_daso.train(member, groups, test_daso.TENSORS, arrays, 0, 10, ends=[5])
        for number, of_sync in enumerate(member.state_dict()["syncs"]):
            for key in ("mine", "snapshot"):
                if of_sync["flight"] is not None and of_sync["flight"][key].size:
                    state = member.state_dict()
                    state["syncs"][number]["flight"][key][0] = np.inf
                    with pytest.raises(StateError, match="not finite"):
                        member.load_state_dict(state)

    World().run(test_daso.NODES["2x2"], program)


def test_what_torch_cannot_load_is_refused_before_it_is_loaded() -> None:
    from hvd_compress._torch.outer import OuterOptimizer, nesterov
    from hvd_compress.tensors import ParameterSpec

    outer = OuterOptimizer(nesterov, [ParameterSpec("w", (4,))], [np.ones(4, np.float32)])
    outer.step([np.ones(4, np.float32)])
    state = outer.state_dict()
    state["state"][0]["values"] = np.ones(3)
    with pytest.raises(StateError, match="cannot be loaded: TypeError"):
        outer.check(state)


@pytest.mark.parametrize("loss", [np.full(3, np.nan), "low", [1.0], True])
def test_a_loss_in_a_daso_state_is_a_number(loss: Any) -> None:
    def program(groups: Any) -> None:
        member = DasoMember(test_daso.TENSORS, test_daso.settings(), groups)
        member.end_epoch(test_daso.start_of(test_daso.TENSORS), float("nan"))
        state = member.state_dict()
        member.load_state_dict(state)
        state["epochs"][0]["loss"] = loss
        with pytest.raises(StateError, match="loss of an epoch"):
            member.load_state_dict(state)
        assert np.isnan(member.stats()["epochs"][0]["loss"])

    World().run(test_daso.NODES["alone"], program)


def test_a_factor_too_large_for_its_type_is_refused() -> None:
    ledger = test_powersgd.ledgers(2, PowerSGD(2))[0]
    state = ledger.state_dict()
    shape = [2, 50]
    state["factors"] = {"a": {"shape": shape, "values": np.full(100, 1e300)}}
    with pytest.raises(StateError, match=r"factor of 'a' .* not finite in float32"):
        ledger.load_state_dict(state)
    state["factors"]["a"]["values"] = np.ones(100)
    ledger.load_state_dict(state)
    assert ledger.accounts["a"].factor.tolist() == np.ones(shape).tolist()


def on_arrays(state: Any) -> Any:
    """A state whose tensors are arrays."""
    if isinstance(state, dict):
        return {key: on_arrays(entry) for key, entry in state.items()}
    if isinstance(state, list):
        return [on_arrays(entry) for entry in state]
    return state.numpy() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("way", ["fragments", "topk", "alone"])
def test_a_diloco_state_is_taken_wholly_or_not_at_all(way: str) -> None:
    from hvd_compress._torch.outer import OuterOptimizer, nesterov

    layout = "alone" if way == "alone" else "2x2"
    tensors = test_diloco.TENSORS

    def program(groups: Any) -> int:
        settings = DiLoCoSettings(6, delay=2, **test_diloco.WAYS.get(way, {}))
        make = OuterSGD() if way == "topk" else partial(OuterOptimizer, nesterov)
        member = DiLoCoMember(tensors, settings, groups, make)
        arrays = test_diloco.start_of(tensors)
        test_diloco.train(member, tensors, arrays, 0, 11)
        state = on_arrays(member.state_dict())
        assert state["under_way"] is not None
        if groups.rank in (0, 3):
            check_refusals(state, member.load_state_dict, lambda: on_arrays(member.state_dict()), 400)
        return groups.rank

    assert World().run(test_diloco.NODES[layout], program) == [*range(test_diloco.NODES[layout].size)]


def test_an_asynchronous_worker_takes_residuals_wholly_or_not_at_all() -> None:
    tensors = [ParameterSpec("w", (40, 30)), ParameterSpec("v", (50, 20))]
    encoder = GradientEncoder(tensors, [OneBit(), TopK(0.05)], 1)

    def load(state: Any) -> None:
        encoder.load_state_dict(check_state(state)["residuals"])

    state = {
        **states(1)[0],
        "owner_residuals": {},
        "residuals": {t.name: {"shape": list(t.shape), "values": np.ones(t.numel, np.float32)} for t in tensors},
    }
    check_refusals(state, load, encoder.state_dict, 60)


# -- what else a state may hold ------------------------------------------------------------------------------------


def with_residual(values: Any) -> dict[str, Any]:
    state = states(1)[0]
    return {**state, "residuals": {"b": {"shape": [5], "values": values}}}


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(5, requires_grad=True),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(5, dtype=torch.float16),
        torch.ones(10)[::2],
        np.ones(5, ">f4"),
        np.ones(5, np.float16),
        [1.0] * 5,
    ],
    ids=["grad", "bfloat16", "float16", "strided", "big-endian", "numpy float16", "list"],
)
def test_any_floating_array_is_taken(values: Any) -> None:
    found = check_state(with_residual(values))["residuals"]["b"]["values"]
    assert type(found) is np.ndarray
    assert found.dtype in (np.float32, np.float64)
    assert found.dtype.isnative
    assert found.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.ones(5, device="meta"), "no array"),
        (torch.ones(5).to_sparse(), "no array"),
        (torch.ones(5, dtype=torch.complex64), "complex64"),
        (torch.ones(5, dtype=torch.int32), "int32"),
        (np.ones(5, np.longdouble), "must be float64"),
        (np.ones((5, 1)), "must be flat"),
        (np.array([1, 2, np.nan, 4, 5.0]), "'b' has values that are not finite"),
        (np.array([1, 2, np.inf, 4, 5.0], np.float16), "'b' has values that are not finite"),
        ([[1.0], [2.0, 3.0]], "no array"),
    ],
)
def test_any_other_is_refused(values: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        check_state(with_residual(values))


def test_numbers_of_numpy_become_pythons() -> None:
    state = {
        **states(2)[1],
        "steps": np.int64(3),
        "rank": np.int32(1),
        "size": np.uint8(2),
        "loss_scale": np.float32(2),
    }
    checked = check_state(state)
    assert [type(checked[key]) for key in ("steps", "rank", "size", "loss_scale")] == [int, int, int, float]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_values_are_converted_to_the_type_of_their_tensors(dtype: str) -> None:
    tensor = EngineTensor("w", (100, 100), dtype, {"float32": 4, "float64": 8, "bfloat16": 2}[dtype])
    ledger = Ledger(test_ledger.routing(OneBit()), 2, 0, [tensor], Bucket)
    state = {"format": 1, "size": 2, "rank": 0, "steps": 1, "owner_residuals": {}}
    for given in (np.float32, np.float64):
        entry = {"shape": [100, 100], "values": np.full(10000, 0.5, given)}
        ledger.load_state_dict({**state, "residuals": {"w": entry}})
        assert ledger.accounts["w"].residual.dtype == (np.float64 if dtype == "float64" else np.float32)
    huge = {"shape": [100, 100], "values": np.full(10000, 1e300)}
    if dtype == "float64":
        ledger.load_state_dict({**state, "residuals": {"w": huge}})
    else:
        with pytest.raises(StateError, match="not finite in float32"):
            ledger.load_state_dict({**state, "residuals": {"w": huge}})


def test_residuals_whose_sum_is_not_finite_are_refused() -> None:
    ledger = Ledger(test_ledger.routing(OneBit()), 2, 0, [EngineTensor("w", (100, 100))], Bucket)
    half = np.full(5000, 3e38, np.float32)
    state = {
        "format": 1, "size": 2, "rank": 0, "steps": 1,
        "residuals": {"w": {"shape": [100, 100], "values": np.full(10000, 3e38, np.float32)}},
        "owner_residuals": {"w": {"shape": [100, 100], "start": 1, "values": half}},
    }  # fmt: skip
    with pytest.raises(StateError, match="their sum is not finite"):
        ledger.load_state_dict(state)
    with pytest.raises(StateError, match="their sum is not finite"):
        redistribute([state, {**state, "rank": 1}], 1)


def test_what_is_owed_of_a_tensor_at_rest_is_taken() -> None:
    tensors, resting = [EngineTensor("w", (100, 100))], [EngineTensor("v", (3,), "float64", 8)]
    ledger = Ledger(test_ledger.routing(OneBit()), 2, 0, tensors, Bucket, resting=resting)
    owed = {"v": {"shape": [3], "values": np.ones(3)}}
    state = {"format": 1, "size": 2, "rank": 0, "steps": 1, "owner_residuals": {}, "residuals": owed}
    ledger.load_state_dict(state)
    assert same(ledger.state_dict()["residuals"], owed)


# -- counters ------------------------------------------------------------------------------------------------------


def test_counters_are_those_of_this_process() -> None:
    first = test_ledger.ledgers(test_ledger.ROUTINGS["two_phase"])
    for number in range(3):
        test_ledger.step(first, number)
    each = first[0].stats()["total"]["bytes_sent"] / 3
    resumed = test_ledger.ledgers(test_ledger.ROUTINGS["two_phase"])
    for state, ledger in zip([ledger.state_dict() for ledger in first], resumed, strict=True):
        ledger.load_state_dict(state)
    assert resumed[0].stats()["total"]["steps"] == 0
    test_ledger.step(resumed, 3)
    total = resumed[0].stats()["total"]
    assert total["bytes_sent"] / total["steps"] == each
    assert {of["steps"] for of in resumed[0].stats()["tensors"].values()} == {1}
    # what randomness depends on goes on
    assert resumed[0].state_dict()["steps"] == 4
    halved = redistribute([ledger.state_dict() for ledger in resumed], 4)[0]
    first[0].load_state_dict(halved)
    assert first[0].stats()["total"]["steps"] == 3
    assert first[0].stats()["total"]["bytes_sent"] == 3 * each


# -- states of several ranks -----------------------------------------------------------------------------------------


def changed(state: dict[str, Any], kind: str, name: str, **entry: Any) -> dict[str, Any]:
    return {**state, kind: {**state[kind], name: {**state[kind][name], **entry}}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {**s, "compressor": {"id": "topk"}}, "compressor .* different runs"),
        (lambda s: {**s, "loss_scale": 2.0}, "loss_scale 2.0, that of rank 0 1.0"),
        (lambda s: {**s, "format": "1"}, "format is '1'"),
        (lambda s: {**s, "rank": 0}, "one state of each"),
        (lambda s: {**s, "rank": True}, "rank of a compressor state"),
        (lambda s: changed(s, "residuals", "w", shape=[11, 7]), "elsewhere"),
        (lambda s: {**s, "residuals": {**s["residuals"], "w": {"shape": [3], "values": np.zeros(3)}}}, "elsewhere"),
        (lambda s: changed(s, "residuals", "b", values=np.full(5, np.nan)), "not finite"),
    ],
)
def test_states_that_contradict_each_other_are_refused(change: Any, said: str) -> None:
    one, two = states(2)
    with pytest.raises(StateError, match=said):
        redistribute([one, change(two)], 3)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None, float("nan")])
def test_a_number_of_ranks_is_an_integer(size: Any) -> None:
    with pytest.raises(ValueError, match="size is"):
        redistribute(states(2), size)


def test_a_shape_alone_sets_no_memory_aside() -> None:
    big = {"shape": [10**6, 10**6], "start": 0, "values": np.zeros(3, np.float32)}
    of_all = [{**state, "residuals": {}, "owner_residuals": {"w": big}} for state in states(2)]
    with pytest.raises(StateError, match="all states together 6 values"):
        redistribute(of_all, 3)


def test_a_number_of_ranks_alone_sets_no_memory_aside() -> None:
    with pytest.raises(StateError, match="each of 1000000000000 ranks"):
        redistribute([{**state, "size": 10**12} for state in states(2)], 3)


def test_mixed_types_are_summed_in_the_larger() -> None:
    one, two = states(2)
    values = two["residuals"]["b"]["values"].astype(np.float64)
    found = redistribute([one, changed(two, "residuals", "b", values=values)], 1)[0]["residuals"]["b"]["values"]
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, one["residuals"]["b"]["values"] + values)


def test_ranks_agree_on_accumulators_that_several_have() -> None:
    of_all = test_accumulators.ledgers(2)
    test_accumulators.train(of_all, 0)
    one, two = test_accumulators.states(of_all)
    shared = sorted(one["accumulators"].keys() & two["accumulators"].keys())
    name = next(n for n in shared if one["accumulators"][n]["start"] == two["accumulators"][n]["start"])
    wrong = changed(two, "accumulators", name, values=two["accumulators"][name]["values"] + 1)
    with pytest.raises(StateError, match=f"accumulator of '{name}' on rank 1 differs"):
        redistribute([one, wrong], 1)


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_refused_whatever_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    write_state(path, {**states(2)[0], "accumulators": {}, "iterations": 3})
    whole, good = path.read_bytes(), read_state(path)
    draw = random.Random(1)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        else:
            at, length = draw.randrange(len(data)), draw.choice([1, 1, 2, 8, 64])
            data[at : at + length] = draw.randbytes(len(data[at : at + length]))
        path.write_bytes(data)
        try:
            # dates and such may be anything
            assert same(read_state(path), good)
        except StateError:
            refused += 1
    assert refused > 500


def test_files_of_numpy_itself_are_read(tmp_path: Path) -> None:
    """As they were written before they were read by a parser of our own."""
    plain = (
        b'{"format": 1, "size": 1, "rank": 0, "steps": 7, "compressor": {"id": "onebit"}, "iterations": 9, '
        b'"residuals": {"w": {"shape": [2, 2], "values": "values0"}}, '
        b'"owner_residuals": {"w": {"shape": [2, 2], "start": 1, "values": "values1"}}}'
    )
    values = {"values0": np.arange(4.0), "values1": np.arange(2, dtype=np.float32)}
    np.savez(tmp_path / "old.npz", plain=np.frombuffer(plain, np.uint8), **values)
    state = read_state(tmp_path / "old.npz")
    assert (state["steps"], state["iterations"]) == (7, 9)
    assert state["residuals"]["w"]["values"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert state["owner_residuals"]["w"]["values"].dtype == np.float32


@pytest.mark.parametrize("kind", ["compressed", "2-d", "integers", "huge", "pickled", "twice", "deep"])
def test_files_of_another_form_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.npz"
    write_state(path, states(1)[0])
    with np.load(path) as file:
        arrays = dict(file)
    if kind == "compressed":
        np.savez_compressed(path, **arrays)
    elif kind == "huge":
        data = path.read_bytes().replace(b"'shape': (77,), }              ", b"'shape': (70000000000000,), } ")
        path.write_bytes(data)
    else:
        if kind == "2-d":
            arrays["values0"] = arrays["values0"].reshape(7, 11)
        elif kind == "integers":
            arrays["values0"] = arrays["values0"].astype(np.int64)
        elif kind == "pickled":
            arrays["values0"] = np.array([{}], object)
        elif kind == "twice":
            arrays["plain"] = np.frombuffer(arrays["plain"].tobytes().replace(b"values1", b"values0"), np.uint8)
        elif kind == "deep":
            arrays["plain"] = np.frombuffer(b"[" * 10**6, np.uint8)
        np.savez(path, **arrays)
    with pytest.raises(StateError, match="not a file with a compressor state, or damaged"):
        read_state(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    write_state(path, states(1)[0])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_state(path, {**states(1)[0], "iterations": object()})
    with pytest.raises(StateError):
        write_state(path, {**states(1)[0], "steps": -1})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]


def test_no_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "none.npz")
