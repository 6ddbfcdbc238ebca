"""Saved states as a bug, a damaged disk or an attacker would make them: a good one, one value replaced or gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

WRONG: list[Any] = [
    None, True, -1, 10**12, 2**70, 0.5, float("nan"), float("inf"), -0.5, "2", b"2", 1j, object(), [], [-1], ["x"], {},
    {"x": 1}, {1: 2}, np.zeros(0), np.zeros((2, 2)), np.array(["a"]), np.array([1j]), np.array([None]), np.array(0.0),
    np.full(3, np.nan),
]  # fmt: skip


def wrong_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    """The same number of values, or one more, of another kind each."""
    with np.errstate(invalid="ignore"):
        yield from (array.astype(dtype) for dtype in (np.int64, np.complex64, "U", object))
    yield array.reshape(1, *array.shape)
    yield np.concatenate([array.reshape(-1), array.reshape(-1)[:1]])
    if array.dtype.kind == "f" and array.size:
        for value in (np.nan, np.inf, -np.inf):
            spoiled = array.copy()
            spoiled.reshape(-1)[-1] = value
            yield spoiled


def damaged(value: Any, where: str = "state") -> Iterator[tuple[str, Any]]:
    """(what is wrong, a copy of the state in which that is so)."""
    for wrong in WRONG:
        if type(wrong) is not type(value) or not np.array_equal(wrong, value):
            yield f"{where} = {wrong!r}", wrong
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"{where} without {key!r}", {k: v for k, v in value.items() if k != key}
            for said, wrong in damaged(entry, f"{where}[{key!r}]"):
                yield said, {**value, key: wrong}
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            for said, wrong in damaged(entry, f"{where}[{i}]"):
                yield said, [*value[:i], wrong, *value[i + 1 :]]
    elif isinstance(value, np.ndarray):
        for wrong in wrong_arrays(value):
            yield f"{where} as {wrong.dtype} of shape {wrong.shape}, {wrong.reshape(-1)[-1:]}", wrong


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b)
