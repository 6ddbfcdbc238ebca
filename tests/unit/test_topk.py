from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_compress import Key, TopK
from tests.arrays import FINITE, make


def oracle(v: np.ndarray, k: int) -> np.ndarray:
    """The k values of largest magnitude, as float32; among equals the first; the rest 0."""
    flat = v.reshape(-1).astype(np.float64)
    kept = np.argsort(-np.abs(flat), kind="stable")[:k]
    y = np.zeros(flat.size)
    y[kept] = flat[kept].astype(np.float32)
    return y.reshape(v.shape)


@pytest.mark.parametrize("content", FINITE)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1,), (9,), (60, 600), (200_000,)])
@pytest.mark.parametrize("settings", [{"k": 1}, {"k": 77}, {"ratio": 0.01}, {"ratio": 0.3}, {"ratio": 1.0}], ids=str)
def test_oracle(content, dtype, shape, settings):
    x = make(content, shape, dtype)
    compressor = TopK(**settings)
    k = settings["k"] if "k" in settings else max(1, math.ceil(x.size * settings["ratio"]))
    np.testing.assert_array_equal(compressor.decode(compressor.encode(x)), oracle(x, min(k, x.size)))


@pytest.mark.parametrize("step", range(5))
def test_the_selection_is_exact_whatever_the_sample_says(step):
    """Heavy tails, sorted data and clusters mislead a sampled threshold; the selection must not care."""
    rng = np.random.default_rng(step)
    for x in (
        rng.standard_cauchy(50_000),
        np.sort(rng.standard_normal(50_000)),
        np.where(np.arange(50_000) < 300, 1e6, 1e-6) * rng.standard_normal(50_000),
        np.where(np.arange(50_000) == 49_999, 1.0, 0.0),
        np.repeat([1.0, -1.0], 25_000),
    ):
        x32 = x.astype(np.float32)
        for k in (1, 500, 20_000):
            y = TopK(k=k).decode(TopK(k=k).encode(x32, key=Key(step=step)))
            np.testing.assert_array_equal(y, oracle(x32, k))


def test_error_feedback_over_steps():
    rng = np.random.default_rng(0)
    residual = np.zeros((20, 640), np.float32)
    for step in range(20):
        x = rng.standard_normal((20, 640)).astype(np.float32)
        corrected = x + residual
        y = TopK(0.02).decode(TopK(0.02).encode(x, residual, Key(step=step)))
        np.testing.assert_array_equal(y, oracle(corrected, 256))
        np.testing.assert_array_equal(residual, corrected - y)


def test_float64_keeps_what_float32_rounds_off():
    x = np.array([1 + 2.0**-40, 1e-3])
    residual = np.zeros(2)
    assert TopK(k=1).decode(TopK(k=1).encode(x, residual)).tolist() == [1, 0]
    assert residual.tolist() == [2.0**-40, 1e-3]


def test_zeros_are_not_sent():
    x = np.zeros(1000, np.float32)
    x[3] = -2
    assert TopK(k=100).encode(x).size == 40 + 8 + 8 + 8
    assert (TopK(k=100).decode(TopK(k=100).encode(x)) == x).all()


@pytest.mark.parametrize("n", [65535, 65536, 65537, 200_000])
def test_blocks_of_65536(n):
    x = np.zeros(n, np.float32)
    places = [0, 65535 % n, 65536 % n, n - 1, n // 2]
    x[places] = [1, 2, 3, 4, 5]
    assert (TopK(k=5).decode(TopK(k=5).encode(x)) == x).all()


@pytest.mark.parametrize("total", [7, 100, 9999])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_parts_share_k(total, chunks):
    bounds = [total * i // chunks for i in range(chunks + 1)]
    sizes = np.diff(bounds)
    for k in (1, 10, total):
        parts = [TopK(k=k).for_part(int(n), total).k for n in sizes]
        assert k <= sum(parts) <= k + chunks
        assert all(p >= 1 for p in parts)
    assert TopK(ratio=0.1, error_feedback=False).for_part(3, 100) == TopK(ratio=0.1, error_feedback=False)
    assert not TopK(k=5, error_feedback=False).for_part(3, 100).feedback
