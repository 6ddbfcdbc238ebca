"""Event-triggered averaging of torch parameters among real ranks."""

from __future__ import annotations

import copy
import time

import horovod.torch as plain
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import (
    QSGD,
    ConstantThreshold,
    Exponential,
    FullyConnected,
    OneBit,
    Ring,
    SlopeThreshold,
    TopK,
    Topology,
)
from hvd_compress.errors import GradientError, MismatchError, StateError, UnsupportedError
from hvd_compress.gossip import GossipLoopback, ParameterSpec
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import in_elastic_run
from tests.parallel.workers.plain import check_that_it_goes_on

cases = Cases()

PROCESS_SETS = "dynamic"

STEPS = 12


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(16, 30))).to(dtype)


def train(optimizer, model, steps: int = STEPS, begin: int = 0, rank: int | None = None) -> None:
    rank = hvd.rank() if rank is None else rank
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        model(batch(step, rank, next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def wrapped(model, **settings):
    base = settings.pop("base", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.EventGraDOptimizer(base, model.named_parameters(), named_buffers=model.named_buffers(), **settings)


def simulated(trigger, steps: int = STEPS, **settings):
    """All ranks in this process: the loopback averages, torch's own optimizer makes the steps."""
    models = [network() for _ in range(hvd.size())]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    tensors = [ParameterSpec(name, tuple(p.shape)) for name, p in models[0].named_parameters()]
    group = GossipLoopback(tensors, hvd.size(), trigger, **settings)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
        group.step([[p.detach().view(-1).numpy() for p in m.parameters()] for m in models])
        for optimizer in optimizers:
            optimizer.step()
    return models[hvd.rank()], group.nodes[hvd.rank()]


def assert_equal(model, other) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.detach().numpy().tobytes() == q.detach().numpy().tobytes(), name


WAYS = {
    "d-psgd": {"trigger": ConstantThreshold(0)},
    "constant": {"trigger": ConstantThreshold(0.02)},
    "slope": {"trigger": SlopeThreshold()},
    "change": {"trigger": SlopeThreshold(measure="change")},
    "mean-preserving": {"trigger": SlopeThreshold(), "mixing": "mean_preserving"},
    "topk": {"trigger": SlopeThreshold(), "compression": TopK(0.05)},
    "onebit": {"trigger": ConstantThreshold(0.01), "compression": OneBit()},
    "qsgd-mean-preserving": {
        "trigger": ConstantThreshold(0), "compression": QSGD(bits=4), "mixing": "mean_preserving",
        "consensus_rate": 0.3,
    },
    "full": {"trigger": SlopeThreshold(), "topology": FullyConnected()},
    "exponential": {"trigger": ConstantThreshold(0.01), "topology": Exponential(), "compression": TopK(0.1)},
}  # fmt: skip


TOPK_KEEPING_THE_MEAN = {"compression": TopK(0.05), "mixing": "mean_preserving", "consensus_rate": 0.1}


@cases.each(WAYS)
def ranks_do_what_the_loopback_does_bit_for_bit(settings) -> None:
    model = network()
    optimizer = wrapped(model, **settings)
    train(optimizer, model)
    expected, node = simulated(**settings)
    assert_equal(model, expected)
    # on one rank nothing is sent, and the loopback has no neighbours either
    assert optimizer.event_stats()["total"] == node.report()["total"]
    optimizer.average_parameters()


@cases.each({"threshold-zero": hvd.EventGraDOptimizer, "by-name": hvd.DPSGDOptimizer})
def threshold_zero_is_decentralized_sgd_bit_for_bit(wrap) -> None:
    """Lian et al. 2017, algorithm 1, typed anew: x_i <- x_i + sum_j W_ij (x_j - x_i) - rate g_i."""
    model, other = network(), network()
    trigger = {"trigger": ConstantThreshold(0)} if wrap is hvd.EventGraDOptimizer else {}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), **trigger)
    train(optimizer, model)
    weights = Ring().matrix(hvd.size())[hvd.rank()]
    for step in range(STEPS):
        other.zero_grad()
        other(batch(step, hvd.rank())).square().mean().backward()
        for name, p in other.named_parameters():
            everyone = plain.allgather(p.detach()[None], name=f"oracle.{name}").numpy()
            x = everyone[hvd.rank()]
            total = np.zeros_like(x)
            for rank in np.flatnonzero(weights):
                if rank != hvd.rank():
                    total = total + np.float32(weights[rank]) * (everyone[rank] - x)
            p.data = torch.from_numpy(x + total).add_(p.grad, alpha=-0.05)
    assert_equal(model, other)
    assert optimizer.event_stats()["total"]["messages_percent"] == (100 if hvd.size() > 1 else 0)
    optimizer.average_parameters()


@cases.add
def all_wait_for_a_slow_rank_and_nothing_else_changes() -> None:
    model = network()
    optimizer = wrapped(model, trigger=SlopeThreshold())
    begin = time.perf_counter()
    for step in range(STEPS):
        if hvd.rank() == hvd.size() - 1 and step in (3, 6, 9):
            time.sleep(0.3)
        train(optimizer, model, 1, begin=step)
    took = time.perf_counter() - begin
    assert took > 0.85 or hvd.size() == 1, took
    assert_equal(model, simulated(SlopeThreshold())[0])
    optimizer.average_parameters()


@cases.each({"slope": {"trigger": SlopeThreshold()}, "topk": {"trigger": SlopeThreshold(), "compression": TopK(0.05)}})
def sending_ahead_changes_nothing(settings) -> None:
    model, ahead = network(), network()
    optimizer, early = wrapped(model, **settings), wrapped(ahead, overlap=True, **settings)
    train(optimizer, model)
    train(early, ahead)
    assert_equal(model, ahead)
    optimizer.average_parameters()
    early.average_parameters()
    assert_equal(model, ahead)


@cases.add
def one_rank_is_plain_training() -> None:
    if hvd.size() > 1:
        return
    model, alone = network(), network()
    train(wrapped(model), model)
    train(torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), alone)
    assert_equal(model, alone)


@cases.add
def average_parameters_makes_all_equal_buffers_included() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(1e6))
    train(optimizer, model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    apart = optimizer.consensus_distance()
    optimizer.average_parameters()
    for name, value in model.state_dict().items():
        everyone = plain.allgather(before[name].double().reshape(1, -1), name=f"check.{name}")
        mean = everyone.mean(dim=0).reshape(value.shape)
        assert torch.allclose(value.double(), mean, atol=1e-6), name
        same = plain.allgather(value.double().reshape(1, -1), name=f"same.{name}")
        assert (same == same[0]).all(), name
    assert (apart > 0.01) == (hvd.size() > 1)
    assert optimizer.consensus_distance() < 1e-6
    assert int(model[2].num_batches_tracked) == STEPS


@cases.add
def consensus_distance_is_that_of_its_definition() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(1e6))
    train(optimizer, model, 3)
    mine = torch.cat([p.detach().double().view(-1) for p in model.parameters()]).reshape(1, -1)
    everyone = plain.allgather(mine, name="everyone")
    expected = (everyone - everyone.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    assert optimizer.consensus_distance() == pytest.approx(float(expected), rel=1e-9)
    optimizer.average_parameters()


@cases.each({"plain": {}, "ahead": {"overlap": True}, "topk": {"compression": TopK(0.05)}})
def ranks_may_make_different_numbers_of_steps(settings) -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(0), **settings)
    train(optimizer, model, 3 + 4 * hvd.rank())
    optimizer.average_parameters()
    # and train on together
    train(optimizer, model, 5, begin=100)
    optimizer.average_parameters()
    everyone = plain.allgather(model[0].weight.detach().reshape(1, -1), name="weight")
    assert (everyone == everyone[0]).all()


def check_copies(optimizer, label: str) -> None:
    """Each rank's copies of its neighbours are what these think that it has."""
    node = optimizer._gossip.member._averager.node
    for t, own in enumerate(node.copies.own):
        if own is not None:
            owns = plain.allgather(torch.from_numpy(own.copy()).reshape(1, -1), name=f"own.{label}.{t}").numpy()
            for slot, sender in enumerate(node.part.senders):
                assert node.copies.of_senders[t][slot].tobytes() == owns[sender].tobytes(), (t, sender)
    assert node.copies.own[0] is not None


@cases.add
def averaging_in_between_keeps_copies_true() -> None:
    for overlap in (False, True):
        model = network()
        optimizer = wrapped(model, trigger=SlopeThreshold(), compression=TopK(0.05), overlap=overlap)
        for part in range(3):
            train(optimizer, model, 4 + hvd.rank(), begin=10 * part)
            optimizer.average_parameters()
            check_copies(optimizer, f"{overlap}.{part}")
        train(optimizer, model, 3, begin=100)
        optimizer._gossip.member._averager.drain()
        check_copies(optimizer, f"{overlap}.end")
        optimizer.average_parameters()


@cases.each({"plain": {}, "ahead": {"overlap": True}, "topk": TOPK_KEEPING_THE_MEAN})
def a_saved_state_goes_on_bit_for_bit(settings) -> None:
    model = network()
    optimizer = wrapped(model, trigger=SlopeThreshold(), **settings)
    train(optimizer, model, 6)
    saved = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "event": optimizer.event_state_dict()}
    )
    train(optimizer, model, 6, begin=6)
    again = network()
    again.load_state_dict(saved["model"])
    resumed = wrapped(again, trigger=SlopeThreshold(), **settings)
    resumed.load_state_dict(saved["optimizer"])
    resumed.load_event_state_dict(saved["event"])
    train(resumed, again, 6, begin=6)
    assert_equal(again, model)
    assert resumed.event_stats()["total"] == optimizer.event_stats()["total"]
    optimizer.average_parameters()
    resumed.average_parameters()


@cases.add
def a_state_of_another_trigger_is_refused() -> None:
    model = network()
    state = wrapped(model, trigger=SlopeThreshold(history=3)).event_state_dict()
    with pytest.raises(StateError, match="of other settings: trigger differ"):
        wrapped(model, trigger=SlopeThreshold(history=2)).load_event_state_dict(state)


@cases.add
def frozen_parameters_are_neither_sent_nor_changed() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight += hvd.rank()
    before = model[0].weight.clone()
    optimizer = wrapped(model, trigger=ConstantThreshold(0))
    train(optimizer, model, 5)
    assert "0.weight" not in optimizer.event_stats()["tensors"]
    assert torch.equal(model[0].weight, before)
    optimizer.average_parameters()


@cases.add
def what_is_frozen_later_is_neither_sent_nor_changed() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(0))
    train(optimizer, model, 2)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    before = model[0].weight.clone()
    sent = optimizer.event_stats()["tensors"]["0.weight"]["messages"]
    train(optimizer, model, 3, begin=2)
    assert torch.equal(model[0].weight, before)
    assert optimizer.event_stats()["tensors"]["0.weight"]["messages"] == sent
    assert optimizer.event_stats()["tensors"]["3.weight"]["messages"] > sent or hvd.size() == 1
    optimizer.average_parameters()
    same = plain.allgather(model[0].weight.detach()[None], name="frozen")
    assert (same == same[0]).all()


def unfreeze(model, optimizer) -> None:
    model[0].weight.requires_grad_(True)


def add(model, optimizer) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(40, 30))]})


def resize(model, optimizer) -> None:
    model[3].weight.data = torch.ones(7, 40)


CHANGES = {"unfrozen": unfreeze, "added": add, "resized": resize}


@cases.each({f"{k}-{way}": (c, way == "ahead") for k, c in CHANGES.items() for way in ("plain", "ahead")})
def what_one_rank_changes_later_is_an_error_on_all_ranks(setting) -> None:
    change, overlap = setting
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = wrapped(model, trigger=ConstantThreshold(0), overlap=overlap)
    train(optimizer, model, 2)
    is_odd = hvd.rank() == hvd.size() - 1
    if is_odd:
        change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    if is_odd:
        with pytest.raises(ValueError, match=r"shape .* (takes gradients|now).*On all ranks: make .* equal"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
    else:
        if overlap:
            # what was sent ahead arrives
            optimizer.step()
        with pytest.raises(MismatchError, match=r"another rank cannot go on.*unfrozen, added or changed"):
            optimizer.step()
    # nothing is left behind: the remedy works
    if not is_odd:
        change(model, optimizer)
    plain.broadcast_parameters(model.state_dict(), 0)
    again = wrapped(model, trigger=ConstantThreshold(0))
    again.step()
    again.average_parameters()


@cases.each(CHANGES)
def what_all_ranks_change_later_is_an_error_on_all_ranks(change) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = wrapped(model)
    train(optimizer, model, 2)
    change(model, optimizer)
    optimizer.zero_grad()
    for call in (optimizer.step, optimizer.average_parameters):
        with pytest.raises(ValueError, match=r"shape .* (takes gradients|now)"):
            call()


@cases.add
def what_is_frozen_before_the_first_step_may_be_unfrozen_later() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(1e6))
    model[0].weight.requires_grad_(False)
    train(optimizer, model, 2)
    before = model[0].weight.clone()
    model[0].weight.requires_grad_(True)
    model[0].weight.grad = None
    optimizer.step()
    # neighbours have sent nothing: it is averaged with what this rank began with
    assert torch.equal(model[0].weight, before)
    optimizer.average_parameters()


@cases.add
def what_is_resized_is_refused_by_its_averaging() -> None:
    model = network()
    optimizer = wrapped(model)
    train(optimizer, model, 1)
    with torch.no_grad():
        model[3].weight.data = torch.zeros(7, 40)
    with pytest.raises(ValueError, match=r"'3\.weight' has 280 elements of float32, and had 200"):
        optimizer._gossip.mix()


@cases.add
def copies_and_optimizers_that_are_wrapped_already_are_refused() -> None:
    model = network()
    optimizer = wrapped(model)
    with pytest.raises(UnsupportedError, match="distributed already"):
        hvd.EventGraDOptimizer(optimizer, model.named_parameters())
    with pytest.raises(UnsupportedError, match="has no neighbours"):
        copy.deepcopy(optimizer).step()
    with pytest.raises(ValueError, match="named_buffers has several tensors named 'a'"):
        hvd.EventGraDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_buffers=[("a", torch.zeros(1)), ("a", torch.ones(1))]
        )


def in_all_ways() -> dict:
    ways = {
        "DistributedOptimizer": hvd.DistributedOptimizer,
        "EventGraDOptimizer": hvd.EventGraDOptimizer,
        "DASO": lambda base, named: hvd.DASO(base, named, ranks_per_node=hvd.size()),
    }
    if hvd.mpi_enabled() and hvd.size() > 1:
        ways["AsyncParameterServerOptimizer"] = hvd.AsyncParameterServerOptimizer
    return ways


@cases.add
def an_optimizer_has_one_wrapper_and_no_two_kinds_of_them() -> None:
    for inner, wrap in in_all_ways().items():
        model = network()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(base, list(model.named_parameters()))
        for outer, wrap_again in in_all_ways().items():
            named = list(model.named_parameters())
            with pytest.raises(UnsupportedError, match=f"{outer} around .* distributed already: give a torch"):
                wrap_again(optimizer, named)
            if outer != inner:
                remedy = f"{outer} around an optimizer that {inner} has wrapped.*make a torch optimizer anew"
                with pytest.raises(UnsupportedError, match=remedy):
                    wrap_again(base, named)
        if inner in ("EventGraDOptimizer", "AsyncParameterServerOptimizer"):
            with pytest.raises(UnsupportedError, match=r"inside of another wrapper, such as horovod\.torch"):
                plain.DistributedOptimizer(optimizer, model.named_parameters())
        if inner == "AsyncParameterServerOptimizer":
            optimizer.close()


@cases.add
def the_last_wrapper_of_a_parameter_is_its_optimizer() -> None:
    ways = {k: v for k, v in in_all_ways().items() if k != "AsyncParameterServerOptimizer"}
    for first, wrap in ways.items():
        for wrap_again in ways.values():
            model, alone = network(), network()
            old = wrap(torch.optim.SGD(model.parameters(), lr=0.05), list(model.named_parameters()))
            keeps_it = torch.optim.lr_scheduler.StepLR(old, 1)
            train(old, model, 1)
            keeps_it.step()
            plain.broadcast_parameters(model.state_dict(), 0)
            alone.load_state_dict(model.state_dict())
            new = wrap_again(torch.optim.SGD(model.parameters(), lr=0.05), list(model.named_parameters()))
            expected = wrap_again(torch.optim.SGD(alone.parameters(), lr=0.05), list(alone.named_parameters()))
            train(new, model, 3)
            train(expected, alone, 3)
            # gradients are not exchanged by the old one as well
            assert_equal(model, alone)
            if hvd.size() > 1 or first == "EventGraDOptimizer":
                with pytest.raises(GradientError, match="given to another"):
                    train(old, model, 1)


def scaled(optimizer, model, step: int, scaler, unscales: bool = False, bad: bool = False) -> None:
    optimizer.zero_grad()
    loss = model(batch(step, hvd.rank())).square().mean()
    scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


@cases.each(BASES)
def a_scaler_is_used_as_most_code_does(make) -> None:
    model, other = network(), network()
    optimizer = wrapped(model, base=make(model.parameters()), trigger=ConstantThreshold(0))
    expected = wrapped(other, trigger=ConstantThreshold(0))
    # powers of two: scaling is exact
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(5):
        scaled(optimizer, model, step, scaler)
        train(expected, other, 1, begin=step)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    before = model[0].weight.detach().clone()
    scaled(optimizer, model, 5, scaler, unscales=True)
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.grad.norm() < 1.1e-3
    optimizer.average_parameters()


@cases.each(BASES)
def a_step_that_a_scaler_skips_on_one_rank_counts_on_all(make) -> None:
    model = network()
    optimizer = wrapped(model, base=make(model.parameters()), trigger=ConstantThreshold(0))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(6):
        scaled(optimizer, model, step, scaler, bad=step in (2, 3) and hvd.rank() == 0)
        assert torch.isfinite(model[0].weight).all()
        # another collective in between: ranks are at the same step
        steps = plain.allgather(torch.tensor([optimizer.event_stats()["total"]["passes"]]), name="passes")
        assert steps.tolist() == [step + 1] * hvd.size()
    assert scaler.get_scale() == (64.0 if hvd.rank() == 0 else 256.0)
    optimizer.average_parameters()


@cases.add
def ranks_with_other_buffers_are_told_so() -> None:
    if hvd.size() == 1:
        return
    model = network()
    named = model.named_buffers() if hvd.rank() == 0 else None
    optimizer = hvd.EventGraDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), named_buffers=named
    )
    with pytest.raises(MismatchError, match="buffers"):
        optimizer.average_parameters()


class Renewing(torch.nn.Module):
    """Its buffer is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 10)
        self.register_buffer("mean", torch.zeros(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        return self.layer(x)


@cases.each({"converted": True, "assigned": False})
def buffers_that_are_replaced_are_looked_up_or_told(converted: bool) -> None:
    for looks_up in (True, False):
        model = Renewing()
        optimizer = hvd.EventGraDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            named_buffers=model if looks_up else model.named_buffers(),
        )  # fmt: skip
        if converted:
            model.double().float()
            model.mean.fill_(hvd.rank())
        else:
            model(torch.full((2, 40), float(hvd.rank()))).sum().backward()
        before = model.mean
        if not looks_up:
            with pytest.raises(ValueError, match=r"buffer 'mean' is gone: it was replaced .* named_buffers=model"):
                optimizer.average_parameters()
            continue
        optimizer.average_parameters()
        assert model.mean is before
        assert model.mean.tolist() == [(hvd.size() - 1) / 2] * 40


@cases.add
def buffers_that_have_no_mean_stay() -> None:
    model = network()
    big, table = torch.tensor(2**60 + 1), torch.tensor([0.76 + 0.64j])
    half = torch.full((3,), float(hvd.rank()), dtype=torch.float16)
    # elements that share their memory, and eight bits each
    expanded, tiny = torch.full((1, 2), float(hvd.rank())).expand(3, 2), torch.ones(2).to(torch.float8_e4m3fn)
    optimizer = hvd.EventGraDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        # a buffer may have the name of a parameter
        named_buffers=[("big", big), ("table", table), ("0.weight", half), ("expanded", expanded), ("tiny", tiny)],
    )
    train(optimizer, model, 2)
    optimizer.average_parameters()
    assert int(big) == 2**60 + 1
    assert table[0] == torch.tensor(0.76 + 0.64j)
    assert half.tolist() == [(hvd.size() - 1) / 2] * 3
    assert expanded.tolist() == [[(hvd.size() - 1) / 2] * 2] * 3
    assert tiny.float().tolist() == [1.0, 1.0]


@cases.each({"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16})
def other_types_are_averaged(dtype) -> None:
    model = network(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.25 * hvd.rank()
    before = torch.cat([p.detach().double().view(-1) for p in model.parameters()])
    optimizer = wrapped(model, trigger=ConstantThreshold(0), base=torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.step()
    everyone = plain.allgather(before.reshape(1, -1), name="before")
    weights = torch.from_numpy(Ring().matrix(hvd.size())[hvd.rank()])
    expected = (weights[:, None] * everyone).sum(dim=0)
    found = torch.cat([p.detach().double().view(-1) for p in model.parameters()])
    assert torch.allclose(found, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert {p.dtype for p in model.parameters()} == {dtype}
    optimizer.average_parameters()


LAYOUTS = {
    "channels-last": lambda: torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels-last-bfloat16": lambda: torch.ones(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last),
    "strided": lambda: torch.arange(36.0).reshape(6, 6)[::2, ::3],
    "0-d": lambda: torch.tensor(1.5),
    "empty": lambda: torch.zeros(0, 3),
    "complex64": lambda: torch.tensor([[1.0 + 2j, 3 - 1j]]),
    "complex128-transposed": lambda: torch.tensor([[1.0 + 2j, 3 - 1j]], dtype=torch.complex128).t(),
    "conjugated": lambda: torch.tensor([[1.0 + 2j, 3 - 1j]]).conj(),
}


@cases.each(LAYOUTS)
def parameters_of_any_layout_are_averaged_and_keep_it(make) -> None:
    # a value of bfloat16 near 2.5 is rounded by up to 0.008 each time that it is mixed
    values = make()
    weight = torch.nn.Parameter(values.clone() + hvd.rank() if values.numel() else values)
    stride, dtype = weight.stride(), weight.dtype
    optimizer = hvd.DPSGDOptimizer(torch.optim.SGD([weight], lr=0.0))
    optimizer.step()
    mean = float((Ring().matrix(hvd.size())[hvd.rank()] * np.arange(hvd.size())).sum())
    assert torch.allclose(weight.detach(), values + mean, atol=4e-2 if dtype == torch.bfloat16 else 1e-5)
    optimizer.average_parameters()
    assert torch.allclose(weight.detach(), values + (hvd.size() - 1) / 2, atol=1e-2)
    assert (weight.stride(), weight.dtype) == (stride, dtype)


@cases.add
def a_parameter_that_has_no_mean_is_refused_with_a_remedy() -> None:
    weight = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"'parameter.0' is torch.float8_e4m3fn.*freeze it: p.requires_grad_"):
        hvd.EventGraDOptimizer(torch.optim.SGD([weight], lr=0.1))


@cases.add
def parameters_that_are_not_contiguous_are_averaged() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t() + hvd.rank())
    optimizer = hvd.DPSGDOptimizer(torch.optim.SGD([weight], lr=0.0))
    optimizer.step()
    mean = float((Ring().matrix(hvd.size())[hvd.rank()] * np.arange(hvd.size())).sum())
    assert torch.allclose(weight.detach(), torch.arange(6.0).reshape(2, 3).t() + mean)
    optimizer.average_parameters()


@cases.add
def a_closure_is_called_once_at_the_parameters_before_averaging() -> None:
    model, other = network(), network()
    optimizer, expected = wrapped(model), wrapped(other)
    calls = []

    def closure():
        calls.append(model[0].weight.detach().clone())
        optimizer.zero_grad()
        loss = model(batch(0, hvd.rank())).square().mean()
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    assert float(optimizer.step(closure).detach()) > 0
    train(expected, other, 1)
    assert_equal(model, other)
    assert len(calls) == 1
    assert torch.equal(calls[0], before)
    optimizer.average_parameters()
    expected.average_parameters()


@cases.add
def what_the_plain_optimizer_has_goes_on() -> None:
    model = network()
    check_that_it_goes_on(
        model, lambda plain: wrapped(model, base=plain), lambda: model(batch(0, hvd.rank())).square().mean()
    )


@cases.add
def schedulers_scalers_and_broadcasts_know_the_optimizer() -> None:
    model = network()
    base = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.StepLR(base, 1)
    optimizer = wrapped(model, base=base)
    assert isinstance(optimizer, torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.event_stats()["total"]["passes"] == 0
    train(optimizer, model, 2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert optimizer.event_stats()["total"]["passes"] == 2
    optimizer.average_parameters()


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    if hvd.size() == 1:
        return
    with pytest.raises(MismatchError, match=r"disagree on trigger.delta: rank 0 has 0.5"):
        wrapped(network(), trigger=ConstantThreshold(0.5 + hvd.rank()))
    with pytest.raises(MismatchError, match="disagree on topology"):
        wrapped(network(), topology=Ring() if hvd.rank() else FullyConnected())


@cases.add
def what_cannot_be_honoured_is_refused_with_a_remedy() -> None:
    model = network()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        wrapped(model, base=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="is missing"):
        hvd.EventGraDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())[:2])
    with pytest.raises(ValueError, match="several tensors named 'a'"):
        hvd.EventGraDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("a", p) for p in model.parameters()])
    if hvd.size() > 1 and not hvd.mpi_enabled():
        with pytest.raises(UnsupportedError, match="uses Gloo, which has no one-sided operations"):
            wrapped(model, transport="one_sided")


@cases.add
def a_number_that_is_not_finite_reaches_the_neighbours() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(1e6), compression=TopK(0.05))
    train(optimizer, model, 2)
    if hvd.rank() == 0:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    optimizer.zero_grad()
    optimizer.step()
    near = {0, 1, hvd.size() - 1}
    assert bool(torch.isnan(model[0].weight).any()) == (hvd.rank() in near)
    optimizer.average_parameters()


@cases.add
def some_of_the_ranks_may_do_it_alone() -> None:
    if hvd.size() < 3:
        return
    process_set = hvd.add_process_set([0, hvd.size() - 1])
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(0), process_set=process_set)
    train(optimizer, model, 4)
    optimizer.average_parameters()
    if process_set.included():
        everyone = plain.allgather(model[0].weight.detach().reshape(1, -1), name="some", process_set=process_set)
        assert (everyone == everyone[0]).all()
        assert optimizer.event_stats()["total"]["messages"] == 4 * 6
    hvd.remove_process_set(process_set)
    # the number of a process set that is removed goes to the next one
    others = hvd.add_process_set([1, hvd.size() - 1])
    optimizer = wrapped(model, trigger=ConstantThreshold(0), process_set=others)
    train(optimizer, model, 2)
    optimizer.average_parameters()
    hvd.remove_process_set(others)


# -- elastic runs --------------------------------------------------------------------------------------------------


def wrapped_and_synced(**settings):
    model = network()
    optimizer = wrapped(model, trigger=SlopeThreshold(), compression=TopK(0.05), **settings)
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    return model, optimizer, state


@cases.add
def what_does_not_come_through_a_change_of_ranks_is_refused_in_elastic_runs() -> None:
    with in_elastic_run():
        model = network()
        optimizer = wrapped(model)
        for call in (
            lambda: train(optimizer, model, 1),
            optimizer.average_parameters,
            optimizer.consensus_distance,
            lambda: optimizer.load_event_state_dict({}),
        ):
            with pytest.raises(UnsupportedError, match=r"no hvd\.elastic\.TorchState has synced this optimizer"):
                call()
        for settings, reason in (
            ({"transport": "one_sided"}, r"MPI does not outlive a rank"),
            ({"process_set": plain.ProcessSet([0])}, r"Horovod forgets process sets"),
        ):
            with pytest.raises(UnsupportedError, match=rf"in an elastic run: .*{reason}"):
                wrapped(network(), **settings)


class Fixed(Topology):
    """Has weights for 3 ranks, as a graph of 3 nodes."""

    id = "fixed"

    def matrix(self, size):
        if size != 3:
            raise ValueError(f"these are weights of 3 ranks, and there are {size}")
        return np.full((3, 3), 1 / 3)


@cases.add
def a_topology_for_another_number_of_ranks_is_refused_when_ranks_meet() -> None:
    with in_elastic_run():
        model = network()
        optimizer = wrapped(model, topology=Fixed())
        state = hvd.elastic.TorchState(model, optimizer)
        if hvd.size() == 1:
            # it has no neighbours, and trains alone
            state.sync()
            train(optimizer, model, 1)
            return
        with pytest.raises(UnsupportedError, match=rf"among {hvd.size()} ranks, in an elastic run: .*Ring\(\)"):
            state.sync()


@cases.each({"waiting": {}, "overlap": {"overlap": True}})
def an_elastic_state_goes_back_to_its_commit_and_makes_parameters_the_mean_of_ranks(settings) -> None:
    with in_elastic_run():
        model, optimizer, state = wrapped_and_synced(**settings)
        train(optimizer, model, 6)
        state.commit()
        committed = copy.deepcopy(model)
        train(optimizer, model, 5, 6)
        expected = copy.deepcopy(model)
        # what is under way among living ranks has its name until it arrives
        plain.barrier()
        state.restore()
        assert_equal(model, committed)
        train(optimizer, model, 5, 6)
        assert_equal(model, expected)
        plain.barrier()
        state.restore()
        before = optimizer.event_stats()
        state.reset()
        state.sync()
        for (name, p), q in zip(model.named_parameters(), committed.parameters(), strict=True):
            mean = plain.allreduce(q.detach(), name=f"committed.{name}")
            torch.testing.assert_close(p.detach(), mean, rtol=1e-5, atol=1e-6)
        assert optimizer.event_stats() == {**before, "lost_ranks": 0}
        assert optimizer.consensus_distance() == 0
        train(optimizer, model, 5, 6)
        passes = optimizer.event_stats()["total"]["passes"]
        assert passes == before["total"]["passes"] + 5 + sends_ahead(settings)
        optimizer.average_parameters()
        assert optimizer.consensus_distance() < 1e-6


def sends_ahead(settings) -> int:
    """Passes beyond the steps: what was sent ahead is sent anew among other ranks."""
    return int(settings.get("overlap", False) and hvd.size() > 1)
