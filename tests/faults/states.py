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
from pathlib import Path
from typing import Any

import numpy as np

import hvd_compress.torch as hvd
from hvd_compress.errors import StateError
from hvd_compress.feedback import read_state, write_state
from tests.faults.state_targets import Hook, Target, every_target
from tests.hostile import WRONG, same, wrong_arrays
from tests.unit.test_feedback import states

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


_MAY_BE_ANYTHING = {"sent_at": {"norms", "thresholds"}, "needs_whole": {"own"}, "batches_to_wait": {"loss"}}
"""Keys whose values may be anything, by a key that is beside them."""


def finite(state: Any) -> bool:
    """Whether no value of a state is infinite or NaN, but for those that may be.

    Of EventGraD: the norm of what was sent last, where that was not finite, makes the tensor go again; thresholds may
    grow without bound; and a copy of this rank's own is replaced when receivers are to get the tensor whole. Of DASO:
    the loss of an epoch is what the user has told.
    """
    if isinstance(state, dict):
        skipped = next((keys for key, keys in _MAY_BE_ANYTHING.items() if key in state), set())
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
    with Hook() as hook, tempfile.TemporaryDirectory() as folder:
        targets = every_target(hook)
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
    hvd.init()
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
