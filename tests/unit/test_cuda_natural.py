"""Powers of two on a device: the bytes of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, Natural
from hvd_compress.kernels import table
from tests import device
from tests.device import Tables, assert_same_bits, framed, host_encode, is_unharmed, on_device, resealed, wide

# NaN and infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GROUP = 4096
SIZES = [1, 9, 4096, 9000]
rng = np.random.default_rng(12)


def values(numel, kind="float32"):
    return on_device(rng.standard_normal(numel).astype(np.float32), kind)


def assert_encoded(xs, kind="float32"):
    """Encode on the device, and compare with the bytes of the host."""
    numels = [len(x) for x in xs]
    tables = Tables(Natural(), numels, GROUP, kind)
    keys = [Key(seed=5, name=str(i)) for i in range(len(xs))]
    payloads = tables.encode(xs, keys=keys)
    for x, key, made in zip(xs, keys, payloads, strict=True):
        np.testing.assert_array_equal(made, resealed(host_encode(Natural(), wide(x), None, GROUP, key)))
    assert (tables.check() == table.SUMMED).all()
    return payloads


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_makes_the_bytes_of_the_host(kind, unaligned):
    assert_encoded([values(n + 1, kind)[unaligned * 1 :][:n] for n in SIZES], kind)


@pytest.mark.parametrize(
    "content",
    [
        [0.0, -0.0],
        [1e-45, -3e-45, 1e-38, 2e-38],
        # 2**126 times smaller than the largest becomes zero
        [1.7e38, 1.0, 2.0, -4.0, 1e-3, 3e38, -3.4028235e38],
        np.exp2(np.arange(-140.0, 128.0)),
    ],
)
def test_makes_the_bytes_of_the_host_of_any_size(content):
    x = np.resize(content, 5000).astype(np.float32)
    (payload,) = assert_encoded([on_device(x)])
    device.assert_decoded(Natural(), [[payload]], GROUP, assert_same_bits, "float32", 0.3, False, False)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_tells_of_values_that_are_not_finite(bad):
    tables = Tables(Natural(), [5000, 5000], GROUP)
    xs = [values(5000), values(5000)]
    xs[0][4500] = bad
    assert [p.size > 40 for p in tables.encode(xs)] == [False, True]
    assert tables.check().tolist() == [table.SUMMED | table.NONFINITE, table.SUMMED]


def sent(numel, rank=0):
    return host_encode(Natural(), wide(values(numel)), None, GROUP, Key(rank=rank))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_decodes_into_any_type(kind):
    payloads = [[sent(n, r) for r in range(2)] for n in SIZES]
    for add in (False, True):
        device.assert_decoded(Natural(), payloads, GROUP, assert_same_bits, kind, 1 / 3, add, add)
    device.assert_decoded(Natural(), [p[:1] for p in payloads], GROUP, assert_same_bits, kind, 1.0, False, False)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    bad = host_encode(Natural(), np.full(600, np.nan, np.float32), None, GROUP)
    absent = bad.copy()
    absent[6] = table.ABSENT
    good = sent(600)
    device.assert_decoded(
        Natural(), [[resealed(absent), good, resealed(absent)]], GROUP, assert_same_bits, "float32", 1.0, False, False
    )
    tables = Tables(Natural(), [600], GROUP, senders=2)
    tables.put([resealed(good), resealed(bad)])
    assert (tables.check() >= 0).all()
    out, whole = framed(600)
    tables.decode([out])
    assert np.isnan(wide(out)).all()
    assert is_unharmed(whole)


def found(payload, numel):
    tables = Tables(Natural(), [numel], GROUP)
    tables.rows[:, table.ROOM] = payload.size
    tables.put([resealed(payload)])
    return tables.check().tolist()


def test_any_codes_are_decoded_within_their_place():
    payload = sent(5000)
    payload[48:] = rng.integers(0, 256, payload.size - 48)
    for base in (0, 1, 127):
        payload[40] = payload[41] = base
        device.assert_decoded(
            Natural(), [[resealed(payload)]], GROUP, device.assert_same_values, "float32", 2.0, False, False
        )


def test_refuses_exponents_that_no_encoder_makes_and_other_sizes():
    payload = sent(9000)
    assert found(payload, 9000) == [table.SUMMED]
    for block in range(3):
        for base in (128, 255):
            wrong = payload.copy()
            wrong[40 + block] = base
            assert found(wrong, 9000) == [-1]
    for other in (np.concatenate([payload, np.zeros(8, np.uint8)]), payload[:-8].copy(), payload[:40].copy()):
        other[16:24].view(np.uint64)[0] = other.size
        assert found(other, 9000) == [-1]
