"""Signs on a device: the bytes of the host, for zeros too, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, SignSGD
from hvd_compress.kernels import table
from hvd_compress.kernels.cuda import feedback
from tests import device
from tests.device import (
    Tables,
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

GROUP = 64
SIZES = [1, 31, 32, 64, 1000, 1024, 2100]
rng = np.random.default_rng(11)


def with_zeros(numel, kind="float32"):
    x = rng.standard_normal(numel).astype(np.float32)
    x[::3], x[::7] = 0.0, -0.0
    return on_device(x, kind)


def keys_of(numels):
    return [Key(seed=4, name=str(i)) for i in range(len(numels))]


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_makes_the_bytes_of_the_host(kind, unaligned):
    tables = Tables(SignSGD(), SIZES, GROUP, kind)
    xs = [with_zeros(n + 1, kind)[unaligned * 1 :][:n] for n in SIZES]
    before = [wide(x) for x in xs]
    for x, old, key, made in zip(xs, before, keys_of(SIZES), tables.encode(xs, keys=keys_of(SIZES)), strict=True):
        np.testing.assert_array_equal(made, resealed(host_encode(SignSGD(), old, None, GROUP, key)))
        np.testing.assert_array_equal(wide(x), old)
    assert (tables.check() == table.SUMMED).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_steps_are_those_of_the_host(kind):
    compressor = SignSGD(scale=0.3, error_feedback=True)
    tables = Tables(compressor, SIZES, GROUP, kind)
    residuals, here = [on_device(np.zeros(n, np.float32)) for n in SIZES], [np.zeros(n, np.float32) for n in SIZES]
    for _ in range(2):
        gradients = [with_zeros(n, kind) for n in SIZES]
        payloads = tables.encode(residuals, gradients, keys_of(SIZES))
        for i, key in enumerate(keys_of(SIZES)):
            expected = host_encode(compressor, here[i], wide(gradients[i]), GROUP, key)
            np.testing.assert_array_equal(payloads[i], resealed(expected))
            np.testing.assert_array_equal(wide(residuals[i]), here[i])


def test_what_is_next_to_zero_has_its_own_sign():
    x = np.array([1e-45, -1e-45, 1e-38, -1e-38] * 10, np.float32)
    (made,) = Tables(SignSGD(), [40], GROUP).encode([on_device(x)])
    assert np.unpackbits(made[40:45], bitorder="little").tolist() == [1, 0] * 20


def sent(numel, scale=0.3, rank=0):
    return host_encode(SignSGD(scale=scale), wide(with_zeros(numel)), None, GROUP, Key(rank=rank))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_decodes_into_any_type(kind):
    payloads = [[sent(n, 0.3 + r, r) for r in range(2)] for n in SIZES]
    for add in (False, True):
        device.assert_decoded(SignSGD(), payloads, GROUP, assert_same_values, kind, 1 / 3, add, add)
    device.assert_decoded(SignSGD(), [p[:1] for p in payloads], GROUP, assert_same_values, kind, 1.0, False, False)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    absent, bad = sent(300)[:40].copy(), sent(300)[:40].copy()
    for header, flag in ((absent, table.ABSENT), (bad, table.NONFINITE)):
        header[6], header[16:24] = flag, np.array([40], np.uint64).view(np.uint8)
    tables = Tables(SignSGD(), [300], GROUP, senders=3)
    for middle, is_nan in ((sent(300), False), (bad, True)):
        tables.put([resealed(absent), resealed(middle), resealed(absent)])
        assert (tables.check() >= 0).all()
        out, whole = framed(300)
        tables.decode([out])
        assert np.isnan(wide(out)).all() == is_nan
        assert is_unharmed(whole)


def test_a_step_that_is_not_finite_is_taken_back_as_the_host_does():
    # beside such a scale no residual would survive
    compressor, numels = SignSGD(scale=1e20, error_feedback=True), [1500, 70]
    tables = Tables(compressor, numels, GROUP)
    before = [rng.standard_normal(n).astype(np.float32) for n in numels]
    gradients = [rng.standard_normal(n).astype(np.float32) for n in numels]
    gradients[0][[7, 1200]] = np.inf, np.nan
    residuals, given = [on_device(x) for x in before], [on_device(g) for g in gradients]
    payloads = tables.encode(residuals, given)
    assert [p.size for p in payloads] == [40, 56]
    tables.rows[:, table.ADD] = 1
    tables.decode(residuals, 1.0, force=True)
    tables.rows[:, table.GRADIENT] = [g.data_ptr() for g in given]
    tables.launch.place(tables.rows, "float32", True)
    feedback.take_back(tables.launch)
    host = before[0].copy()
    host_encode(compressor, host, gradients[0], GROUP)
    np.testing.assert_array_equal(wide(residuals[0]), host)
    np.testing.assert_allclose(host, before[0], atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
def test_refuses_scales_that_are_none(scale):
    payload = sent(100)
    payload[28:32].view(np.float32)[0] = scale
    tables = Tables(SignSGD(), [100], GROUP)
    tables.put([resealed(payload)])
    assert tables.check().tolist() == [-1]


def test_refuses_other_sizes():
    payload = sent(100)
    longer, shorter = np.concatenate([payload, np.zeros(8, np.uint8)]), payload[:-8].copy()
    for other in (longer, shorter):
        other[16:24].view(np.uint64)[0] = other.size
        tables = Tables(SignSGD(), [100], GROUP)
        tables.rows[:, table.ROOM] = other.size
        tables.put([resealed(other)])
        assert tables.check().tolist() == [-1]
