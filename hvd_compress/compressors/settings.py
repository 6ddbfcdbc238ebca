"""Check compressor settings; each error says what came and what is allowed.

Numbers are stored back as plain Python ones: those of NumPy have no JSON, and a repr that needs NumPy's names.
"""

from __future__ import annotations

import numbers

__all__ = ["NARROW", "check_choice", "check_feedback", "check_flag", "check_group", "check_int", "check_real"]

NARROW = "float8"
"""What `error_feedback` is where residuals are kept in 8 bits."""


def _refuse(owner: object, name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{type(owner).__name__}({name}={value!r}): {name} must be {allowed}")


def check_int(owner: object, name: str, value: object, least: int, most: int, *, none: bool = False) -> None:
    """Raise ValueError unless `value` is an integer in [least, most] (or None where that is allowed)."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        suffix = " or None" if none else ""
        raise _refuse(owner, name, value, f"an integer from {least} to {most}{suffix}")
    object.__setattr__(owner, name, int(value))


def check_real(owner: object, name: str, value: object, *, above: float, most: float) -> None:
    """Raise ValueError unless `value` is a number in (above, most]."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # compared before it is converted: an integer can be too large for a float
    if not is_real or not above < value <= most:  # type: ignore[operator]
        raise _refuse(owner, name, value, f"a finite number greater than {above:g} and at most {most:g}")
    object.__setattr__(owner, name, float(value))  # type: ignore[arg-type]


def check_flag(owner: object, name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise _refuse(owner, name, value, "True or False")


def check_feedback(owner: object, value: object) -> None:
    """Raise ValueError unless `value`, the setting `error_feedback`, is True, False or "float8"."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value == NARROW):
        raise _refuse(owner, "error_feedback", value, f"True, False or {NARROW!r}")
    # NumPy's strings, too, become plain ones
    object.__setattr__(owner, "error_feedback", value if isinstance(value, bool) else NARROW)


def check_choice(owner: object, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise _refuse(owner, name, value, "one of " + ", ".join(map(repr, choices)))


def check_group(owner: object, value: object) -> None:
    """Raise ValueError unless `value` is "row", "tensor" or a number of elements."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral) and 1 <= int(value) < 2**31:
        object.__setattr__(owner, "group", int(value))
    elif isinstance(value, str) and value in ("row", "tensor"):
        # NumPy's strings, too, become plain ones
        object.__setattr__(owner, "group", str(value))
    else:
        raise _refuse(owner, "group", value, '"row", "tensor" or a number of elements from 1 to 2147483647')
