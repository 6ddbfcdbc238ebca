from __future__ import annotations

import pytest
from cluster.links import format_rate, parse_rate, shape_of

RATES = ["1mbit", "20mbit", "100mbit", "1gbit", "2.5gbit", "10gbit", "100gbit"]
LARGEST_SEGMENT = 1514  # bytes of an Ethernet frame with the usual 1500 inside


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1mbit", 1e6), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("1500kbit", 1.5e6), ("unlimited", None), (None, None)],
)
def test_rates_are_read_as_tc_writes_them(text: str | None, rate: float | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "1", "1gb", "gbit", "-1gbit", "1 gbit", "1Gbit", "0.5mbit", "101gbit", "nan", "1e3mbit"]
)
def test_what_is_no_rate_is_refused_with_the_allowed_range(text: str) -> None:
    with pytest.raises(ValueError, match=f"rate '{text}': give 1mbit to 100gbit.*or unlimited"):
        parse_rate(text)


@pytest.mark.parametrize("text", [*RATES, "unlimited"])
def test_a_rate_is_written_as_it_is_read(text: str) -> None:
    assert format_rate(parse_rate(text)) == text


@pytest.mark.parametrize("text", RATES)
def test_a_bucket_holds_two_packets_and_little_of_a_message(text: str) -> None:
    rate = parse_rate(text)
    shape = shape_of(rate)
    assert rate is not None
    assert shape is not None
    assert shape.rate == rate
    # tbf cuts or drops packets that do not fit into the bucket
    assert 2 * LARGEST_SEGMENT < shape.packet <= shape.burst / 2
    assert shape.packet <= 65536
    # what passes an idle link at once: half a millisecond of the rate, or a few packets where that is less
    assert shape.burst <= max(0.0005 * rate / 8, 8192)
    # what several senders to one host can have in flight while none of them loses a packet
    assert shape.queue >= 0.02 * rate / 8


def test_an_unlimited_link_has_no_bucket() -> None:
    assert shape_of(None) is None
