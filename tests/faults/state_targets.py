"""What loads states, each with a good one: every kind of state that this package keeps."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import hvd_compress.torch as hvd
from hvd_compress import OneBit, PowerSGD, SlopeThreshold, TopK, ddp
from hvd_compress._torch.outer import OuterOptimizer, nesterov
from hvd_compress.async_server.gradient_encoder import GradientEncoder
from hvd_compress.daso import DasoMember
from hvd_compress.ddp._hook import new_ledger
from hvd_compress.ddp._settings import routing_of
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, OuterSGD
from hvd_compress.errors import StateError
from hvd_compress.feedback import check_state, redistribute
from hvd_compress.gossip import GossipLoopback
from hvd_compress.gossip.averager import Averager
from hvd_compress.tensors import ParameterSpec
from tests.threads import World
from tests.unit import test_daso, test_diloco, test_powersgd
from tests.unit.test_feedback import states
from tests.unit.test_hostile_states import ledger_of, on_arrays

__all__ = ["Hook", "Target", "every_target"]


class Target(NamedTuple):
    """Something that loads states.

    Args:
        good: a state that it takes.
        load: takes a state, or raises StateError.
        kept: what it has of it.
    """

    good: Any
    load: Callable[[Any], Any]
    kept: Callable[[], Any]


def _ledgers() -> Iterator[tuple[str, Target]]:
    for kind in ("residuals", "debts", "adagrad"):
        ledger = ledger_of(kind)
        yield f"DistributedOptimizer, {kind}", Target(ledger.state_dict(), ledger.load_state_dict, ledger.state_dict)


def _eventgrad() -> Target:
    tensors = [ParameterSpec("w", (40, 30)), ParameterSpec("v", (3, 5), "float64")]
    group = GossipLoopback(tensors, 3, SlopeThreshold(horizon=1.0), compression=TopK(0.05))
    arrays = [[np.full(t.numel, rank + 1.0, t.dtype) for t in tensors] for rank in range(3)]
    for _ in range(4):
        group.step(arrays)
    averager = Averager(group.nodes[1], None)
    return Target(averager.state_dict(), lambda s: averager.load(averager.check(s)), averager.state_dict)


def _diloco(outer: Any, **settings: Any) -> Target:
    layout = "2x2" if settings else "alone"

    def program(groups: Any) -> Target:
        member = DiLoCoMember(test_diloco.TENSORS, DiLoCoSettings(3, **settings), groups, outer)
        arrays = test_diloco.start_of(test_diloco.TENSORS)
        test_diloco.train(member, test_diloco.TENSORS, arrays, 0, 4)
        return Target(on_arrays(member.state_dict()), member.load_state_dict, lambda: on_arrays(member.state_dict()))

    return World().run(test_diloco.NODES[layout], program)[0]


def _dilocos() -> Iterator[tuple[str, Target]]:
    yield "DiLoCo", _diloco(OuterSGD())
    yield "DiLoCo, outer SGD of PyTorch, residuals", _diloco(partial(OuterOptimizer, nesterov), compression=TopK(0.05))
    yield "DiLoCo, outer Adam of PyTorch", _diloco(partial(OuterOptimizer, torch.optim.Adam), delay=1)


def _daso(way: str) -> Target:
    def program(groups: Any) -> Target:
        schedule = {"global_skips": 2, "batches_to_wait": 1, "steps_per_epoch": 6}
        chosen = test_daso.settings(**schedule, **test_daso.WAYS[way])
        member = DasoMember(test_daso.TENSORS, chosen, groups)
        arrays = test_daso.start_of(test_daso.TENSORS)
        test_daso.train(member, groups, test_daso.TENSORS, arrays, 0, 10, ends=[5])
        return Target(member.state_dict(), member.load_state_dict, member.state_dict)

    return World().run(test_daso.NODES["2x2"], program)[0]


def _powersgd() -> Target:
    ledgers = test_powersgd.ledgers(2, PowerSGD(2))
    for number in range(2):
        test_powersgd.step(ledgers, test_powersgd.gradients(2, number))
    return Target(ledgers[0].state_dict(), ledgers[0].load_state_dict, ledgers[0].state_dict)


def _async_worker() -> Target:
    tensors = [ParameterSpec("w", (40, 30)), ParameterSpec("v", (50, 20))]
    encoder = GradientEncoder(tensors, [OneBit(), TopK(0.05)], 1)
    entries = {t.name: {"shape": list(t.shape), "values": np.ones(t.numel, np.float32)} for t in tensors}
    good = {**states(1)[0], "owner_residuals": {}, "residuals": entries}
    return Target(good, lambda s: encoder.load_state_dict(check_state(s)["residuals"]), encoder.state_dict)


def _redistribute() -> Target:
    def load(of_all: Any) -> None:
        if not isinstance(of_all, list):
            raise StateError("not a list")
        for state in redistribute(of_all, 3):
            check_state(state)

    return Target(states(2), load, dict)


def _owing(shapes: dict[str, Sequence[int]], steps: int = 3) -> dict[str, Any]:
    """A state for one rank, which several have saved."""
    entries = {n: {"shape": list(shape), "values": np.ones(math.prod(shape), "f4")} for n, shape in shapes.items()}
    return {"format": 1, "size": 1, "rank": 0, "steps": steps, "residuals": entries, "owner_residuals": {}}


class Hook(ExitStack):
    """A hook of DDP on one rank."""

    def target(self) -> Target:
        """The states of the hook."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        self.callback(dist.destroy_process_group)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
        ddp.register_comm_hook(model, OneBit(), min_numel=0)
        state = _owing({"weight": (30, 40), "bias": (30,)})
        ddp.load_state_dict(model, state)
        return Target(state, partial(ddp.load_state_dict, model), lambda: on_arrays(ddp.state_dict(model)))


def _ddp_of_two() -> Target:
    """The books of a hook of DDP among two ranks, whose buckets were exchanged."""
    routing = routing_of("fuzz", OneBit(), "two_phase", 0, 2**20)
    tensors = dict(torch.nn.Linear(40, 30).named_parameters())
    ranks: Any = SimpleNamespace(size=2, position=0)
    ledger = new_ledger(routing, ranks, tensors, [("bias", "weight")], None)
    state = {**_owing({"weight": (30, 40), "bias": (30,)}), "size": 2}
    owned = ledger.accounts["weight"].owned
    if owned is None:
        raise RuntimeError("rank 0 owns nothing")
    values = np.ones(owned.stop - owned.start, np.float32)
    state["owner_residuals"] = {"weight": {"shape": [30, 40], "start": owned.start, "values": values}}
    ledger.load_state_dict(state)
    return Target(ledger.state_dict(), ledger.load_state_dict, ledger.state_dict)


def _momentum() -> Iterator[tuple[str, Target]]:
    """Optimizers of PyTorch on one rank, with what several have owed, and with what each keeps for itself."""
    makes: dict[str, Callable[[Any], Any]] = {
        "CompressedAdam": lambda named: hvd.CompressedAdam(named, warmup_steps=1, compression=OneBit(), min_numel=0),
        "DeMo": lambda named: hvd.DeMo(named, k=4, chunk=16),
        "Signum": lambda named: hvd.Signum(named),
        "DGC": lambda named: hvd.DGC(named, compression=TopK(0.05), min_numel=0),
        "DistributedOptimizer, one rank": lambda named: hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in named], lr=0.1), named, OneBit()
        ),
    }
    for kind, make in makes.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = make(list(model.named_parameters()))
        for step in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 40)
            # elements that get gradients after the warm-up only: they wait for a variance
            x[:, step * 10 :] = 0.0
            model(x).square().sum().backward()
            optimizer.step()
        state = on_arrays(optimizer.compression_state_dict())
        carrier = getattr(optimizer, "_carrier", None)
        shapes = {"weight": (30, 40)} if carrier is None else {"weight": tuple(carrier._stand_ins["weight"].shape)}
        state["residuals"] |= _owing(shapes)["residuals"]
        optimizer.load_compression_state_dict(state)
        kept = partial(_kept, optimizer.compression_state_dict)
        yield kind, Target(state, optimizer.load_compression_state_dict, kept)


def _kept(state_dict: Callable[[], Any]) -> Any:
    return on_arrays(state_dict())


def _keras() -> Iterator[tuple[str, Target]]:
    """An optimizer of Keras on one rank, before its first step and after it, and a tape of TensorFlow."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    import hvd_compress.keras as hvd_keras

    variables = [keras.Variable(np.ones((40, 30), np.float32), name="w")]
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=OneBit())
    optimizer.apply_gradients([(torch.ones(40, 30), variables[0])])
    (name,) = optimizer._hvd.exchange._names
    state = _owing({name: (40, 30)})
    optimizer.load_compression_state_dict(state)
    yield "Keras on torch, one rank", Target(state, optimizer.load_compression_state_dict, optimizer._hvd.state)
    later = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=OneBit())
    later.load_compression_state_dict(state)
    # entries of others are kept there as they came
    known = lambda: {key: later._hvd.state()[key] for key in state}  # noqa: E731
    yield "Keras, before the first step", Target(state, later.load_compression_state_dict, known)


def _tape() -> Target:
    import tensorflow as tf

    import hvd_compress.tensorflow as hvd_tf

    source = tf.Variable(tf.ones([40, 30]), name="w")
    with tf.GradientTape() as inner:
        loss = tf.reduce_sum(source)
    tape = hvd_tf.DistributedGradientTape(inner, compression=OneBit())
    hvd_tf.init()
    tape.gradient(loss, [source])
    state = _owing({"w": (40, 30)})
    tape.load_compression_state_dict(state, [source])
    return Target(
        state, lambda s: tape.load_compression_state_dict(s, [source]), lambda: tape.compression_state_dict([source])
    )


def every_target(hook: Hook) -> dict[str, Target]:
    """All that loads states, by what the states are of."""
    return {
        **dict(_ledgers()),
        "PowerSGD": _powersgd(),
        "EventGraD, of three ranks": _eventgrad(),
        **dict(_dilocos()),
        "DASO, values": _daso("raw"),
        "DASO, residuals": _daso("adaptive-delta"),
        "asynchronous worker": _async_worker(),
        "redistribute": _redistribute(),
        "DDP hook, one rank": hook.target(),
        "DDP hook, two ranks": _ddp_of_two(),
        **dict(_momentum()),
        **dict(_keras()),
        "TensorFlow, one rank": _tape(),
    }
