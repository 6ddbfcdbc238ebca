"""Messages between neighbours are read back as written, and nothing damaged is believed."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import NoCompression
from hvd_compress.errors import WireError
from hvd_compress.gossip.message import cut_message, open_message, payloads_at, seal_message

TENSORS = 11


def message(sent=(0, 3, 10), number=7, idle=2):
    payloads = {i: NoCompression().encode(np.full(i + 1, i, np.float32)) for i in sent}
    flags = np.zeros(TENSORS, np.bool_)
    flags[list(sent)] = True
    buffer = np.zeros(payloads_at(TENSORS) + sum(p.size for p in payloads.values()), np.uint8)
    at = payloads_at(TENSORS)
    for payload in payloads.values():
        buffer[at : at + payload.size] = payload
        at += payload.size
    seal_message(buffer, at, flags, number, idle)
    return buffer


def test_a_message_is_read_back():
    opened = open_message(message(), TENSORS)
    assert (opened.number, opened.idle, sorted(opened.payloads)) == (7, 2, [0, 3, 10])
    assert (NoCompression().decode(opened.payloads[3]) == 3).all()


def test_an_empty_message_is_a_header_and_bits():
    empty = message(sent=())
    assert empty.size == 48
    assert open_message(empty, TENSORS).payloads == {}


def test_layout_is_frozen():
    assert bytes(message(sent=(), number=258, idle=3)).hex() == (
        "6876646e01000000" + "3000000000000000" + "0201000000000000" + "0b000000" + "03000000" + "00000000"
        + bytes(message(sent=(), number=258, idle=3))[36:40].hex() + "00" * 8
    )  # fmt: skip


def test_every_changed_bit_of_header_and_bits_is_noticed():
    good = message()
    for bit in range(8 * payloads_at(TENSORS)):
        bad = good.copy()
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            open_message(bad, TENSORS)


def test_truncated_messages_are_refused():
    good = message()
    for size in range(good.size):
        with pytest.raises(WireError):
            open_message(good[:size], TENSORS)
        with pytest.raises(WireError):
            cut_message(good[:size], 0)


def test_another_number_of_tensors_is_refused():
    with pytest.raises(WireError, match="about 11 tensors"):
        open_message(message(), TENSORS - 1)


def test_messages_follow_one_another():
    one, other = message(number=1), message(sent=(), number=2)
    both = np.concatenate([one, other])
    assert (cut_message(both, 0) == one).all()
    assert (cut_message(both, one.size) == other).all()
