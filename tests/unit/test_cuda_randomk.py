"""Random entries on a device: the bytes and the residuals of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, RandomK
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
# tiles of 1024, parts of them, and numbers of bits that are even, odd, and next to a power of two
SIZES = [1, 2, 3, 1023, 1024, 1025, 5000]
RATIOS = [0.1, 0.001, 1.0]
rng = np.random.default_rng(16)


def values(numel, kind="float32", factor=1.0):
    return on_device(factor * rng.standard_normal(numel).astype(np.float32), kind)


def keys_of(numels):
    return [Key(seed=5, name=str(i), rank=3, hop=1) for i in range(len(numels))]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_steps_are_those_of_the_host(ratio, kind):
    compressor = RandomK(ratio)
    tables = Tables(compressor, SIZES, 1, kind)
    there, here = [on_device(np.zeros(n, np.float32)) for n in SIZES], [np.zeros(n, np.float32) for n in SIZES]
    for _ in range(2):
        gradients = [values(n + 1, kind)[1:] for n in SIZES]
        for i, made in enumerate(tables.encode(there, gradients, keys_of(SIZES))):
            expected = host_encode(compressor, here[i], wide(gradients[i]), 1, keys_of(SIZES)[i])
            np.testing.assert_array_equal(made, resealed(expected))
            np.testing.assert_array_equal(wide(there[i]), here[i])
        assert (tables.check() == table.SUMMED).all()
        tables.payloads.zero_()


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_values_without_feedback_are_only_read(kind):
    compressor = RandomK(0.3, error_feedback=False)
    xs = [values(n, kind) for n in SIZES]
    before = [wide(x) for x in xs]
    payloads = Tables(compressor, SIZES, 1, kind).encode(xs, keys=keys_of(SIZES))
    for x, old, key, made in zip(xs, before, keys_of(SIZES), payloads, strict=True):
        np.testing.assert_array_equal(wide(x), old)
        np.testing.assert_array_equal(made, resealed(host_encode(compressor, old, None, 1, key)))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_is_taken_back(bad):
    assert_taken_back(RandomK(0.3), 1, [1500, 50], rng, lambda g: np.put(g, range(0, g.size, 7), bad))


def sent(numel, ratio, rank=0):
    # another step draws other entries
    return host_encode(RandomK(ratio), wide(values(numel, factor=rank + 1)), None, 1, Key(step=rank))


def assert_decoded(compressor, payloads, kind="float32", scale=1.0, add=False, unaligned=False):
    device.assert_decoded(compressor, payloads, 1, assert_same_bits, kind, scale, add, unaligned)


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_have_the_bits_of_the_host(ratio, senders):
    assert_decoded(RandomK(ratio), [[sent(n, ratio, r) for r in range(senders)] for n in SIZES], scale=1 / 3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("add", [False, True])
def test_decodes_into_any_type(kind, add):
    assert_decoded(RandomK(0.1), [[sent(n, 0.1, r) for r in range(2)] for n in (1500, 3)], kind, 0.5, add, add)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    bad = host_encode(RandomK(0.1), np.full(600, np.nan, np.float32), None, 1)
    absent = bad.copy()
    absent[6] = table.ABSENT
    good = sent(600, 0.1)
    assert_decoded(RandomK(0.1), [[resealed(absent), good, resealed(absent)]])
    tables = Tables(RandomK(0.1), [600], 1, senders=2)
    tables.put([resealed(good), resealed(bad)])
    assert (tables.check() >= 0).all()
    out, whole = framed(600)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


def is_taken(payload, numel):
    """Tell whether the host decodes a payload, and assert that the device agrees, and writes nowhere else."""
    payload = resealed(payload)
    try:
        host_decode(RandomK(), [payload], numel)
        is_sound = True
    except Exception:
        is_sound = False
    tables = Tables(RandomK(1.0), [numel], 1)
    tables.rows[:, table.ROOM] = payload.size
    tables.put([payload])
    assert tables.check().tolist() == [table.SUMMED if is_sound else -1]
    if is_sound:
        assert_decoded(RandomK(1.0), [[payload]])
    return is_sound


def test_refuses_what_the_host_refuses():
    numel = 1500
    payload = sent(numel, 0.1)
    assert is_taken(payload, numel)
    wrong = []
    for entries in (0, 1, 149, 151, numel + 1, 2**32 - 1):
        wrong.append(payload.copy())
        wrong[-1][32:36].view(np.uint32)[0] = entries
    wrong.append(payload.copy())
    wrong[-1][28] ^= 1
    for size in (payload.size + 8, payload.size - 8, HEADER):
        wrong.append(np.resize(payload, size))
        wrong[-1][payload.size :] = 0
        wrong[-1][16:24].view(np.uint64)[0] = size
    assert not any(is_taken(other, numel) for other in wrong)


def test_any_words_draw_what_they_draw_on_the_host():
    for low, high in ((0, 0), (2**32 - 1, 2**32 - 1), (1, 2**31)):
        payload = sent(1500, 0.1)
        payload[HEADER : HEADER + 8].view(np.uint32)[:] = low, high
        assert is_taken(payload, 1500)


def test_other_groups_go_through_host_memory():
    assert RandomK().device_kernels(64) is None
