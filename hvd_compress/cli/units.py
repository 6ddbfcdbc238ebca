"""Quantities with units, from text and to text."""

from __future__ import annotations

import math
import re

__all__ = ["parse_bandwidth", "parse_seconds", "show_bandwidth", "show_bytes", "show_seconds"]

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Bits per second of "1gbit", "100mbit" or "2.5 Gbit/s".

    Raises:
        ValueError: another form.

    Example:
        >>> from hvd_compress.cli.units import parse_bandwidth
        >>> parse_bandwidth("100mbit"), parse_bandwidth("2.5 Gbit/s")
        (100000000.0, 2500000000.0)
    """
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)bit(?:/s|ps)?", text.strip().lower())
    value = _number(found.group(1)) * _PREFIXES[found.group(2)] if found else 0.0
    if not value > 0:
        raise ValueError(f"bandwidth {text!r}: give bits per second with a unit, such as 100mbit or 10gbit")
    return value


def parse_seconds(text: str) -> float:
    """Seconds of "50us", "1.5ms" or "2s".

    Raises:
        ValueError: another form.

    Example:
        >>> from hvd_compress.cli.units import parse_seconds
        >>> parse_seconds("1.5ms")
        0.0015
    """
    found = re.fullmatch(r"([0-9.]+)\s*(s|ms|us|µs|ns)", text.strip().lower())
    value = _number(found.group(1)) if found else math.nan
    if found is None or math.isnan(value):
        raise ValueError(f"time {text!r}: give a number with a unit, such as 50us, 1.5ms or 2s")
    return value * _SECONDS[found.group(2)]


def show_seconds(seconds: float) -> str:
    """As milliseconds, three digits."""
    return f"{_digits(1e3 * seconds)} ms"


def show_bytes(nbytes: float) -> str:
    """With the largest unit of 1000 that leaves a digit before the point."""
    return _with_prefix(nbytes, "B")


def show_bandwidth(bits: float) -> str:
    """As bits per second; "always" for infinity and "never" for 0, as break-even bandwidths are."""
    if bits == 0:
        return "never"
    return "always" if math.isinf(bits) else _with_prefix(bits, "bit/s")


def _number(text: str) -> float:
    return float(text) if text.count(".") <= 1 and text != "." else math.nan


def _with_prefix(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{_digits(value)} {prefix}{unit}"
        value /= 1000
    return f"{_digits(value)} T{unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
