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


@pytest.mark.parametrize("tau", [2.0**-149, 1e-40, 0.5, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_next_number_beyond_tau_is_sent(tau, dtype):
    tau = dtype(np.float32(tau))
    beyond = np.nextafter(tau, dtype(np.inf), dtype=dtype)
    x = np.repeat(np.array([tau, beyond], dtype), 70)  # a vector of 64, and a rest
    expected = np.where(x == beyond, tau, dtype(0))
    for sign in (1, -1):
        assert (Threshold(float(tau)).decode(Threshold(float(tau)).encode(sign * x)) == sign * expected).all()


def test_no_float32_is_greater_than_the_largest_tau():
    largest = np.finfo(np.float32).max
    x = np.full(70, largest)
    x[::2] *= -1
    assert not Threshold(float(largest)).decode(Threshold(float(largest)).encode(x)).any()


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
