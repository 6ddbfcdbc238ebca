"""Single allreduces with compression: ranks that do not call them in one way are all told so, and nothing hangs.

In a start of its own: an operation that stayed with Horovod would be found here, and not end the cases of others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.torch as hvd
from hvd_compress import BF16, QSGD, AdaGrad, OneBit, ParameterServer, Threshold, TopK
from hvd_compress.engine import empty_state
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.loopback import Loopback
from hvd_compress.torch import _calls, _functions
from hvd_compress.torch._agreement import Meeting
from tests.hostile import same
from tests.parallel.cases import Cases
from tests.parallel.workers.common import raises, to_numpy
from tests.parallel.workers.neutral import in_elastic_run

cases = Cases()
SHAPE = (20, 20)


def odd_one() -> bool:
    return horovod.rank() == horovod.size() - 1


def mine(rank: int | None = None, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    x = torch.arange(400.0) + (horovod.rank() if rank is None else rank)
    return x[: int(np.prod(shape))].reshape(shape)


def call(
    name: str | None,
    grouped: bool,
    *,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    number: int = 2,
    tracked: bool = False,
    compression: Any = OneBit(),  # noqa: B008 - it is immutable
    **settings: Any,
) -> Any:
    x = mine(shape=shape).to(dtype).requires_grad_(tracked)
    if grouped:
        return hvd.grouped_allreduce([x + i for i in range(number)], name=name, compression=compression, **settings)
    return hvd.allreduce(x, name=name, compression=compression, **settings)


# what the last rank gives, what the others give, and what the error says
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "op": ({"op": hvd.Sum}, {}, ("op", "'Sum'", "'Average'")),
    "other-op": ({"op": hvd.Max}, {}, ("op", "'Max'")),
    "prescale": ({"prescale_factor": 2.0}, {}, ("prescale_factor", "2.0")),
    "postscale": ({"postscale_factor": 2.0}, {}, ("postscale_factor", "2.0")),
    "feedback": ({"compression": OneBit(error_feedback=False)}, {}, ("error_feedback",)),
    "seed": ({"compression": QSGD(seed=1)}, {"compression": QSGD(seed=0)}, ("compression.seed",)),
    "tau": ({"compression": Threshold(1.0)}, {"compression": Threshold(0.5)}, ("compression.tau", "0.5")),
    "compressor": ({"compression": TopK(0.1)}, {}, ("compression.id", "'topk'", "'onebit'")),
    "none": ({"compression": hvd.Compression.none}, {}, ("compression",)),
    "fp16": ({"compression": hvd.Compression.fp16}, {}, ("compression",)),
    "dtype": ({"dtype": torch.float64}, {}, ("float64", "float32")),
    "bfloat16 and none": ({"dtype": torch.bfloat16, "compression": hvd.Compression.none}, {}, ("compression",)),
    "integers": ({"dtype": torch.int64}, {}, ("int64", "float32")),
    "shape": ({"shape": (40, 10)}, {}, ("(40, 10)", "(20, 20)")),
    "too small to compress": ({"shape": (2,)}, {}, ("(2,)", "(20, 20)")),
    "both too small": ({"shape": (2,), "compression": hvd.Compression.none}, {"shape": (2,)}, ("compression",)),
    "gradient": ({"tracked": True}, {}, ("require gradients",)),
}
WAYS = {
    f"{label}, {'group' if grouped else 'single'}": (*difference, grouped)
    for label, difference in {**DIFFERENCES, "number": ({"number": 3}, {}, ("number of tensors",))}.items()
    for grouped in (False, True)
    if grouped or label != "number"
}


def check_that_nothing_is_under_way(name: str) -> None:
    """Horovod refuses a name that is in use, on this rank, and on all ranks one that another kind of call uses."""
    total = torch.full((3,), float(horovod.size()))
    assert torch.equal(horovod.allreduce(torch.ones(3), name=name, op=hvd.Sum), total)
    for number in (1, 2, 3):
        group = [torch.ones(3) for _ in range(number)]
        assert all(torch.equal(x, total) for x in horovod.grouped_allreduce(group, name=name, op=hvd.Sum))


@cases.each({"odd": True, "others": False})
def a_group_and_a_single_tensor_of_one_name_are_told(is_grouped: bool) -> None:
    grouped = is_grouped == odd_one()
    for number in (1, 2, 3):
        name = f"group of {number} or single, {is_grouped}"
        words = ("function", "'grouped_allreduce'", "'allreduce'")
        raises(MismatchError, lambda n=name, i=number: call(n, grouped, number=i), *words)
        check_that_nothing_is_under_way(name)
        # and a name that all have used in one way before
        call(f"later {name}", False)
        raises(MismatchError, lambda n=name, i=number: call(f"later {n}", grouped, number=i), *words)
        check_that_nothing_is_under_way(f"later {name}")


@cases.add
def a_group_of_one_that_some_compress_is_told() -> None:
    compression = hvd.Compression.none if odd_one() else OneBit()
    raises(MismatchError, lambda: call("group of one", True, number=1, compression=compression), "compression")
    check_that_nothing_is_under_way("group of one")


@cases.add
def types_that_differ_without_compression_stay_horovods_error() -> None:
    dtype = torch.int32 if odd_one() else torch.float32
    for grouped in (False, True):
        give = {"compression": hvd.Compression.none, "dtype": dtype}
        raises((HorovodInternalError, MismatchError), lambda g=grouped, s=give: call("types", g, **s), "int32")
        check_that_nothing_is_under_way("types")


@cases.each(WAYS)
def ranks_that_call_in_different_ways_are_all_told(
    setting: tuple[dict[str, Any], dict[str, Any], tuple[str, ...], bool],
) -> None:
    odd, others, words, grouped = setting
    label = f"{sorted(map(str, odd))} {sorted(map(str, odd.values()))} {grouped}"
    given = odd if odd_one() else others
    raises(MismatchError, lambda: call(f"first {label}", grouped, **given), *words)
    check_that_nothing_is_under_way(f"first {label}")
    # a name that all ranks have used in one way before
    before = [call(f"later {label}", grouped, **others) for _ in range(2)]
    assert before
    raises(MismatchError, lambda: call(f"later {label}", grouped, **given), *words)
    check_that_nothing_is_under_way(f"later {label}")


@cases.each({k: v for k, v in WAYS.items() if not k.startswith("number")})
def calls_without_a_name_are_compared_too(
    setting: tuple[dict[str, Any], dict[str, Any], tuple[str, ...], bool],
) -> None:
    odd, others, words, grouped = setting
    raises(MismatchError, lambda: call(None, grouped, **(odd if odd_one() else others)), *words)


def loopback_of(compressor: Any, name: str, calls: int) -> list[np.ndarray]:
    loopback = Loopback(horovod.size(), compressor)
    given = [to_numpy(mine(rank)) for rank in range(horovod.size())]
    return [loopback.allreduce(given, name=name)[0] for _ in range(calls)]


@cases.add
def what_is_owed_outlives_a_disagreement() -> None:
    expected = loopback_of(TopK(0.1), "owed", 3)
    for step in range(3):
        result = call("owed", False, compression=TopK(0.1))
        assert to_numpy(result).tobytes() == expected[step].tobytes()
        raises(MismatchError, lambda: call("owed", False, compression=TopK(0.2 if odd_one() else 0.1)), "ratio")


@cases.add
def what_all_ranks_change_at_once_is_accepted() -> None:
    expected = loopback_of(TopK(0.1), "changed", 1)[0]
    for grouped in (False, True):
        name = f"changed {grouped}"
        for compression in (OneBit(), TopK(0.1), hvd.Compression.none, TopK(0.1), OneBit()):
            result = call(name, grouped, compression=compression, op=hvd.Sum)
            if compression is hvd.Compression.none:
                first = result[0] if grouped else result
                everyone = sum(mine(rank) for rank in range(horovod.size()))
                assert torch.equal(first, everyone)
    result = call("changed", False, compression=TopK(0.1))
    assert to_numpy(result).tobytes() == expected.tobytes()
    shapes = [SHAPE, (40, 10), SHAPE]
    results = [call("shapes in turns", False, shape=shape, compression=BF16()) for shape in shapes]
    mean = sum(mine(rank) for rank in range(horovod.size())) / horovod.size()
    torch.testing.assert_close(results[1], mean.view(40, 10), rtol=1e-2, atol=1e-2)


@cases.add
def calls_of_one_name_are_compared_once() -> None:
    compared: list[str] = []
    compare = Meeting.require_agreement

    def counting(meeting: Meeting, label: str, *arguments: Any) -> None:
        compared.append(label)
        compare(meeting, label, *arguments)

    with mock.patch.object(Meeting, "require_agreement", counting):
        for _ in range(4):
            call("once", False)
            call("once, grouped", True)
    assert compared == ["allreduce of 'once'", "grouped_allreduce of 'once, grouped'"]


@cases.add
def complex_numbers_are_compressed_as_two_real_ones() -> None:
    z = [torch.complex(mine(rank), -mine(rank)) for rank in range(horovod.size())]
    result = hvd.allreduce(z[horovod.rank()], name="complex", compression=TopK(0.25))
    loopback = Loopback(horovod.size(), TopK(0.25))
    expected = loopback.allreduce([to_numpy(torch.view_as_real(x)) for x in z], name="complex")[0]
    assert result.dtype == torch.complex64
    assert to_numpy(torch.view_as_real(result)).tobytes() == expected.tobytes()


@contextmanager
def elastic() -> Iterator[None]:
    """See there; no residuals of named calls are left."""
    try:
        with in_elastic_run():
            yield
    finally:
        hvd.forget_residuals()


@cases.add
def elastic_runs_refuse_it_before_their_ranks_are_together() -> None:
    with elastic():
        for grouped in (False, True):
            raises(UnsupportedError, lambda g=grouped: call("elastic", g), "elastic", "hvd.elastic.run")
            call("elastic", grouped, compression=hvd.Compression.none)


@cases.add
def an_elastic_state_brings_back_what_calls_owe() -> None:
    with elastic():
        state = hvd.elastic.TorchState(step=0)
        state.sync()
        call("carried", False)
        state.step = 1
        state.commit()
        owed = owed_in_all(*_calls.states().values())
        call("carried", False)
        state.restore()
        state.reset()
        raises(UnsupportedError, lambda: call("carried", False), "elastic")
        state.sync()
        assert state.step == 1
        (carried,) = _calls.states().values()
        np.testing.assert_allclose(owed_in_all(carried), owed, rtol=1e-6)
        results = call("carried", False)
        np.testing.assert_allclose(
            to_numpy(results).ravel() * horovod.size() + owed_in_all(*_calls.states().values()),
            owed + sum(to_numpy(mine(rank)).ravel() for rank in range(horovod.size())),
            rtol=1e-4,
        )


@cases.each({"single": False, "group": True})
def what_is_owed_of_a_tensor_that_is_not_compressed_any_more_goes_with_its_next_call(grouped: bool) -> None:
    """As when so many ranks come that a tensor is not worth compressing."""
    with elastic():
        state = hvd.elastic.TorchState(step=0)
        state.sync()
        name = "late"
        names = [f"{name}.0", f"{name}.1"] if grouped else [name]
        tensors = tuple((n, (3,), torch.float32) for n in _functions.names_of_call(name, len(names)))
        owed = {**empty_state(), "size": horovod.size(), "rank": horovod.rank()}
        entry = {"shape": [3], "values": np.full(3, 1.0 + horovod.rank(), np.float32)}
        owed["residuals"] = {n: copy.deepcopy(entry) for n, _, _ in tensors}
        _calls._owed[_calls.CallKey("all", tensors, OneBit())] = owed
        bad = torch.full((3,), float("inf"))
        late = sum(1.0 + rank for rank in range(horovod.size()))
        for gradient, wanted in ((bad, None), (torch.ones(3), late + horovod.size()), (torch.ones(3), horovod.size())):
            if grouped:
                results = hvd.grouped_allreduce([gradient] * 2, name=name, compression=OneBit(), op=hvd.Sum)
            else:
                results = [hvd.allreduce(gradient, name=name, compression=OneBit(), op=hvd.Sum)]
            for result in results:
                if wanted is None:
                    assert not torch.isfinite(result).any()
                else:
                    assert result.tolist() == [wanted] * 3, (result, wanted)


@cases.add
def one_rank_that_is_left_pays_with_a_step_that_counts() -> None:
    key = _calls.CallKey("all", (("alone", (3,), torch.float32),), OneBit())
    state = {**empty_state(), "size": 2, "rank": 0}
    state["residuals"] = {"alone": {"shape": [3], "values": np.full(3, 4.0, np.float32)}}
    try:
        _calls._owed[key] = state
        (result,) = _calls.pay_at_once(key, [torch.tensor([1.0, float("nan"), 1.0])], averages=True)
        assert result.isnan().any()
        (result,) = _calls.pay_at_once(key, [torch.ones(3)], averages=True)
        assert result.tolist() == [3.0] * 3
        (result,) = _calls.pay_at_once(key, [torch.ones(3)], averages=True)
        assert result.tolist() == [1.0] * 3
    finally:
        hvd.forget_residuals()


def owed_in_all(*states: dict[str, Any]) -> Any:
    """What all ranks owe of one tensor of 400 elements, or more."""
    total = None
    for state in states:
        for kind in ("residuals", "owner_residuals"):
            for entry in state[kind].values():
                values = np.asarray(entry["values"], np.float64)
                whole = np.zeros(int(np.prod(entry["shape"])))
                whole[entry.get("start", 0) :][: values.size] = values
                total = whole if total is None else total + whole
    return sum(horovod.allgather_object(total))


def optimizer(**settings: Any) -> tuple[torch.nn.Linear, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(160, 160, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), OneBit(), min_numel=9, **settings)


def numbers(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(entry["values"]) for name, entry in entries.items()}


def steps(model: torch.nn.Module, opt: Any, seed: int, number: int = 2) -> list[bytes]:
    """Make some; returns the bits of the parameters after them."""
    for step in range(number):
        opt.zero_grad()
        random = np.random.default_rng((seed, step, horovod.rank()))
        x = torch.from_numpy(random.normal(size=(8, 160)).astype(np.float32))
        model(x).square().mean().backward()
        opt.step()
    return [to_numpy(p).tobytes() for p in model.parameters()]


@cases.each({"residuals": {}, "AdaGrad": {"adagrad": AdaGrad()}})
def an_elastic_state_brings_back_what_an_optimizer_owes(settings: dict[str, Any]) -> None:
    with elastic():
        model, opt = optimizer(**settings)
        raises(UnsupportedError, lambda: steps(model, opt, 0), "hvd.elastic.TorchState", "elastic run")
        raises(StateError, lambda: opt.load_compression_state_dict(empty_state()), "elastic run")
        opt.zero_grad()
        state = hvd.elastic.TorchState(model, opt, step=0)
        state.sync()
        steps(model, opt, 1)
        state.commit()
        kinds = ["residuals"] if settings else ["residuals", "owner_residuals"]
        kept = opt.compression_state_dict()
        owed = owed_in_all({"residuals": {}, "owner_residuals": {}, **{kind: kept[kind] for kind in kinds}})
        after = steps(model, opt, 2)
        state.restore()
        state.sync()
        now = opt.compression_state_dict()
        np.testing.assert_allclose(owed_in_all({**now, "owner_residuals": {}}), owed, rtol=1e-4, atol=1e-7)
        if settings:
            # they belong to elements, whose owners are the same
            for kind in ("accumulators", "owner_residuals"):
                assert same(numbers(now[kind]), numbers(kept[kind]))
        stats = opt.compression_stats()
        assert stats["lost_ranks"] == stats["lost_norm"] == 0
        assert stats["total"]["steps"] == 4
        # what was owed as an owner is owed as a sender now: the steps that follow are others, but equal on all ranks
        everyone = horovod.allgather_object([after, steps(model, opt, 2)])
        assert all(one == everyone[0] for one in everyone)


@cases.add
def who_has_made_another_step_than_rank_0_drops_what_it_owes() -> None:
    with elastic():
        model, opt = optimizer()
        state = hvd.elastic.TorchState(model, opt, step=0)
        state.sync()
        steps(model, opt, 1)
        state.commit()
        norm = opt.compression_stats()["total"]["residual_norm"]
        if odd_one():
            # it has lost the last commit
            state._commits -= 1
        norms = horovod.allgather_object(norm)
        state.sync()
        stats = opt.compression_stats()
        assert stats["lost_ranks"] == 1
        assert np.isclose(stats["lost_norm"], norms[-1], rtol=1e-6)
        assert (stats["total"]["residual_norm"] == 0) == odd_one()


@cases.add
def ranks_that_join_with_other_settings_are_told_so() -> None:
    with elastic():
        torch.manual_seed(0)
        model = torch.nn.Linear(160, 160)
        opt = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), OneBit() if odd_one() else TopK(0.1)
        )
        state = hvd.elastic.TorchState(model, opt)
        raises(MismatchError, state.sync, "compression.id", "'topk'", "'onebit'")


@cases.add
def elastic_runs_refuse_process_sets_and_messages_of_mpi() -> None:
    with elastic():
        sgd = torch.optim.SGD([torch.nn.Parameter(mine())], lr=0.1)
        apart = SimpleNamespace(process_set_id=7, included=lambda: True, size=lambda: 2, rank=lambda: 0)
        for settings, words in (
            ({"process_set": apart}, ["process set", "elastic run"]),
            ({"exchange": ParameterServer(transport="mpi")}, ["transport", "elastic run"]),
        ):
            raises(
                UnsupportedError,
                lambda s=settings: hvd.DistributedOptimizer(sgd, compression=OneBit(), **s),
                *words,
            )
