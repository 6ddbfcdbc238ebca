from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import BF16, FP16, NoCompression
from hvd_compress.exchange.raw import CheckedHalves, CheckedRaw, Raw
from hvd_compress.kernels import table
from tests import device
from tests.device import (
    Tables,
    assert_same_values,
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
GROUP = 2**31 - 1
SIZES = [1, 3, 2048, 2501]
HALVES = [FP16(), CheckedHalves(), BF16(error_feedback=False)]
ALL = [NoCompression(), Raw(), CheckedRaw(), *HALVES]
UNCHECKED = [NoCompression(), Raw(), FP16()]
rng = np.random.default_rng(6)
every_compressor = pytest.mark.parametrize("compressor", ALL, ids=lambda c: type(c).__name__)
every_kind = pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])


def values(numel, kind="float32", factor=1.0):
    return on_device(rng.standard_normal(numel).astype(np.float32) * np.float32(factor), kind)


def float32s(count):
    """Return float32 of any bits, with many that are hard to round."""
    words = rng.integers(0, 2**32, count, dtype=np.uint32)
    # halves, and what is between two of them or next to it
    words[::2] &= np.uint32(0xFFFFF000)
    words[::6] |= np.uint32(1)
    # exponents of halves
    words[::3] = words[::3] & np.uint32(0x83FFFFFF) | np.uint32(0x38000000)
    words[1::4] = words[1::4] & np.uint32(0x81FFFFFF) | np.uint32(0x32000000)
    edges = [65504, 65519.996, 65520, 65535.996, 65536, 2.0**-24, 2.0**-25, 2.0**-14, 3.4028235e38, 3.39e38, 1e-45]
    words[: len(edges)] = np.array(edges, np.float32).view(np.uint32)
    hard = [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC00001, 0x80000000, 0x7F7F8000, 0x7F7F7FFF]
    words[len(edges) : len(edges) + len(hard)] = hard
    return words.view(np.float32)


def assert_same_payload(payload, expected):
    np.testing.assert_array_equal(payload, resealed(expected))


def assert_decoded(compressor, payloads, kind="float32", scale=1.0, add=False, unaligned=False):
    device.assert_decoded(compressor, payloads, GROUP, assert_same_values, kind, scale, add, unaligned)


@every_compressor
@every_kind
@pytest.mark.parametrize("unaligned", [False, True])
def test_encodes_as_the_host_does(compressor, kind, unaligned):
    tables = Tables(compressor, SIZES, GROUP, kind)
    xs = [values(n + unaligned, kind)[unaligned * 1 :] for n in SIZES]
    payloads = tables.encode(xs)
    for x, payload in zip(xs, payloads, strict=True):
        assert_same_payload(payload, host_encode(compressor, wide(x), None, GROUP))
    assert (tables.check() == 8).all()


@every_compressor
def test_rounds_all_numbers_as_the_host_does(compressor):
    x = float32s(40000)
    if compressor not in UNCHECKED:
        x = x[np.isfinite(x)]
    if isinstance(compressor, CheckedHalves):
        x = x[np.abs(x) < 65520]
    tables = Tables(compressor, [x.size], GROUP)
    (payload,) = tables.encode([on_device(x)])
    expected = host_encode(compressor, x, None, GROUP)
    assert len(expected) > HEADER
    assert_same_payload(payload, expected)


@every_compressor
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 65520.0, -3.4e38])
def test_tells_of_what_is_not_finite_where_the_host_does(compressor, bad):
    tables = Tables(compressor, [5000, 10], GROUP)
    xs = [values(5000), values(10)]
    xs[0][4999] = bad
    for x, payload in zip(xs, tables.encode(xs), strict=True):
        assert_same_payload(payload, host_encode(compressor, wide(x), None, GROUP))
    # another step
    xs[0][4999] = 1.0
    for x, payload in zip(xs, tables.encode(xs), strict=True):
        assert_same_payload(payload, host_encode(compressor, wide(x), None, GROUP))


@every_kind
@pytest.mark.parametrize("unaligned", [False, True])
def test_bfloat16_leaves_what_it_rounds_off(kind, unaligned):
    numels = [1, 2048, 4099]
    tables = Tables(BF16(), numels, GROUP, kind)
    xs = [values(n + unaligned, factor=0.01)[unaligned * 1 :] for n in numels]
    hosts = [wide(x) for x in xs]
    for _ in range(3):
        gradients = [values(n + unaligned, kind)[unaligned * 1 :] for n in numels]
        gradients[1][:5] = 0
        payloads = tables.encode(xs, gradients)
        for x, host, gradient, payload in zip(xs, hosts, gradients, payloads, strict=True):
            assert_same_payload(payload, host_encode(BF16(), host, wide(gradient), GROUP))
            assert_same_values(wide(x), host)


def test_bfloat16_can_take_a_step_back_whose_values_are_not_finite():
    numels = [3000, 10]
    tables = Tables(BF16(), numels, GROUP)
    before = [wide(values(n)) for n in numels]
    gradients = [values(n) for n in numels]
    gradients[0][7] = np.inf
    gradients[0][8] = np.nan
    before[0][9] = gradients[0][9] = 3e38
    # the sum is finite, what it is rounded to is not
    before[0][10], gradients[0][10] = 0, 3.4e38
    xs = [on_device(x) for x in before]
    payloads = tables.encode(xs, gradients)
    assert [len(p) for p in payloads] == [HEADER, HEADER + 24]
    assert tables.check().tolist() == [9, 8]
    hosts = [x.copy() for x in before]
    for host, gradient, payload in zip(hosts, gradients, payloads, strict=True):
        assert_same_payload(payload, host_encode(BF16(), host, wide(gradient), GROUP))
    assert_same_values(wide(xs[1]), hosts[1])
    tables.rows[:, table.ADD] = 1
    tables.decode(xs, 1.0, force=True)
    for x, old, gradient in zip(xs, before, gradients, strict=True):
        total = old + wide(gradient)
        assert_same_values(wide(x), np.where(np.isfinite(total), total, old))


@pytest.mark.parametrize("compressor", HALVES, ids=lambda c: type(c).__name__)
def test_decodes_all_halves_as_the_host_does(compressor):
    numel = 2**16
    payload = host_encode(compressor, np.zeros(numel, np.float32), None, GROUP)
    payload[HEADER:].view(np.uint16)[:] = np.arange(numel)
    payload = resealed(payload)
    for scale in (1.0, 0.3):
        assert_decoded(compressor, [[payload]], scale=scale)


@every_compressor
@every_kind
def test_decodes_what_hosts_send(compressor, kind):
    payloads = [[host_encode(compressor, wide(values(n)), None, GROUP) for _ in range(3)] for n in SIZES]
    payloads[0][0][HEADER:] = 0
    payloads[0][0][HEADER + (1 if compressor in HALVES else 3)] = 0x80  # -0.0
    payloads[0][0] = resealed(payloads[0][0])
    assert_decoded(compressor, payloads, kind, scale=1 / 3)
    assert_decoded(compressor, [of_tensor[:1] for of_tensor in payloads], kind)
    assert_decoded(compressor, payloads, kind, add=True, unaligned=True)


@every_compressor
def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan(compressor):
    sent = host_encode(compressor, wide(values(3000)), None, GROUP)
    absent = resealed(host_encode(CheckedRaw(), np.full(3000, np.nan, np.float32), None, GROUP))
    absent[5] = compressor.codec
    bad = resealed(absent)
    absent[6] = 8 | 4
    absent = resealed(absent)
    assert_decoded(compressor, [[absent, sent, absent]])
    assert_decoded(compressor, [[absent]])
    assert_decoded(compressor, [[sent, bad, sent]])


@every_compressor
def test_own_payloads_are_decoded_without_a_check(compressor):
    tables = Tables(compressor, [3000, 20], GROUP)
    payloads = tables.encode([values(3000), values(20)])
    outs = [framed(3000), framed(20)]
    tables.decode([out for out, _ in outs], 1.0, force=True)
    for (out, whole), payload in zip(outs, payloads, strict=True):
        assert_same_values(wide(out), host_decode(compressor, [payload], len(out)))
        assert is_unharmed(whole)


@every_compressor
@pytest.mark.parametrize("numel", [1, 100, 103])
def test_refuses_bodies_of_other_sizes(compressor, numel):
    sent = host_encode(compressor, wide(values(numel)), None, GROUP)
    body = len(sent) - HEADER
    for nbytes in (HEADER, HEADER + body - 8, HEADER + body + 8, HEADER + 2 * body, HEADER + body // 16 * 8):
        if nbytes == len(sent):
            continue
        tables = Tables(NoCompression(), [numel], GROUP)
        if nbytes > tables.room[0]:
            continue
        tables.compressor, tables.kernels = compressor, compressor.device_kernels(GROUP)
        payload = np.resize(sent, nbytes)
        payload[16:24].view(np.uint64)[0] = nbytes
        tables.put([resealed(payload)])
        assert tables.check().tolist() == [-1]


def test_refuses_float64():
    for numel in (1, 100):
        payload = NoCompression().encode(rng.standard_normal(numel))
        assert payload[6] == 2
        for compressor in (NoCompression(), Raw()):
            tables = Tables(NoCompression(), [numel], int(payload[24:28].view(np.uint32)[0]))
            tables.kernels = compressor.device_kernels(GROUP)
            tables.put([resealed(payload)])
            assert tables.check().tolist() == [-1]
    # who rounds them tells where they came from
    payload = host_encode(CheckedRaw(), wide(values(1)), None, GROUP)
    payload[6] = 2
    tables = Tables(CheckedRaw(), [1], GROUP)
    tables.put([resealed(payload)])
    assert tables.check().tolist() == [10]


def test_others_go_through_host_memory():
    assert CheckedRaw(8).device_kernels(GROUP) is None
