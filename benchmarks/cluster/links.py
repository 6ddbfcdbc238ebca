"""Turn rates of links into token buckets that make a virtual Ethernet as slow."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Shape", "format_rate", "parse_rate", "shape_of"]

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_SLOWEST, _FASTEST = 10**6, 10**11

# A bucket forgives that long a delay of the timer that releases packets before throughput suffers; on an idle link it
# also lets this much of a message through at once, so it must stay below what the benchmarks want to see.
_BURST_SECONDS = 0.5e-3
_SMALLEST_BURST = 8 * 1024  # bytes; two segmented packets and their headers
_LARGEST_BURST = 256 * 1024  # bytes; above, a link of 10 Gbit/s has no rate for messages of half a megabyte
_LARGEST_PACKET = 65536  # bytes; the kernel's limit for a packet that is cut into segments late

# A sender's own queue stays short (TCP small queues); the switch's fills where several hosts send to one. With less
# than some 10 ms of it, three senders lose packets and wait for timeouts of 200 ms.
_QUEUE_SECONDS = 20e-3
_SMALLEST_QUEUE = 512 * 1024  # bytes


@dataclass(frozen=True)
class Shape:
    """Holds what `tc` is told about one direction of a link.

    Args:
        rate: bits per second, headers included.
        burst: bytes that pass an idle link at once.
        queue: bytes that wait at most; what comes then is dropped.
        packet: bytes of the largest packet that TCP hands to the interface, cut into segments later (GSO).
    """

    rate: int
    burst: int
    queue: int
    packet: int


def shape_of(rate: int | None) -> Shape | None:
    """Compute the token bucket of a link of `rate` bits per second; None for an unlimited one.

    One TCP stream through it carries 95 % of the rate, which is what Ethernet's and TCP's headers leave of a real one.
    Packets are kept at half of the bucket: larger ones are cut in software or dropped.

    Example:
        >>> shape_of(10**9)
        Shape(rate=1000000000, burst=62500, queue=2500000, packet=31250)
    """
    if rate is None:
        return None
    burst = min(max(int(rate / 8 * _BURST_SECONDS), _SMALLEST_BURST), _LARGEST_BURST)
    queue = max(int(rate / 8 * _QUEUE_SECONDS), _SMALLEST_QUEUE)
    return Shape(rate, burst, queue, min(burst // 2, _LARGEST_PACKET))


def parse_rate(text: str | None) -> int | None:
    """Read the bits per second of a rate as `tc` writes it; None for "unlimited" and None.

    Raises:
        ValueError: it is no rate, or not between 1 Mbit/s and 100 Gbit/s.

    Example:
        >>> parse_rate("2.5gbit"), parse_rate("unlimited")
        (2500000000, None)
    """
    if text is None or text == "unlimited":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not _SLOWEST <= rate <= _FASTEST:
        raise ValueError(f"rate {text!r}: give 1mbit to 100gbit, as in 100mbit or 2.5gbit, or unlimited")
    return rate


def format_rate(rate: int | None) -> str:
    """Write the text that `parse_rate` reads.

    Example:
        >>> format_rate(2_500_000_000), format_rate(100_000_000), format_rate(None)
        ('2.5gbit', '100mbit', 'unlimited')
    """
    if rate is None:
        return "unlimited"
    unit = "g" if rate >= _UNITS["g"] else "m"
    return f"{rate / _UNITS[unit]:.9g}{unit}bit"
