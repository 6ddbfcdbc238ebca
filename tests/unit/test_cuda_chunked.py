"""Chunked top-k on a device: entries and residuals of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import ChunkedTopK
from hvd_compress.kernels import table
from tests import device
from tests.device import (
    Tables,
    assert_same_bits,
    assert_taken_back,
    framed,
    host_decode,
    host_encode,
    is_unharmed,
    on_device,
    resealed,
    wide,
)

# NaN and infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADER = 40
MADE = [
    ChunkedTopK(),
    ChunkedTopK(0.1, 100, 1),
    ChunkedTopK(0.25, 8, 4),
    ChunkedTopK(1.0, 33, 3),
    ChunkedTopK(0.05, 1000, 8),
]
every = pytest.mark.parametrize("compressor", MADE, ids=repr)
rng = np.random.default_rng(15)


def values(numel, kind="float32", factor=1.0):
    return on_device(factor * rng.standard_normal(numel).astype(np.float32), kind)


def sizes_of(chunk):
    # of small chunks fewer: Triton's interpreter takes its time for each of them
    longest = 1100 if device.ON_GPU else min(1100, 20 * chunk + 3)
    return [1, 7, chunk, 2 * chunk + 5] if chunk > 1000 else [1, 7, chunk, 3 * chunk + 5, longest]


def sections_of(payload, numel, compressor):
    """Return the counts, the scales and the stream of a payload."""
    chunks, of_chunk = -(-numel // compressor.chunk), min(compressor.value_bits, 2)
    scales = HEADER + (2 * chunks + 7) // 8 * 8
    stream = scales + (4 * of_chunk * chunks + 7) // 8 * 8
    counts = payload[HEADER : HEADER + 2 * chunks].view(np.uint16)
    return counts, payload[scales : scales + 4 * of_chunk * chunks].view(np.float32), payload[stream:]


def assert_steps(compressor, gradients_of, numels, kind="float32", exact=False):
    """Encode two steps on the device and on the host: the same entries, and lines of chunks within an ulp."""
    tables = Tables(compressor, numels, compressor.chunk, kind)
    there, here = [on_device(np.zeros(n, np.float32)) for n in numels], [np.zeros(n, np.float32) for n in numels]
    for _ in range(2):
        gradients = gradients_of()
        for i, made in enumerate(tables.encode(there, gradients)):
            expected = resealed(host_encode(compressor, here[i], wide(gradients[i]), compressor.chunk))
            assert made.size == expected.size
            np.testing.assert_array_equal(made[:36], expected[:36])
            ours, theirs = (sections_of(p, numels[i], compressor) for p in (expected, made))
            np.testing.assert_array_equal(theirs[0], ours[0])
            np.testing.assert_array_equal(theirs[2], ours[2])
            np.testing.assert_allclose(theirs[1], ours[1], rtol=0 if exact else 2e-7, atol=0 if exact else 1e-9)
            np.testing.assert_allclose(wide(there[i]), here[i], atol=0 if exact else 1e-6)
            # what comes next depends on what is left
            here[i][:] = wide(there[i])
        assert (tables.check() == table.SUMMED).all()
        tables.payloads.zero_()


@every
def test_steps_are_those_of_the_host(compressor):
    numels = sizes_of(compressor.chunk)
    assert_steps(compressor, lambda: [values(n) for n in numels], numels)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_halves_are_encoded_as_their_values(kind, unaligned):
    numels = [700, 3]
    made = ChunkedTopK(0.1, 256)
    assert_steps(made, lambda: [values(n + 1, kind)[unaligned * 1 :][:n] for n in numels], numels, kind)


@pytest.mark.parametrize(
    "content",
    [
        [0.0, -0.0],
        # fewer than are to be sent, and as many as are to be sent among equal ones
        [0.0] * 50 + [1.0],
        [1.0, -1.0],
        [2.0, -1.0, 1.0, 0.0],
        [2.0**-140, -(2.0**-140), 0.0],
        [2.0**127, -(2.0**126), 1.0],
    ],
)
@every
def test_ties_zeros_and_the_largest_values_are_those_of_the_host(compressor, content):
    x = np.resize(content, 2 * compressor.chunk + 3).astype(np.float32)
    assert_steps(compressor, lambda: [on_device(x / 2)], [x.size], exact=compressor.value_bits < 3)


def test_values_without_feedback_are_only_read():
    compressor = ChunkedTopK(0.1, 100, error_feedback=False)
    x = values(350)
    before = wide(x)
    (made,) = Tables(compressor, [350], 100).encode([x])
    np.testing.assert_array_equal(wide(x), before)
    expected = host_encode(compressor, before, None, 100)
    np.testing.assert_array_equal(sections_of(made, 350, compressor)[2], sections_of(expected, 350, compressor)[2])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_is_taken_back(bad):
    assert_taken_back(ChunkedTopK(0.1, 100), 100, [600, 50], rng, lambda g: np.put(g, [7, 300], bad))


def sent(compressor, numel, rank=0):
    return host_encode(compressor, wide(values(numel, factor=rank + 1)), None, compressor.chunk)


def assert_decoded(compressor, payloads, kind="float32", scale=1.0, add=False, unaligned=False):
    device.assert_decoded(compressor, payloads, compressor.chunk, assert_same_bits, kind, scale, add, unaligned)


@pytest.mark.parametrize("senders", [1, 2])
@every
def test_sums_have_the_bits_of_the_host(compressor, senders):
    payloads = [[sent(compressor, n, r) for r in range(senders)] for n in sizes_of(compressor.chunk)]
    assert_decoded(compressor, payloads, scale=1 / 3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("add", [False, True])
def test_decodes_into_any_type(kind, add):
    payloads = [[sent(MADE[1], n)] for n in (350, 3)]
    assert_decoded(MADE[1], payloads, kind, 0.5, add, add)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    compressor = MADE[1]
    bad = host_encode(compressor, np.full(350, np.nan, np.float32), None, 100)
    absent = bad.copy()
    absent[6] = table.ABSENT
    good = sent(compressor, 350)
    assert_decoded(compressor, [[resealed(absent), good, resealed(absent)]])
    tables = Tables(compressor, [350], 100, senders=2)
    tables.put([resealed(good), resealed(bad)])
    assert (tables.check() >= 0).all()
    out, whole = framed(350)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


def is_taken(compressor, payload, numel):
    """Tell whether the host decodes a payload, and assert that the device agrees, and writes nowhere else."""
    payload = resealed(payload)
    try:
        host_decode(compressor, [payload], numel)
        is_sound = True
    except Exception:
        is_sound = False
    tables = Tables(compressor, [numel], compressor.chunk)
    tables.rows[:, table.ROOM] = payload.size
    tables.put([payload])
    assert tables.check().tolist() == [table.SUMMED if is_sound else -1]
    if is_sound:
        assert_decoded(compressor, [[payload]])
    return is_sound


@pytest.mark.parametrize("compressor", MADE[1:3], ids=repr)
def test_refuses_what_the_host_refuses(compressor):
    numel = 3 * compressor.chunk + 5
    payload = sent(compressor, numel)
    assert is_taken(compressor, payload, numel)
    counts, scales, stream = sections_of(payload, numel, compressor)
    places = [memory.ctypes.data - payload.ctypes.data for memory in (counts, scales, stream)]
    wrong = []
    for count in (0, 1, 5, 65535):
        wrong.append(payload.copy())
        wrong[-1][places[0] : places[0] + 2].view(np.uint16)[0] = count
    for scale in (np.inf, -np.inf, np.nan):
        wrong.append(payload.copy())
        wrong[-1][places[1] + 4 : places[1] + 8].view(np.float32)[0] = scale
    for entries in (0, 1, int(payload[32:36].view(np.uint32)[0]) + 1, 2**32 - 1):
        wrong.append(payload.copy())
        wrong[-1][32:36].view(np.uint32)[0] = entries
    # the last bit, which is padding
    wrong.append(payload.copy())
    wrong[-1][-1] |= 128
    wrong.append(payload.copy())
    wrong[-1][28] = compressor.value_bits + 1
    for size in (payload.size + 8, payload.size - 8, HEADER):
        wrong.append(np.resize(payload, size))
        wrong[-1][payload.size :] = 0
        wrong[-1][16:24].view(np.uint64)[0] = size
    taken = [is_taken(compressor, other, numel) for other in wrong]
    assert not any(taken)
    # one chunk takes what another one has: places may still be in order then
    moved = payload.copy()
    moved[places[0] : places[0] + 4].view(np.uint16)[:] += np.array([1, -1], np.int16).view(np.uint16)
    is_taken(compressor, moved, numel)
    # and whatever the stream holds
    for _ in range(20):
        other = payload.copy()
        other[places[2] + int(rng.integers(stream.size))] ^= 1 << int(rng.integers(8))
        is_taken(compressor, other, numel)


def test_any_line_that_is_finite_is_decoded_as_the_host_does():
    compressor = ChunkedTopK(0.1, 100, 4)
    payload = sent(compressor, 350)
    _, scales, _ = sections_of(payload, 350, compressor)
    at = scales.ctypes.data - payload.ctypes.data
    for base, step in ((3.4e38, 3.4e38), (-3.4e38, 1e38), (-1.0, 0.0), (1e-45, -1e-45)):
        other = payload.copy()
        other[at : at + 8].view(np.float32)[:] = base, step
        assert is_taken(compressor, other, 350)


def test_others_go_through_host_memory():
    assert ChunkedTopK(coding="golomb").device_kernels(4096) is None
