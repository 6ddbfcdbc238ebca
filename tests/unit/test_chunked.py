"""Chunked top-k with few-bit values against a loop typed from its description."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hvd_compress
from hvd_compress import ChunkedTopK, Key, TopK
from hvd_compress.errors import WireError
from tests.arrays import FINITE, make
from tests.forge import forge, resized


def of_chunk(v: np.ndarray, k: int, bits: int) -> np.ndarray:
    """The k largest magnitudes of a chunk, zeros left out, each as base + l * step with its sign; the rest 0."""
    y = np.zeros(v.size)
    kept = np.sort(np.argsort(-np.abs(v), kind="stable")[:k])
    kept = kept[v[kept] != 0]
    if not kept.size:
        return y
    m = np.abs(v[kept].astype(np.float32)).astype(np.float64)
    last = 2 ** (bits - 1) - 1
    width = (m.max() - m.min()) / (last + 1)
    levels = np.minimum(np.floor((m - m.min()) / width), last) if width > 0 else np.zeros(m.size)
    line = np.stack([np.ones(m.size), levels], 1)
    if not levels.any():
        line[:, 1] = 0
    # for the values that the test has, least squares in float64 is exact enough
    base, step = np.linalg.lstsq(line, m, rcond=None)[0]
    y[kept] = np.sign(v[kept]) * (base + step * levels)
    return y


def oracle(x: np.ndarray, c: ChunkedTopK) -> np.ndarray:
    flat = x.reshape(-1).astype(np.float64)
    parts = [flat[start : start + c.chunk] for start in range(0, flat.size, c.chunk)]
    return np.concatenate([of_chunk(p, max(1, math.ceil(p.size * c.ratio)), c.value_bits) for p in parts])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("chunk", [8, 100, 4096, 32768])
@pytest.mark.parametrize("ratio", [1 / 64, 0.3, 1.0])
def test_oracle(bits, chunk, ratio):
    rng = np.random.default_rng(bits)
    for n in (1, 9, 4096, 9000):
        x = rng.standard_normal(n).astype(np.float32)
        x[rng.random(n) < 0.2] = 0
        c = ChunkedTopK(ratio, chunk, bits)
        np.testing.assert_allclose(c.decode(c.encode(x)), oracle(x, c), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("content", FINITE)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_what_is_decoded_is_nearer_than_zero(content, bits):
    """Least squares is a projection: the residual is never longer than what was to be sent, whatever the values are."""
    for ratio in (1 / 64, 0.5):
        c = ChunkedTopK(ratio, 4096, bits)
        x = make(content, (9000,), "float32").astype(np.float64)
        y = c.decode(c.encode(x.astype(np.float32))).astype(np.float64)
        for start in range(0, x.size, 4096):
            part = slice(start, start + 4096)
            scale = np.abs(x[part]).max() or 1.0
            assert np.linalg.norm((x[part] - y[part]) / scale) <= np.linalg.norm(x[part] / scale) * (1 + 1e-5)


def test_one_huge_value_does_not_make_others_of_its_chunk_large():
    x = np.ones(64, np.float32)
    x[7] = 1e30
    c = ChunkedTopK(ratio=0.5, chunk=64, value_bits=2)
    y = c.decode(c.encode(x))
    assert y[7] == np.float32(1e30)
    np.testing.assert_array_equal(y[[0, 1, 2, 3]], 1)


@pytest.mark.parametrize("step", range(3))
def test_the_selection_is_exact_whatever_the_chunk_before_was_like(step):
    rng = np.random.default_rng(step)
    scales = 10.0 ** rng.integers(-20, 20, 40)
    x = (rng.standard_cauchy((40, 256)) * scales[:, None]).astype(np.float32).reshape(-1)
    c = ChunkedTopK(ratio=1 / 16, chunk=256, value_bits=8)
    sent = c.decode(c.encode(x, key=Key(step=step))).reshape(40, 256) != 0
    for row, of_row in zip(x.reshape(40, 256), sent, strict=True):
        assert set(np.flatnonzero(of_row)) <= set(np.argsort(-np.abs(row), kind="stable")[:16])
        assert of_row.sum() >= 15  # a level may be fitted to 0


def test_each_chunk_sends_its_share_and_zeros_are_not_sent():
    x = np.ones(4096 + 100, np.float32)
    sent = np.flatnonzero(ChunkedTopK().decode(ChunkedTopK().encode(x)))
    assert sent.tolist() == [*range(64), 4096, 4097]
    x[10:] = 0
    payload = ChunkedTopK().encode(x)
    assert (ChunkedTopK().decode(payload) == x).all()
    # header, counts, scales, 10 entries of 14 bits
    assert payload.size == 40 + 8 + 16 + 24


def test_error_feedback_over_steps_brings_all_across():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 256)).astype(np.float32)
    c = TopK(chunk=256, ratio=1 / 16, value_bits=2)
    residual, total = np.zeros_like(x), np.zeros(x.shape)
    for step in range(200):
        total += c.decode(c.encode(x, residual, Key(step=step)))
    np.testing.assert_allclose(total / 200, x, atol=0.2)
    assert np.abs(residual).max() < 40 * np.abs(x).max()


def test_topk_with_a_chunk_is_this():
    made = TopK(chunk=4096, ratio=1 / 64, value_bits=2)
    assert made == ChunkedTopK(1 / 64, 4096, 2)
    assert hvd_compress.from_config({"id": "topk", "chunk": 512, "ratio": 0.1}) == ChunkedTopK(0.1, 512, 2)
    assert TopK()(chunk=512) == ChunkedTopK(0.01, 512, 2)
    assert TopK(0.1, coding="golomb", chunk=512) == ChunkedTopK(0.1, 512, coding="golomb")
    with pytest.raises(TypeError, match="unexpected"):
        TopK(chunk=512, kay=3)


def test_bytes_of_sparseloco():
    """At 14 bits for each of 64 entries of 4096, and 10 bytes for each chunk, 2000 times fewer with 30 local steps."""
    x = make("normal", (1024, 4096), "float32")
    payload = TopK(chunk=4096, ratio=1 / 64, value_bits=2).encode(x)
    assert payload.size == 40 + 16 + 1024 * (2 + 8 + 64 * 14 // 8)
    assert 30 * x.nbytes / payload.size > 4000
    coded = TopK(chunk=4096, ratio=1 / 64, value_bits=2, coding="golomb").encode(x)
    assert 30 * x.nbytes / coded.size > 5600


# -- hostile payloads --------------------------------------------------------------------------------------------------

PLAIN = ChunkedTopK(ratio=0.1, chunk=100, value_bits=2)
X = np.sin(np.arange(300, dtype=np.float32))
PAYLOAD = PLAIN.encode(X)
CODED = ChunkedTopK(ratio=0.1, chunk=100, value_bits=2, coding="golomb").encode(X)
COUNTS, SCALES, STREAM = 40, 48, 72


@pytest.mark.parametrize(
    "forged",
    [
        forge(PAYLOAD, {COUNTS: ("<u2", 11)}),
        forge(PAYLOAD, {COUNTS: ("<u2", 9)}),
        forge(PAYLOAD, {COUNTS: ("<u2", 65535)}),
        forge(PAYLOAD, {SCALES: ("<u4", 0x7F800000)}),
        forge(PAYLOAD, {SCALES + 4: ("<u4", 0x7FC00000)}),
        forge(PAYLOAD, {STREAM: ("<u8", 0)}),
        forge(PAYLOAD, {STREAM: ("<u8", 2**64 - 1)}),
        forge(PAYLOAD, parameter=0),
        forge(PAYLOAD, parameter=9),
        forge(PAYLOAD, parameter=3),
        forge(PAYLOAD, group=2**31),
        forge(PAYLOAD, group=50),
        forge(PAYLOAD, entries=29),
        forge(PAYLOAD, entries=2**32 - 1),
        resized(PAYLOAD, PAYLOAD.size + 8),
        resized(PAYLOAD, PAYLOAD.size - 8),
        resized(PAYLOAD, 56),
        forge(CODED, {COUNTS: ("<u2", 11)}),
        forge(CODED, {STREAM: ("<u8", 0)}),
        forge(CODED, entries=2**32 - 1),
        forge(CODED, parameter=8),
        resized(CODED, CODED.size + 8),
        resized(CODED, CODED.size - 8),
        resized(CODED, 56),
    ],
)
def test_hostile_payloads_are_refused(forged):
    guarded = np.full(300 + 128, 7.5, np.float32)
    for add in (False, True):
        with pytest.raises(WireError):
            PLAIN.decode_into(forged, guarded[64:-64], add=add)
    assert (guarded[:64] == 7.5).all()
    assert (guarded[-64:] == 7.5).all()


def test_the_layout_is_as_documented():
    """The header's 40 bytes, 3 counts, 3 pairs of base and step, 30 entries of 7 + 2 bits."""
    assert PAYLOAD[5] == 22
    assert CODED[5] == 150
    assert PAYLOAD.size == STREAM + 8 * math.ceil(30 * 9 / 64)
    assert PAYLOAD[COUNTS : COUNTS + 6].view("<u2").tolist() == [10, 10, 10]
    (word,) = PAYLOAD[STREAM : STREAM + 8].view("<u8")
    first = int(np.flatnonzero(PLAIN.decode(PAYLOAD))[0])
    assert int(word) & 127 << 2 == first << 2
    assert bool(word >> 1 & 1) == bool(X[first] < 0)
