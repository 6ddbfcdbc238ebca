from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import QSGD, Key
from tests import device
from tests.device import (
    Tables,
    assert_same_bits,
    framed,
    host_decode,
    host_encode,
    is_unharmed,
    numel_of,
    on_device,
    resealed,
    wide,
)

# NaN and infinities in what is not sent
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADER = 40
rng = np.random.default_rng(5)


def norms_of(payload, numel, bucket):
    return payload[HEADER : HEADER + 4 * -(-numel // bucket)].view(np.float32)


def codes_of(payload, numel, bucket, bits):
    """Return one code per element, eight at a time from `bits` bytes."""
    at = HEADER + (4 * -(-numel // bucket) + 7) // 8 * 8
    packed = payload[at : at + (numel + 7) // 8 * bits]
    stream = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    return (stream * (1 << np.arange(bits))).sum(1)


def values(numel, kind="float32"):
    return on_device(rng.standard_normal(numel).astype(np.float32), kind)


def assert_encoded(compressor, numels, bucket, kind="float32", unaligned=False, xs=None):
    """Encode on the device and on the host, and compare."""
    tables = Tables(compressor, numels, bucket, kind)
    if xs is None:
        xs = [values(n + 1, kind)[1:] if unaligned else values(n, kind) for n in numels]
    keys = [Key(seed=3, name=str(i)) for i in range(len(numels))]
    payloads = tables.encode(xs, keys=keys)
    for x, key, payload in zip(xs, keys, payloads, strict=True):
        numel = len(x)
        expected = host_encode(compressor, wide(x), None, bucket, key)
        assert len(payload) == len(expected)
        # the squares are summed in another order
        theirs, ours = norms_of(payload, numel, bucket), norms_of(expected, numel, bucket)
        np.testing.assert_array_max_ulp(theirs, ours, 1)
        is_same = np.repeat(theirs == ours, bucket)[:numel]
        assert is_same.mean() > 0.9
        codes = codes_of(payload, numel, bucket, compressor.bits)
        assert not (codes != codes_of(expected, numel, bucket, compressor.bits))[:numel][is_same].any()
        assert not codes[numel:].any()
        # and the host reads it
        host_decode(compressor, [payload], numel)
    assert (tables.check() == 8).all()
    return payloads


def assert_decoded(compressor, numels, group, payloads, kind="float32", scale=1.0, add=False, unaligned=False):
    assert [numel_of(of_tensor[0]) for of_tensor in payloads] == list(numels)
    device.assert_decoded(compressor, payloads, group, assert_same_bits, kind, scale, add, unaligned)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_encodes_as_the_host_does(bits, norm):
    assert_encoded(QSGD(bits=bits, bucket_numel=512, norm=norm), [1, 511, 512, 1024, 1033, 3000], 512)


@pytest.mark.parametrize("bucket", [8, 24, 1000, 4096, 32768])
def test_encodes_buckets_of_any_size(bucket):
    sizes = [1, 8, 9, 2 * bucket, 2 * bucket + 5] if bucket < 5000 else [40000]
    for bits in (4, 5):
        assert_encoded(QSGD(bits=bits, bucket_numel=bucket), sizes, bucket)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_encodes_halves_as_their_values(kind, unaligned):
    assert_encoded(QSGD(), [1500, 3], 512, kind, unaligned)


def test_encodes_arrays_on_no_boundary():
    assert_encoded(QSGD(), [1500, 3], 512, unaligned=True)


def test_draws_of_a_key_are_those_of_its_row_and_its_step():
    tables = Tables(QSGD(), [600, 600], 512)
    x = values(600)
    first = tables.encode([x, x], keys=[Key(step=1), Key(step=2)])
    second = tables.encode([x, x], keys=[Key(step=2), Key(step=1)])
    assert (first[0] == second[1]).all()
    assert (first[1] == second[0]).all()
    assert (first[0] != first[1]).any()


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(
    "content",
    [
        np.zeros(20),
        np.full(20, 0.5),
        np.full(20, -0.0),
        # the inverses of these norms are beyond float32
        np.array([1e-45, -1e-45, 3e-45, 0]),
        np.array([2e-37, 1e-38, -1e-39, 1e-45]),
        np.array([3.3e38, -1e37, 1.0, 0]),
    ],
)
def test_encodes_the_smallest_and_the_largest_values(content, norm):
    x = np.resize(content, 40).astype(np.float32)
    # the Euclidean norm of more than one of the largest is none
    x[4:] = np.where(np.abs(x[4:]) > 1e38, 0, x[4:])
    for bits in (2, 8):
        compressor = QSGD(bits=bits, bucket_numel=16, norm=norm)
        (payload,) = assert_encoded(compressor, [40], 16, xs=[on_device(x)])
        assert_decoded(compressor, [40], 16, [[payload]])


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_tells_of_values_that_are_not_finite(bad, norm):
    compressor = QSGD(norm=norm)
    tables = Tables(compressor, [1100, 1100], 512)
    xs = [values(1100), values(1100)]
    xs[0][700] = bad
    payloads = tables.encode(xs)
    header = host_encode(compressor, wide(xs[0]), None, 512)
    assert (payloads[0] == resealed(header)).all()
    assert tables.check().tolist() == [9, 8]
    # as of any step
    assert tables.encode([xs[1], xs[1]])[0].size > HEADER


def test_a_norm_beyond_float32_is_not_finite():
    x = np.full(16, 3e38, np.float32)
    for norm, flags in (("l2", 9), ("max", 8)):
        tables = Tables(QSGD(bucket_numel=16, norm=norm), [16], 16)
        tables.encode([on_device(x)])
        assert tables.check().tolist() == [flags]
        assert len(host_encode(tables.compressor, x, None, 16)) == len(tables.taken()[0])


@pytest.mark.parametrize("bits", range(2, 9))
def test_decodes_what_hosts_send(bits):
    compressor = QSGD(bits=bits)
    numels = [1, 512, 1033]
    payloads = [[host_encode(compressor, wide(values(n)), None, 512, Key(rank=r)) for r in range(3)] for n in numels]
    assert_decoded(compressor, numels, 512, payloads, scale=1 / 3)
    assert_decoded(compressor, numels, 512, [of_tensor[:1] for of_tensor in payloads])
    assert_decoded(compressor, numels, 512, [of_tensor[:1] for of_tensor in payloads], add=True)


@pytest.mark.parametrize("bucket", [8, 24, 1000, 4096, 32768])
def test_decodes_buckets_of_any_size(bucket):
    numels = [3, 2 * bucket + 5] if bucket < 5000 else [40000]
    for bits in (4, 5):
        compressor = QSGD(bits=bits, bucket_numel=bucket)
        payloads = [[host_encode(compressor, wide(values(n)), None, bucket)] for n in numels]
        assert_decoded(compressor, numels, bucket, payloads)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_decodes_into_any_type(kind, unaligned):
    compressor = QSGD(bits=8)
    payloads = [[host_encode(compressor, wide(values(1500)), None, 512, Key(rank=r)) for r in range(2)]]
    for add in (False, True):
        assert_decoded(compressor, [1500], 512, payloads, kind, 0.5, add, unaligned)


def test_decodes_norms_of_any_kind():
    # the quotient of the largest norm is rounded up; what a hostile peer may send is not finite
    largest = np.finfo(np.float32).max
    for norm in (largest, np.nextafter(largest, np.float32(0)), 1e-45, 0.0, -1.0):
        for bits in range(2, 9):
            compressor = QSGD(bits=bits, bucket_numel=16, norm="max")
            payload = host_encode(compressor, wide(values(16)), None, 16)
            payload[HEADER : HEADER + 4].view(np.float32)[0] = norm
            payload = resealed(payload)
            assert_decoded(compressor, [16], 16, [[payload]])


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    compressor = QSGD()
    sent = host_encode(compressor, wide(values(600)), None, 512)
    bad = host_encode(compressor, np.full(600, np.nan, np.float32), None, 512)
    absent = resealed(bad)
    absent[6] = 8 | 4
    absent = resealed(absent)
    assert_decoded(compressor, [600], 512, [[absent, sent, absent]])
    assert_decoded(compressor, [600], 512, [[absent]])
    tables = Tables(compressor, [600], 512, senders=3)
    tables.put([resealed(sent), resealed(bad), resealed(sent)])
    assert tables.check().tolist() == [8, 9, 8]
    out, whole = framed(600)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


def test_own_payloads_are_decoded_without_a_check():
    tables = Tables(QSGD(), [1500, 20], 512)
    payloads = tables.encode([values(1500), values(20)])
    outs = [framed(1500), framed(20)]
    tables.decode([out for out, _ in outs], 1.0, force=True)
    for (out, whole), payload in zip(outs, payloads, strict=True):
        assert_same_bits(wide(out), host_decode(tables.compressor, [payload], len(out)))
        assert is_unharmed(whole)


def test_refuses_other_bits_and_sizes():
    sent = host_encode(QSGD(bits=4), wide(values(100)), None, 512)
    others = [host_encode(QSGD(bits=bits), wide(values(100)), None, 512) for bits in (2, 3, 8)]
    stated = sent.copy()
    stated[28] = 5
    longer = np.concatenate([sent, np.zeros(8, np.uint8)])
    longer[16:24].view(np.uint64)[0] = longer.size
    shorter = sent[:-8].copy()
    shorter[16:24].view(np.uint64)[0] = shorter.size
    none = sent[:HEADER].copy()
    none[16:24].view(np.uint64)[0] = HEADER
    for payload in [*others, stated, longer, shorter, none]:
        # a room for any of them
        tables = Tables(QSGD(bits=8), [100], 512)
        tables.kernels = QSGD(bits=4).device_kernels(512)
        tables.put([resealed(payload)])
        assert tables.check().tolist() == [-1]


def test_others_go_through_host_memory():
    assert QSGD(bits=1).device_kernels(512) is None
    assert QSGD(bits=1, coding="elias").device_kernels(512) is None
    assert QSGD(bits=4, coding="elias").device_kernels(512) is None
