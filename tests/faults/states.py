"""Load damaged and foreign states: each is taken as a whole, or a StateError says why not and nothing has changed.

`python -m tests.faults.states --count 50000 --seed 0` writes how many were tried and refused, of each kind.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import OneBit, SlopeThreshold, TopK
from hvd_compress.async_server.gradient_encoder import GradientEncoder
from hvd_compress.diloco import DiLoCoMember, DiLoCoSettings, OuterSGD
from hvd_compress.errors import StateError
from hvd_compress.feedback import check_state, read_state, redistribute, write_state
from hvd_compress.gossip import GossipLoopback
from hvd_compress.gossip.averager import Averager
from hvd_compress.tensors import ParameterSpec
from tests.hostile import WRONG, same, wrong_arrays
from tests.unit import test_diloco
from tests.unit.test_feedback import states
from tests.unit.test_hostile_states import ledger_of


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


# -- what loads ------------------------------------------------------------------------------------------------------


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


def _diloco() -> Target:
    from tests.threads import World

    found: list[Target] = []

    def program(groups: Any) -> None:
        member = DiLoCoMember(test_diloco.TENSORS, DiLoCoSettings(3), groups, OuterSGD())
        arrays = test_diloco.start_of(test_diloco.TENSORS)
        test_diloco.train(member, test_diloco.TENSORS, arrays, 0, 4)
        if groups.rank == 0:
            found.append(Target(member.state_dict(), member.load_state_dict, member.state_dict))

    World().run(test_diloco.NODES["alone"], program)
    return found[0]


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


class _Hook(ExitStack):
    """A hook of DDP on one rank."""

    def target(self) -> Target:
        """The states of the hook."""
        import torch
        import torch.distributed as dist

        from hvd_compress import ddp

        folder = self.enter_context(tempfile.TemporaryDirectory())
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        self.callback(dist.destroy_process_group)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
        ddp.register_comm_hook(model, OneBit(), min_numel=0)
        model(torch.ones(2, 40)).sum().backward()
        plain = lambda: json.loads(json.dumps(ddp.state_dict(model), default=lambda x: x.tolist()))  # noqa: E731
        return Target(ddp.state_dict(model), lambda s: ddp.load_state_dict(model, s), plain)


# -- what is wrong ---------------------------------------------------------------------------------------------------


def spoiled(good: Any, foreign: list[Any], draw: random.Random) -> Any:
    """A copy of a state with one to three places replaced, taken out or doubled; or a state of something else."""
    if draw.random() < 0.02:
        return copy.deepcopy(draw.choice(foreign))
    state = copy.deepcopy(good)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        state = _changed(state, foreign, draw)
    return state


def _changed(value: Any, foreign: list[Any], draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        choice = draw.random()
        if choice < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if choice < 0.15:
            return {**value, draw.choice(["x", "", "w\0", "values"]): draw.choice(WRONG)}
        return {**value, key: _changed(value[key], foreign, draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        i = draw.randrange(len(value))
        return [*value[:i], _changed(value[i], foreign, draw), *value[i + (draw.random() < 0.9) :]]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and draw.random() < 0.7:
        return _bits_flipped(value, draw) if draw.random() < 0.5 else draw.choice(list(wrong_arrays(value)))
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 2**31, -(2**63), 7])
    return copy.deepcopy(draw.choice([*WRONG, *foreign]))


def _bits_flipped(array: np.ndarray, draw: random.Random) -> np.ndarray:
    data = bytearray(array.tobytes())
    for _ in range(draw.choice([1, 4, 64]) if data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape).copy()


def finite(state: Any) -> bool:
    """Whether no value of a state is infinite or NaN, but for those of EventGraD that may be.

    The norm of what was sent last, where that was not finite, makes the tensor go again; thresholds may grow without
    bound; and a copy of this rank's own is replaced when receivers are to get the tensor whole.
    """
    if isinstance(state, dict):
        skipped = {"norms", "thresholds"} if "sent_at" in state else {"own"} if "needs_whole" in state else set()
        return all(finite(value) for key, value in state.items() if key not in skipped)
    if isinstance(state, list):
        return all(map(finite, state))
    if isinstance(state, np.ndarray) and state.dtype.kind == "f":
        return bool(np.isfinite(state).all())
    return not isinstance(state, float) or bool(np.isfinite(state))


# -- trying ----------------------------------------------------------------------------------------------------------


def attempt(target: Target, wrong: Any) -> str:
    """Load a damaged state: "refused", "taken", or what went wrong."""
    before = target.kept()
    with np.errstate(all="ignore"):
        try:
            target.load(wrong)
        except StateError:
            return "refused" if same(target.kept(), before) else "refused, but something has changed"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        is_finite = finite(target.kept())
        target.load(target.good)
    return "taken" if is_finite else "a value that is not finite was taken"


def try_file(path: Path, whole: bytes, draw: random.Random) -> str:
    """Read a damaged file."""
    data = bytearray(whole)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    else:
        at, length = draw.randrange(len(data)), draw.choice([1, 1, 2, 8, 64])
        data[at : at + length] = draw.randbytes(len(data[at : at + length]))
    path.write_bytes(data)
    try:
        return "taken" if finite(read_state(path)) else "a value that is not finite was taken"
    except StateError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tried(count: int, seed: int, minutes: float) -> dict[str, Counter[str]]:
    """Try so many damaged states, or for so long, the kinds in turns; returns how each ended, by kind."""
    deadline = time.monotonic() + 60 * minutes
    found: dict[str, Counter[str]] = {}
    with _Hook() as hook, tempfile.TemporaryDirectory() as folder:
        targets = {
            **dict(_ledgers()), "EventGraD": _eventgrad(), "DiLoCo": _diloco(), "asynchronous worker": _async_worker(),
            "redistribute": _redistribute(), "DDP hook": hook.target(),
        }  # fmt: skip
        foreign = [target.good for target in targets.values()]
        path = Path(folder) / "state.npz"
        write_state(path, states(2)[0])
        whole = path.read_bytes()
        for i in range(count):
            if time.monotonic() > deadline:
                break
            draw = random.Random(f"{seed} {i}")
            kind = [*targets, "file"][i % (len(targets) + 1)]
            if kind == "file":
                ended = try_file(path, whole, draw)
            else:
                target = targets[kind]
                ended = attempt(target, spoiled(target.good, foreign, draw))
            found.setdefault(kind, Counter())[ended] += 1
            if ended not in ("refused", "taken"):
                print(f"{kind}, seed {seed}, number {i}: {ended}", flush=True)
    return found


def main() -> int:
    """Try, and print; returns how many were neither refused nor taken as a whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="end after this time; the record says how many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/states.json"))
    options = parser.parse_args()
    begin = time.monotonic()
    found = tried(options.count, options.seed, options.minutes)
    seconds = time.monotonic() - begin
    count = sum(of.total() for of in found.values())
    record = {"count": count, "seed": options.seed, "seconds": round(seconds), "kinds": found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for kind, ended in found.items():
        print(f"{kind}: {dict(ended)}")
    return sum(n for of in found.values() for ended, n in of.items() if ended not in ("refused", "taken"))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
