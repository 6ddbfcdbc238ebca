"""Read quantities with units from text, and write them."""

from __future__ import annotations

import argparse
import math
import re

__all__ = [
    "parse_bandwidth",
    "parse_seconds",
    "seconds_argument",
    "show_bandwidth",
    "show_bytes",
    "show_seconds",
    "whole_argument",
]

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]{1,3}))?"
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_LEAST_BITS, _MOST_BITS, _MOST_SECONDS = 1.0, 1e15, 3600.0

_BANDWIDTH = re.compile(
    # of a lone letter the case says which it is, and a rate must say so: 1 Gb may be a gigabyte, and so may 1 GBPS
    rf"{_NUMBER}\s*((?i:[kmgt]i?)?)(?:((?i:bits?))(?i:/s|ps|/sec)?|((?i:bytes?))(?i:/s|ps|/sec)?|([bB])(?:/s|ps|/sec))"
)
_TIME = re.compile(rf"{_NUMBER}\s*({'|'.join(_SECONDS)})")


def parse_bandwidth(text: str) -> float:
    """Read bits per second from "1gbit", "100Mbps", "2.5 Gbit/s" or, in bytes, "125MB/s" and "12.5MiB/s".

    Raises:
        ValueError: another form, or beyond what links have.

    Example:
        >>> from hvd_compress.cli.units import parse_bandwidth
        >>> parse_bandwidth("100mbit"), parse_bandwidth("2.5 Gbps"), parse_bandwidth("125MB/s")
        (100000000.0, 2500000000.0, 1000000000.0)
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"bandwidth {text!r}: give a number with a unit, such as 100mbit, 10Gbps or 2.5Gbit/s, or in bytes 125MB/s"
        )
    mantissa, exponent, prefix, _, in_bytes, letter = found.groups()
    bits = _number(mantissa, exponent) * _PREFIXES[prefix.lower()] * (8 if in_bytes or letter == "B" else 1)
    if not _LEAST_BITS <= bits <= _MOST_BITS:
        raise ValueError(f"bandwidth {text!r}: must be 1 bit/s to 1000 Tbit/s, such as 100mbit, 10Gbps or 125MB/s")
    return bits


def parse_seconds(text: str) -> float:
    """Read seconds from "50us", "0.1ms" or "2s".

    Raises:
        ValueError: another form, or more than an hour.

    Example:
        >>> from hvd_compress.cli.units import parse_seconds
        >>> parse_seconds("1.5ms")
        0.0015
    """
    found = _TIME.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"time {text!r}: give a number with a unit, such as 50us, 0.1ms or 2s")
    mantissa, exponent, unit = found.groups()
    seconds = _number(mantissa, exponent) * _SECONDS[unit]
    if seconds > _MOST_SECONDS:
        raise ValueError(f"time {text!r}: must be an hour at most, such as 50us, 0.1ms or 2s")
    return seconds


def whole_argument(text: str) -> int:
    """Read a whole number, for argparse."""
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, such as 4")
    return int(text)


def seconds_argument(text: str) -> float:
    """Read a number of seconds without a unit, for argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, such as 0.25") from None


def show_seconds(seconds: float) -> str:
    """Write seconds as milliseconds, with three digits."""
    return f"{_digits(1e3 * seconds)} ms"


def show_bytes(nbytes: float) -> str:
    """Write bytes with the largest unit of 1000 that leaves a digit before the point."""
    return _with_prefix(nbytes, "B")


def show_bandwidth(bits: float) -> str:
    """Write bits per second; "always" for infinity and "never" for 0, as break-even bandwidths are."""
    if bits == 0:
        return "never"
    return "always" if math.isinf(bits) else _with_prefix(bits, "bit/s")


def _number(mantissa: str, exponent: str | None) -> float:
    return float(f"{mantissa}e{exponent or 0}")


def _with_prefix(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{_digits(value)} {prefix}{unit}"
        value /= 1000
    return f"{_digits(value)} T{unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
