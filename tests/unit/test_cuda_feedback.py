from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import BF16
from hvd_compress.kernels import common, table
from hvd_compress.kernels.cuda import feedback
from tests.device import ON_GPU, Tables, host_encode, on_device, wide

# NaN and infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GROUP = 2**31 - 1
rng = np.random.default_rng(7)
every_kind = pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])


def assert_taken_back(xs, gradients, kind):
    """Take back on the device and on the host, and compare; no gradient is None."""
    tables = Tables(BF16(), [len(x) for x in xs], GROUP, kind)
    hosts = [wide(x) for x in xs]
    tables.rows[:, table.X] = [x.data_ptr() for x in xs]
    tables.rows[:, table.GRADIENT] = [0 if g is None else g.data_ptr() for g in gradients]
    tables.launch.place(tables.rows, kind, True)
    feedback.take_back(tables.launch)
    for x, host, gradient in zip(xs, hosts, gradients, strict=True):
        if gradient is not None:
            common.take_back(host, wide(gradient))
        is_nan = np.isnan(host)
        np.testing.assert_array_equal(wide(x).view(np.uint32)[~is_nan], host.view(np.uint32)[~is_nan])
        assert np.isnan(wide(x))[is_nan].all()


@every_kind
@pytest.mark.parametrize("unaligned", [False, True])
def test_takes_back_what_the_host_does(kind, unaligned):
    xs, gradients = [], []
    for numel in (1, 4096, 5003, 300):
        gradient = rng.standard_normal(numel + 1).astype(np.float32)
        residual = gradient * np.exp2(rng.integers(-26, 3, numel + 1)).astype(np.float32)
        gradients.append(on_device(gradient, kind)[unaligned * 1 :][:numel])
        xs.append(on_device(wide(on_device(gradient, kind)) + residual)[unaligned * 1 :][:numel])
    gradients[3] = None
    assert_taken_back(xs, gradients, kind)


@every_kind
def test_takes_back_any_bits(kind):
    hard = [0x7F800000, 0xFF800000, 0x7FC00000, 0, 0x80000000, 1, 0x7F7FFFFF, 0x7F6FFFFF, 0x7F5FE000, 0x7F5FDFFF]
    words = rng.integers(0, 2**32, (2, 3000), dtype=np.uint32)
    words[0, :100], words[1, :100] = np.repeat(hard, 10), np.tile(hard, 10)
    # similar exponents
    words[1, 500:] = words[0, 500:] ^ (words[1, 500:] & np.uint32(0x00FFFFFF))
    x, gradient = words.view(np.float32)
    if kind == "bfloat16" and not ON_GPU:
        # Triton's interpreter reads denormal ones as others
        gradient[np.abs(gradient) < 2.0**-126] = 0
    assert_taken_back([on_device(x)], [on_device(gradient, kind)], kind)


def test_a_step_that_is_not_finite_is_taken_back_as_the_host_does():
    residual = rng.standard_normal(3000).astype(np.float32)
    gradient = rng.standard_normal(3000).astype(np.float32)
    gradient[7] = np.inf
    gradient[8] = np.nan
    residual[9] = gradient[9] = 3e38
    host, x = residual.copy(), on_device(residual)
    tables = Tables(BF16(), [3000], GROUP)
    given = on_device(gradient)
    tables.encode([x], [given])
    host_encode(BF16(), host, gradient, GROUP)
    tables.rows[:, table.ADD] = 1
    tables.decode([x], 1.0, force=True)
    tables.rows[:, table.GRADIENT] = given.data_ptr()
    tables.launch.place(tables.rows, "float32", True)
    feedback.take_back(tables.launch)
    np.testing.assert_array_equal(wide(x), host)
    np.testing.assert_allclose(host[10:], residual[10:], atol=1e-6)
    np.testing.assert_array_equal(host[7:9], residual[7:9])
