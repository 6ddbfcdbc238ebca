"""Three levels on a device: scales and bytes of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, TernGrad
from hvd_compress.kernels import table
from tests import device
from tests.device import (
    Tables,
    assert_same_bits,
    assert_same_values,
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
# groups of one run and of several, of one program and of several; with ends of each
CASES = [
    ([100, 5, 1], 13),
    ([3, 1], 1),
    ([320, 319, 321, 1000], 320),
    ([4096, 5000], 4096),
    ([70, 900], 65536),
    ([5121, 11000], 11000),
    ([2 * 6001 + 7], 6001),
]
rng = np.random.default_rng(13)


def values(numel, kind="float32"):
    return on_device(rng.standard_normal(numel).astype(np.float32), kind)


def bytes_of(size):
    return size // 320 * 64 + -(-(size % 320) // 5)


def assert_encoded(compressor, xs, group, kind="float32"):
    """Encode on the device and on the host; a scale may be one ulp off, and then its group may be anything."""
    numels = [len(x) for x in xs]
    tables = Tables(compressor, numels, group, kind)
    keys = [Key(seed=5, name=str(i)) for i in range(len(xs))]
    payloads = tables.encode(xs, keys=keys)
    same = total = 0
    for x, key, made in zip(xs, keys, payloads, strict=True):
        expected = resealed(host_encode(compressor, wide(x), None, group, key))
        assert made.size == expected.size
        np.testing.assert_array_equal(made[:36], expected[:36])
        groups = -(-len(x) // group)
        at = HEADER + (4 * groups + 7) // 8 * 8
        ours, theirs = (p[HEADER : HEADER + 4 * groups].view(np.float32) for p in (expected, made))
        np.testing.assert_array_max_ulp(theirs, ours, 1)
        for g in range(groups):
            end = at + bytes_of(min(group, len(x) - g * group))
            if ours[g] == theirs[g]:
                np.testing.assert_array_equal(made[at:end], expected[at:end])
                same += 1
            total += 1
            at = end
        assert not made[at:].any()
    assert same > 0.9 * total
    assert (tables.check() == table.SUMMED).all()
    return payloads


@pytest.mark.parametrize("clip", [None, 2.3])
@pytest.mark.parametrize(("numels", "group"), CASES)
def test_encodes_as_the_host_does(numels, group, clip):
    assert_encoded(TernGrad(group=group, clip=clip), [values(n) for n in numels], group)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_encodes_halves_as_their_values(kind, unaligned):
    assert_encoded(TernGrad(), [values(n + 1, kind)[unaligned * 1 :][:n] for n in (1500, 3)], 512, kind)


@pytest.mark.parametrize("group", [16, 11000])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    "content", [[0.0, -0.0], [1e-45, -1e-45, 3e-45, 0.0], [1e-38, 2e-37, -1e-39, 1e-45], [3.3e38, -1e37, 1.0, 0.0]]
)
def test_encodes_the_smallest_and_the_largest_values(content, clip, group):
    x = np.resize(content, group + 5).astype(np.float32)
    compressor = TernGrad(group=group, clip=clip)
    (payload,) = assert_encoded(compressor, [on_device(x)], group)
    device.assert_decoded(compressor, [[payload]], group, assert_same_bits, "float32", 0.3, False, False)


@pytest.mark.parametrize("group", [512, 9000])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_tells_of_values_that_are_not_finite(bad, group):
    tables = Tables(TernGrad(), [9000, 9000], group)
    xs = [values(9000), values(9000)]
    xs[0][7000] = bad
    assert [p.size > HEADER for p in tables.encode(xs)] == [False, True]
    assert tables.check().tolist() == [table.SUMMED | table.NONFINITE, table.SUMMED]


def sent(numel, group, rank=0):
    return host_encode(TernGrad(group=group), wide(values(numel)), None, group, Key(rank=rank))


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize(("numels", "group"), CASES)
def test_sums_have_the_bits_of_the_host(numels, group, senders):
    payloads = [[sent(n, group, r) for r in range(senders)] for n in numels]
    device.assert_decoded(TernGrad(), payloads, group, assert_same_bits, "float32", 1 / 3, False, False)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("add", [False, True])
def test_decodes_into_any_type(kind, add):
    payloads = [[sent(n, 512, r) for r in range(2)] for n in (1500, 3)]
    device.assert_decoded(TernGrad(), payloads, 512, assert_same_bits, kind, 0.5, add, add)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    bad = host_encode(TernGrad(), np.full(600, np.nan, np.float32), None, 512)
    absent = bad.copy()
    absent[6] = table.ABSENT
    good = sent(600, 512)
    mixed = [resealed(absent), good, resealed(absent)]
    device.assert_decoded(TernGrad(), [mixed], 512, assert_same_bits, "float32", 1.0, False, False)
    tables = Tables(TernGrad(), [600], 512, senders=2)
    tables.put([resealed(good), resealed(bad)])
    assert (tables.check() >= 0).all()
    out, whole = framed(600)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


@pytest.mark.parametrize("scale", [np.inf, np.nan, -1.0, 1e-45])
def test_any_scale_is_decoded_within_its_place(scale):
    payload = sent(700, 300)
    payload[HEADER : HEADER + 8].view(np.float32)[:] = scale
    device.assert_decoded(TernGrad(), [[resealed(payload)]], 300, assert_same_values, "float32", 2.0, False, False)


def found(payload, numel, group):
    tables = Tables(TernGrad(), [numel], group)
    tables.rows[:, table.ROOM] = payload.size
    tables.put([resealed(payload)])
    return tables.check().tolist()


@pytest.mark.parametrize(("numel", "group"), [(100, 13), (9000, 9000), (700, 300)])
def test_refuses_bytes_that_are_no_five_digits_and_other_sizes(numel, group):
    payload = sent(numel, group)
    assert found(payload, numel, group) == [table.SUMMED]
    first = HEADER + (4 * -(-numel // group) + 7) // 8 * 8
    whole, rest = divmod(numel, group)
    last = first + whole * bytes_of(group) + bytes_of(rest) - 1
    for at in (first, (first + last) // 2, last):
        for byte in (243, 255):
            wrong = payload.copy()
            wrong[at] = byte
            assert found(wrong, numel, group) == [-1]
    for other in (np.concatenate([payload, np.zeros(8, np.uint8)]), payload[:-8].copy(), payload[:HEADER].copy()):
        other[16:24].view(np.uint64)[0] = other.size
        assert found(other, numel, group) == [-1]
