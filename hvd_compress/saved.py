"""Checks of what a saved state holds, value by value; each error says which value it is, what came, what is allowed.

What passes comes back in one form: Python's numbers, and native NumPy arrays that share the memory of what was given
where they can.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import StateError

__all__ = ["equal", "flag", "flags", "floats", "integer", "integers", "real", "record", "sequence", "shape_of", "text"]

Array = npt.NDArray[Any]

_MOST = 2**63 - 1


def record(what: str, value: Any, keys: Iterable[str] = ()) -> dict[str, Any]:
    """A dict with string keys, these among them.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, dict):
        raise StateError(f"{what} is of type {type(value).__name__}: must be a dict")
    if missing := sorted(set(keys) - value.keys()):
        raise StateError(f"{what} lacks {', '.join(missing)}")
    for key in value:
        if not isinstance(key, str):
            raise StateError(f"{what} has the key {key!r}: keys must be strings")
    return value


def sequence(what: str, value: Any, length: int | None = None) -> list[Any]:
    """A list or tuple, of `length` if given.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, list | tuple):
        raise StateError(f"{what} is of type {type(value).__name__}: must be a list")
    if length is not None and len(value) != length:
        raise StateError(f"{what} has {len(value)} entries: must have {length}")
    return list(value)


def integer(what: str, value: Any, least: int = 0, most: int = _MOST) -> int:
    """An integer in [least, most]; True and False are none.

    Raises:
        StateError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        upper = "" if most == _MOST else f" and at most {most}"
        raise StateError(f"{what} is {_shown(value)}: must be an integer of at least {least}{upper}")
    return int(value)


def real(what: str, value: Any, above: float | None = None) -> float:
    """A finite number, greater than `above` if given.

    Raises:
        StateError: it is something else.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # compared before it is converted: an integer can be too large for a float
    if not is_number or not -np.inf < value < np.inf or (above is not None and value <= above):
        bound = "" if above is None else f" greater than {above:g}"
        raise StateError(f"{what} is {_shown(value)}: must be a finite number{bound}")
    try:
        return float(value)
    except OverflowError:
        raise StateError(f"{what} is too large for a float") from None


def flag(what: str, value: Any) -> bool:
    """True or False.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise StateError(f"{what} is {_shown(value)}: must be True or False")
    return bool(value)


def text(what: str, value: Any, choices: Iterable[str] = ()) -> str:
    """A string, one of the choices if there are any.

    Raises:
        StateError: it is something else.
    """
    allowed = tuple(choices)
    if not isinstance(value, str) or (allowed and value not in allowed):
        must = f"one of {', '.join(map(repr, allowed))}" if allowed else "a string"
        raise StateError(f"{what} is {_shown(value)}: must be {must}")
    return value


def equal(value: Any, expected: Any) -> bool:
    """Whether a value of a state, which may be anything, is the expected one, which is JSON-able."""
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(equal(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(expected) and all(map(equal, value, expected))
    # arrays, whose comparison is an array, are never equal
    return isinstance(value, str | int | float | np.generic | None) and bool(value == expected)


def shape_of(what: str, value: Any) -> tuple[int, ...]:
    """A shape: a list or tuple of integers of at least 0.

    Raises:
        StateError: it is something else.
    """
    return tuple(integer(f"a dimension of {what}", n) for n in sequence(what, value))


def floats(
    what: str,
    value: Any,
    shape: tuple[int, ...] | None = None,
    dtype: npt.DTypeLike | None = None,
    *,
    finite: bool = True,
) -> Array:
    """An array of float32 or float64; smaller floating types become float32.

    A torch tensor is taken as well, wherever it lies.

    Args:
        what: to call it in errors.
        value: of any floating type.
        shape: that it must have; flat, of any length, by default.
        dtype: to convert it to.
        finite: whether infinities and NaN are refused, as they are where converting makes them.

    Raises:
        StateError: it is something else.
    """
    array = _array(what, value)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise StateError(f"{what} has values of type {array.dtype}: must be floating-point numbers")
    if array.dtype.itemsize > 8:
        raise StateError(f"{what} has values of type {array.dtype}: must be float64, float32 or smaller")
    _check_shape(what, array, shape)
    wanted = np.dtype(dtype or (np.float64 if array.dtype.itemsize == 8 else np.float32))
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, wanted)
    if finite and not np.isfinite(array).all():
        raise StateError(
            f"{what} has values that are not finite in {wanted}, {int((~np.isfinite(array)).sum())} of {array.size}: "
            "every step from it on would be spoiled. Leave this state out, or take an earlier one"
        )
    return array


def integers(what: str, value: Any, shape: tuple[int, ...]) -> Array:
    """An int64 array of integers, none below 0.

    Raises:
        StateError: it is something else.
    """
    array = _array(what, value)
    if array.dtype.kind not in "iu" and array.size:
        raise StateError(f"{what} has values of type {array.dtype}: must be integers")
    _check_shape(what, array, shape)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= _MOST:
        raise StateError(f"{what} has values from {array.min()} to {array.max()}: must be at least 0")
    return array.astype(np.int64)


def flags(what: str, value: Any, shape: tuple[int, ...]) -> Array:
    """An array of True and False.

    Raises:
        StateError: it is something else.
    """
    array = _array(what, value)
    if array.dtype.kind != "b" and array.size:
        raise StateError(f"{what} has values of type {array.dtype}: must be True or False")
    _check_shape(what, array, shape)
    return array.astype(np.bool_)


def _array(what: str, value: Any) -> Array:
    try:
        if hasattr(value, "detach"):
            # torch's, which may lie on a device, want a gradient, or be of a type that NumPy does not know
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
            value = value.numpy()
        array = np.asarray(value)
    except Exception as error:
        # what can be raised here is up to whatever the state holds in the place of an array
        raise StateError(f"{what} is of type {type(value).__name__}, which is no array: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_shape(what: str, array: Array, shape: tuple[int, ...] | None) -> None:
    if shape is not None and array.shape != shape:
        raise StateError(f"{what} has shape {array.shape}: must be {shape}")
    if shape is None and array.ndim != 1:
        raise StateError(f"{what} has values of shape {array.shape}: must be flat")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
