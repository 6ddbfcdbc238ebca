from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Threshold
from tests.arrays import make


def oracle(v: np.ndarray, tau: float) -> np.ndarray:
    """Dryden 3.2: greater than tau is sent as tau, less than -tau as -tau, magnitudes below not at all."""
    tau = np.float64(np.float32(tau))
    v = v.astype(np.float64)
    return np.where(v > tau, tau, np.where(v < -tau, -tau, 0.0))


@pytest.mark.parametrize(
    "content", ["normal", "ties", "all-zero", "all-equal", "all-negative", "signed-zeros", "one-huge"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("tau", [1e-3, 0.5, 0.1, 2.0, 100.0])
@pytest.mark.parametrize("shape", [(33,), (70, 1000), (3, 32768)])
def test_oracle(content, dtype, tau, shape):
    x = make(content, shape, dtype)
    compressor = Threshold(tau=tau)
    assert (compressor.decode(compressor.encode(x)) == oracle(x, tau)).all()


def test_exactly_tau_is_not_sent():
    x = np.array([0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(1)), 0.4999], np.float32)
    assert Threshold(0.5).decode(Threshold(0.5).encode(x)).tolist() == [0, 0, 0.5, 0]


def test_error_feedback_sends_a_large_value_in_portions():
    residual = np.zeros(3, np.float32)
    x, zero = np.array([1.75, -0.3, 0.0], np.float32), np.zeros(3, np.float32)
    sent = [Threshold(0.5).decode(Threshold(0.5).encode(g, residual)).tolist() for g in (x, zero, zero, zero)]
    assert sent == [[0.5, 0, 0], [0.5, 0, 0], [0.5, 0, 0], [0, 0, 0]]
    np.testing.assert_array_equal(residual, np.array([0.25, -0.3, 0], np.float32))


def test_slowly_growing_values_accumulate():
    residual = np.zeros(1, np.float32)
    total = 0.0
    for _ in range(100):
        total += float(Threshold(0.5).decode(Threshold(0.5).encode(np.array([0.0625], np.float32), residual))[0])
    assert total + residual[0] == 6.25
    assert abs(residual[0]) <= 0.5625


@pytest.mark.parametrize("n", [1, 32767, 32768, 32769, 100_003])
def test_two_bytes_an_entry_and_four_a_group(n):
    x = np.zeros(n, np.float32)
    x[::100] = 1
    payload = Threshold(0.5).encode(x)
    groups, sent = -(-n // 32768), -(-n // 100)
    pad = lambda b: (b + 7) // 8 * 8  # noqa: E731
    assert payload.size == 40 + pad(4 * groups) + pad(2 * sent)
    assert (Threshold(0.5).decode(payload) == 0.5 * x).all()
