"""Event-triggered averaging through MPI's one-sided operations."""

from __future__ import annotations

import horovod.torch as plain
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import ConstantThreshold, Exponential, FullyConnected, OneBit, Ring, SlopeThreshold, TopK
from tests.parallel.cases import Cases
from tests.parallel.workers.eventgrad import assert_equal, check_copies, network, train, wrapped

cases = Cases()


def in_step(optimizer, model, steps: int, begin: int = 0) -> None:
    """Train so that each step's messages are there before any rank reads: then it is the synchronous algorithm."""
    transport = optimizer._gossip.member._averager.transport
    if transport is None:
        train(optimizer, model, steps, begin)
        return
    receive = transport.receive

    def receive_together() -> None:
        plain.barrier()
        receive()
        plain.barrier()

    transport.receive = receive_together
    train(optimizer, model, steps, begin)
    transport.receive = receive


WAYS = {
    "d-psgd": {"trigger": ConstantThreshold(0)},
    "slope": {"trigger": SlopeThreshold()},
    "topk": {"trigger": SlopeThreshold(), "compression": TopK(0.05)},
    "onebit": {"trigger": ConstantThreshold(0.01), "compression": OneBit()},
    "full": {"trigger": SlopeThreshold(), "topology": FullyConnected()},
    "exponential": {"trigger": ConstantThreshold(0.01), "topology": Exponential(), "compression": TopK(0.1)},
}


@cases.each(WAYS)
def in_step_both_transports_agree_bit_for_bit(settings) -> None:
    model, other = network(), network()
    optimizer = wrapped(model, transport="one_sided", **settings)
    synchronous = wrapped(other, transport="alltoall", **settings)
    in_step(optimizer, model, 10)
    train(synchronous, other, 10)
    assert_equal(model, other)
    mine, theirs = optimizer.event_stats()["total"], synchronous.event_stats()["total"]
    assert mine["messages"] == theirs["messages"]
    assert mine["bytes"] <= theirs["bytes"]
    optimizer.average_parameters()
    synchronous.average_parameters()
    assert_equal(model, other)


@cases.add
def nobody_waits_for_a_slow_rank() -> None:
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(0), transport="one_sided", compression=TopK(0.05))
    is_slow = hvd.rank() == hvd.size() - 1 > 0
    # the slow rank makes its first step when the others have made all of theirs: who waited for it would never end
    if not is_slow:
        train(optimizer, model, 40)
    plain.barrier()
    if is_slow:
        train(optimizer, model, 4)
    optimizer.average_parameters()
    same = plain.allgather(model[0].weight.detach().reshape(1, -1), name="same")
    assert (same == same[0]).all()


@cases.each({"all": False, "but what is frozen": True})
def what_a_slow_rank_misses_arrives_whole(freezes: bool) -> None:
    if hvd.size() == 1:
        return
    model = network()
    optimizer = wrapped(model, trigger=ConstantThreshold(0), transport="one_sided", compression=TopK(0.05))
    slow = hvd.size() - 1
    if hvd.rank() == slow:
        train(optimizer, model, 1)
    plain.barrier()
    if hvd.rank() != slow:
        # far more messages than a queue holds
        train(optimizer, model, 60)
    plain.barrier()
    transport = optimizer._gossip.member._averager.transport
    if freezes:
        # what a queue had no room for goes when it is trained again
        model[0].weight.requires_grad_(False)
        for step in range(3):
            train(optimizer, model, 1, begin=200 + step)
            plain.barrier()
        model[0].weight.requires_grad_(True)
    # two more steps of all: one reads what was queued and makes room, one brings what was missed
    for step in range(3):
        train(optimizer, model, 1, begin=100 + step)
        plain.barrier()
    transport.receive()
    plain.barrier()
    check_copies(optimizer, "late")
    optimizer.average_parameters()


@cases.add
def messages_are_never_torn() -> None:
    """Every value of a tensor says which step it is of; copies of neighbours must hold one step each."""
    weight = torch.nn.Parameter(torch.zeros(200_000))
    optimizer = hvd.EventGraDOptimizer(
        torch.optim.SGD([weight], lr=0.0), trigger=ConstantThreshold(0), transport="one_sided"
    )
    node = optimizer._gossip.member._averager.node
    seen = set()
    for step in range(60):
        with torch.no_grad():
            weight.fill_(hvd.rank() + 100.0 * step)
        optimizer.step()
        for slot in range(len(node.part.senders)):
            copy = node.copies.of_senders[0][slot]
            assert (copy == copy[0]).all(), (step, np.unique(copy))
            seen.add(float(copy[0]))
    assert len(seen) > 1 or hvd.size() == 1
    optimizer.average_parameters()


@cases.each({"new": True, "same": False})
def a_saved_state_goes_on(is_new: bool) -> None:
    model = network()
    settings = {"trigger": ConstantThreshold(0.5), "transport": "one_sided", "compression": TopK(0.05)}
    optimizer = wrapped(model, **settings)
    train(optimizer, model, 5 + hvd.rank())
    state = optimizer.event_state_dict()
    # what others send after a rank has saved, is not of the state, and must not be added to its copies
    train(optimizer, model, 4, begin=50)
    resumed = wrapped(model, **settings) if is_new else optimizer
    resumed.load_event_state_dict(state)
    # the first step sends everything whole, though nothing moves any more; the second reads it
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(hvd.rank())
    for group in resumed.param_groups:
        group["lr"], group["momentum"] = 0.0, 0.0
    before = resumed.event_stats()["total"]["passes"]
    in_step(resumed, model, 2)
    assert resumed.event_stats()["total"]["passes"] == before + 2
    check_copies(resumed, f"loaded.{is_new}")
    resumed.average_parameters()
    if is_new:
        optimizer.average_parameters()


@cases.add
def messages_that_a_full_queue_keeps_are_not_counted() -> None:
    weight = torch.nn.Parameter(torch.ones(500))
    optimizer = hvd.EventGraDOptimizer(
        torch.optim.SGD([weight], lr=0.0), trigger=ConstantThreshold(0), transport="one_sided"
    )
    plain.barrier()
    if hvd.rank() == 0:
        for _ in range(30):
            optimizer.step()
        report = optimizer.event_stats()["total"]
        neighbours = len(Ring().neighbours(hvd.size())[0].senders)
        # two messages fit into a queue
        assert report["messages"] == 2 * neighbours, report
        assert report["bytes"] == 2 * neighbours * (48 + 40 + 2000), report
    plain.barrier()
    optimizer.average_parameters()


@cases.add
def windows_can_be_given_up() -> None:
    optimizer = wrapped(network(), transport="one_sided")
    optimizer.step()
    optimizer.close()


@cases.add
def one_rank_needs_no_window() -> None:
    if hvd.size() > 1:
        return
    model = network()
    train(wrapped(model, transport="one_sided"), model)
    assert Ring().neighbours(1)[0].senders == ()
