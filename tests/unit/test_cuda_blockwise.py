"""Blocks of integers on a device: bytes and residuals of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Blockwise, Key
from hvd_compress.kernels import table
from tests import device
from tests.device import (
    Tables,
    assert_same_bits,
    assert_same_values,
    assert_taken_back,
    framed,
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
    Blockwise(),
    Blockwise(bits=4, block=128, hadamard=True),
    Blockwise(bits=4, block=24),
    Blockwise(block=8, hadamard=True),
    Blockwise(block=1024, hadamard=True),
]
every = pytest.mark.parametrize("compressor", MADE, ids=repr)
rng = np.random.default_rng(14)


def values(numel, kind="float32", factor=1.0):
    return on_device(factor * rng.standard_normal(numel).astype(np.float32), kind)


def sizes_of(block):
    return [1, 7, block, 3 * block + 5, 1100]


def assert_steps(compressor, gradients_of, numels, kind="float32"):
    """Encode two steps with residuals on the device and on the host: bytes and residuals are the same."""
    block = compressor.block
    tables = Tables(compressor, numels, block, kind)
    there, here = [on_device(np.zeros(n, np.float32)) for n in numels], [np.zeros(n, np.float32) for n in numels]
    for _ in range(2):
        gradients = gradients_of()
        for i, made in enumerate(tables.encode(there, gradients)):
            expected = host_encode(compressor, here[i], wide(gradients[i]), block)
            np.testing.assert_array_equal(made, resealed(expected))
            np.testing.assert_array_equal(wide(there[i]), here[i])
        assert (tables.check() == table.SUMMED).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@every
def test_steps_are_those_of_the_host(compressor, kind):
    numels = sizes_of(compressor.block)
    assert_steps(compressor, lambda: [values(n + 1, kind)[1:] for n in numels], numels, kind)


def test_the_longest_blocks_are_those_of_the_host():
    compressor = Blockwise(bits=4, block=32768, hadamard=True)
    assert_steps(compressor, lambda: [values(40000)], [40000])


@every
def test_values_without_feedback_are_only_read(compressor):
    compressor = Blockwise(compressor.bits, compressor.block, compressor.hadamard, error_feedback=False)
    numels = sizes_of(compressor.block)
    xs = [values(n) for n in numels]
    before = [wide(x) for x in xs]
    for x, old, made in zip(xs, before, Tables(compressor, numels, compressor.block).encode(xs), strict=True):
        np.testing.assert_array_equal(made, resealed(host_encode(compressor, old, None, compressor.block)))
        np.testing.assert_array_equal(wide(x), old)


@pytest.mark.parametrize(
    "content",
    [
        [0.0, -0.0],
        [1e-45, -1e-45, 3e-45, 0.0],
        [2e-37, 1e-38, -1e-39, 1e-45],
        [3.4028235e38, -1e37, 1.0, 0.0],
        # beside the limits of rotation
        [2.0**-80, 1e-30],
        [2.0**-79.9, -(2.0**-80)],
        [2.0**100, -1.0],
        [2.0**99.9, 2.0**99.8],
    ],
)
@every
def test_the_smallest_and_the_largest_values_are_those_of_the_host(compressor, content):
    x = np.resize(content, 2 * compressor.block + 3).astype(np.float32)
    assert_steps(compressor, lambda: [on_device(x / 2)], [x.size])


@every
def test_a_step_that_is_not_finite_is_taken_back(compressor):
    assert_taken_back(compressor, compressor.block, [600, 50], rng, lambda g: np.put(g, [7, 300], [np.inf, np.nan]))


def sent(compressor, numel, rank=0):
    return host_encode(compressor, wide(values(numel, factor=rank + 1)), None, compressor.block, Key(rank=rank))


def assert_decoded(compressor, payloads, same=assert_same_bits, kind="float32", scale=1.0, add=False, unaligned=False):
    device.assert_decoded(compressor, payloads, compressor.block, same, kind, scale, add, unaligned)


@pytest.mark.parametrize("senders", [1, 2])
@every
def test_sums_have_the_bits_of_the_host(compressor, senders):
    payloads = [[sent(compressor, n, r) for r in range(senders)] for n in sizes_of(compressor.block)]
    assert_decoded(compressor, payloads, scale=1 / 3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("add", [False, True])
def test_decodes_into_any_type(kind, add):
    compressor = MADE[1]
    payloads = [[sent(compressor, n, r) for r in range(2)] for n in (1500, 3)]
    assert_decoded(compressor, payloads, kind=kind, scale=0.5, add=add, unaligned=add)


@every
def test_scales_and_codes_of_any_kind_are_decoded_as_the_host_does(compressor):
    # a negative one says that a block is rotated, where that can be
    numel = 2 * compressor.block + 3
    for scale in (-1.0, -0.0, np.inf, -np.inf, np.nan, -3.4028235e38, -1e-45):
        payload = sent(compressor, numel)
        payload[HEADER : HEADER + 12].view(np.float32)[:] = scale
        at = HEADER + 16
        payload[at:] = rng.integers(0, 256, payload.size - at)
        assert_decoded(compressor, [[resealed(payload)]], assert_same_values)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    compressor = MADE[1]
    bad = host_encode(compressor, np.full(600, np.nan, np.float32), None, compressor.block)
    absent = bad.copy()
    absent[6] = table.ABSENT
    good = sent(compressor, 600)
    assert_decoded(compressor, [[resealed(absent), good, resealed(absent)]])
    tables = Tables(compressor, [600], compressor.block, senders=2)
    tables.put([resealed(good), resealed(bad)])
    assert (tables.check() >= 0).all()
    out, whole = framed(600)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


def test_refuses_other_bits_and_sizes():
    payload = sent(MADE[2], 100)
    stated = payload.copy()
    stated[28] = 8
    longer, shorter = np.concatenate([payload, np.zeros(8, np.uint8)]), payload[:-8].copy()
    for other in (longer, shorter):
        other[16:24].view(np.uint64)[0] = other.size
    for other in (stated, longer, shorter):
        tables = Tables(MADE[2], [100], 24)
        tables.rows[:, table.ROOM] = other.size
        tables.put([resealed(other)])
        assert tables.check().tolist() == [-1]
