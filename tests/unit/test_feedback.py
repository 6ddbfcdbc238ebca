from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_compress.errors import StateError
from hvd_compress.exchange import chunk_bounds
from hvd_compress.feedback import FORMAT, check_state, read_state, redistribute, write_state

SHAPES = {"w": (7, 11), "b": (5,)}


def states(size: int, steps: int = 3) -> list[dict[str, Any]]:
    """States of `size` ranks with random residuals; "b" has no owner residuals."""
    rng = np.random.default_rng(size)
    result = []
    for rank in range(size):
        residuals = {
            name: {"shape": list(shape), "values": rng.standard_normal(np.prod(shape)).astype(np.float32)}
            for name, shape in SHAPES.items()
        }
        bounds = chunk_bounds(77, size, 8)
        owned = rng.standard_normal(bounds[rank + 1] - bounds[rank]).astype(np.float32)
        owners = {"w": {"shape": [7, 11], "start": bounds[rank], "values": owned}}
        state = {"format": FORMAT, "size": size, "rank": rank, "steps": steps, "compressor": {"id": "onebit"}}
        result.append({**state, "residuals": residuals, "owner_residuals": owners})
    return result


def owed(of_all: list[dict[str, Any]], name: str) -> np.ndarray:
    """Everything that all ranks owe of a tensor, typed from the description of a state."""
    total = np.zeros(int(np.prod(SHAPES[name])))
    for state in of_all:
        if name in state["residuals"]:
            total += state["residuals"][name]["values"]
        if name in state["owner_residuals"]:
            entry = state["owner_residuals"][name]
            total[entry["start"] : entry["start"] + len(entry["values"])] += entry["values"]
    return total


@pytest.mark.parametrize("old", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 9])
def test_redistribution_keeps_the_sum(old: int, new: int) -> None:
    before = states(old)
    after = redistribute(before, new)
    assert [s["rank"] for s in after] == list(range(new))
    assert {s["size"] for s in after} == {new}
    assert {s["steps"] for s in after} == {3}
    for state in after:
        check_state(state)
    for name in SHAPES:
        np.testing.assert_allclose(owed(after, name), owed(before, name), atol=1e-5)


def test_there_and_back_keeps_the_sum() -> None:
    before = states(4)
    after = redistribute(redistribute(before, 2), 3)
    np.testing.assert_allclose(owed(after, "w"), owed(before, "w"), atol=1e-5)


def test_redistribution_changes_no_input_and_shares_no_memory() -> None:
    before = states(2)
    copies = [{n: e["values"].copy() for n, e in s["residuals"].items()} for s in before]
    for state in redistribute(before, 2):
        for entry in state["residuals"].values():
            entry["values"] += 1.0
    for state, copy in zip(before, copies, strict=True):
        for name, entry in state["residuals"].items():
            np.testing.assert_array_equal(entry["values"], copy[name])


def test_the_order_of_the_states_does_not_matter() -> None:
    before = states(4)
    straight, reverse = redistribute(before, 2), redistribute(before[::-1], 2)
    for a, b in zip(straight, reverse, strict=True):
        np.testing.assert_array_equal(a["residuals"]["w"]["values"], b["residuals"]["w"]["values"])


def test_float64_stays_float64() -> None:
    before = states(2)
    for state in before:
        for entry in (*state["residuals"].values(), *state["owner_residuals"].values()):
            entry["values"] = entry["values"].astype(np.float64)
    assert redistribute(before, 3)[0]["residuals"]["w"]["values"].dtype == np.float64


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (lambda s: s[:-1], "one state of each of 3 ranks"),
        (lambda s: [*s, s[0]], "one state of each of 3 ranks"),
        (lambda s: [s[0], s[0], s[2]], "one state of each of 3 ranks"),
        (lambda s: [], "one state of each"),
        (lambda s: [s[0], s[1], {**s[2], "steps": 4}], "step 4"),
        (lambda s: [s[0], s[1], {**s[2], "size": 4}], "rank 2"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(chosen: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        redistribute(chosen(states(3)), 2)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        redistribute(states(2), 0)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "format"),
        ([1], "not a compressor state"),
        (None, "not a compressor state"),
        ({"format": FORMAT + 1}, f"{FORMAT + 1}"),
        ({"format": FORMAT, "size": 1, "rank": 0, "steps": 0}, "lacks owner_residuals, residuals"),
    ],
)
def test_what_is_no_state_is_refused(state: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        check_state(state)


@pytest.mark.parametrize(("start", "length"), [(-1, 3), (75, 3), (77, 1)])
def test_owner_residuals_lie_inside_their_tensor(start: int, length: int) -> None:
    state = states(1)[0]
    state["owner_residuals"]["w"] = {"shape": [7, 11], "start": start, "values": np.zeros(length, np.float32)}
    with pytest.raises(StateError, match="'w' lies outside"):
        check_state(state)


def test_values_must_fit_their_shape() -> None:
    state = states(1)[0]
    state["residuals"]["w"]["shape"] = [7, 12]
    with pytest.raises(StateError, match="'w' has 77 values"):
        check_state(state)


def test_a_file_holds_a_state_exactly(tmp_path: Path) -> None:
    for state in states(3):
        path = tmp_path / "made on the way" / f"{state['rank']}.npz"
        write_state(path, {**state, "iterations": 12})
        again = read_state(path)
        assert again["iterations"] == 12
        assert {k: v for k, v in again.items() if k not in ("residuals", "owner_residuals", "iterations")} == {
            k: v for k, v in state.items() if k not in ("residuals", "owner_residuals")
        }
        for kind in ("residuals", "owner_residuals"):
            assert again[kind].keys() == state[kind].keys()
            for name, entry in state[kind].items():
                assert again[kind][name]["values"].tobytes() == entry["values"].tobytes()
                assert again[kind][name]["values"].dtype == entry["values"].dtype
                assert again[kind][name]["shape"] == entry["shape"]
        assert [p.name for p in path.parent.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "another npz", "no residuals"])
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.npz"
    write_state(path, states(1)[0])
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "another npz":
        np.savez(path, values=np.zeros(3))
    elif damage == "no residuals":
        np.savez(path, plain=np.frombuffer(b'{"format": 1}', np.uint8))
    else:
        path.write_bytes(b"" if damage == "empty" else b"no state")
    with pytest.raises(StateError, match=r"state\.npz"):
        read_state(path)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1), (1, 4)])
def test_an_average_over_other_ranks_keeps_what_is_owed(old: int, new: int) -> None:
    before = states(old)
    after = redistribute(before, new, average=True)
    for name in SHAPES:
        np.testing.assert_allclose(owed(after, name) / new, owed(before, name) / old, rtol=1e-4, atol=1e-6)
        assert after[0]["residuals"][name]["values"].dtype == np.float32
