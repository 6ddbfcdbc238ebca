"""What optimizers that exchange momentum are told, and what their ranks keep, in whichever framework."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from hvd_compress import saved
from hvd_compress.engine.choice import exchanged, resolved
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.policy import Auto

__all__ = [
    "COMPRESSED",
    "LATE",
    "RENEWAL",
    "TAKEN_BACK",
    "WARM_UP",
    "check_betas",
    "check_option",
    "is_renewed",
    "most_counted",
    "refuse_auto",
    "take_own",
]

WARM_UP, RENEWAL, COMPRESSED = "warm-up", "renewal", "compressed"
"""Which way a step of CompressedAdam goes."""

LATE = "late gradients"
"""What states call that of elements without a variance which ranks have not averaged yet."""

TAKEN_BACK = (
    "{kind}: a gradient is not finite on some rank. No rank has made this step; parameters, momentum and residuals are "
    "as before"
)


def check_option(kind: str, name: str, value: Any, least: float, below: float | None = None) -> None:
    """Raise ValueError unless a number is at least `least` and less than `below`; a tensor of one number is taken."""
    number = float(value)
    if not least <= number < (float("inf") if below is None else below):
        bound = "a finite number" if below is None else f"less than {below:g}"
        raise ValueError(f"{kind}({name}={value!r}): must be {bound} and at least {least:g}")


def check_betas(kind: str, **betas: Any) -> None:
    """Raise ValueError unless the decays of momentum and variance, by the names that users know, are in [0, 1)."""
    for name, beta in betas.items():
        check_option(kind, name, beta, 0.0, 1.0)


def is_renewed(kind: str, variance: Any) -> bool:
    """Whether `variance=` asks for a variance that some later steps renew.

    Raises:
        ValueError: it is neither "frozen" nor "renewed".
    """
    if variance not in ("frozen", "renewed"):
        raise ValueError(f'{kind}(variance={variance!r}): must be "frozen" or "renewed"')
    return bool(variance == "renewed")


def refuse_auto(kind: str, compression: Any) -> None:
    """Raise UnsupportedError for `Auto`."""
    if isinstance(exchanged(resolved(compression, "auto")), Auto):
        raise UnsupportedError(f"{kind} with {compression!r}: Auto chooses for gradients. Give a compressor")


def most_counted(beta2: float) -> float:
    """How many times the root of the variance a gradient counts at most, which is the bound of Adam itself."""
    return float((1.0 - beta2) ** -0.5)


def take_own(
    residuals: dict[str, Any], label: str, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> npt.NDArray[Any] | None:
    """Take what a rank keeps for itself out of the residuals of a checked state: flat values, or None without any.

    Raises:
        StateError: it is of another shape.
    """
    entry = residuals.pop(label, None)
    if entry is None:
        return None
    if tuple(entry["shape"]) != shape:
        raise StateError(f"{label!r} of the state has shape {tuple(entry['shape'])}: must be {shape}")
    return saved.floats(label, entry["values"], dtype=dtype).copy()
