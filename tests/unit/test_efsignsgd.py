from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import EFSignSGD, OneBit
from hvd_compress.loopback import Loopback
from tests.arrays import make


def oracle(v: np.ndarray, group: int) -> np.ndarray:
    """Karimireddy et al. 2019, algorithm 1: delta = (||p||_1 / d) sign(p), for each group."""
    y = np.empty(v.size)
    for start in range(0, v.size, group):
        p = v.reshape(-1)[start : start + group].astype(np.float64)
        y[start : start + group] = np.abs(p).sum() / p.size * np.where(p >= 0, 1, -1)
    return y.reshape(v.shape)


@pytest.mark.parametrize(
    "content", ["normal", "ties", "all-zero", "all-equal", "all-negative", "signed-zeros", "one-huge", "sparse"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "group", "group_numel"),
    [
        ((70, 600), "row", 600),
        ((40, 20, 5, 5), "row", 1000),
        ((30, 70), "tensor", 2100),
        ((30, 70), 1, 1),
        ((30, 70), 13, 13),
    ],
)
def test_oracle(content, dtype, shape, group, group_numel):
    x = make(content, shape, dtype)
    y = EFSignSGD(group=group).decode(EFSignSGD(group=group).encode(x))
    np.testing.assert_allclose(y, oracle(x, group_numel), rtol=2e-7, atol=1e-45)


def test_the_papers_loop():
    """p = gamma g + e; x -= delta(p); e = p - delta(p)."""
    rng = np.random.default_rng(0)
    e, residual = np.zeros(640), np.zeros(640, np.float32)
    compressor = EFSignSGD(group="tensor")
    for _ in range(20):
        g = rng.standard_normal(640).astype(np.float32)
        p = g + e
        delta = oracle(p, 640)
        e = p - delta
        np.testing.assert_allclose(compressor.decode(compressor.encode(g, residual)), delta, rtol=1e-4)
        np.testing.assert_allclose(residual, e, atol=1e-4)


@pytest.mark.parametrize("density", [1.0, 0.1, 0.01])
def test_the_error_is_what_the_paper_says_and_never_more_than_the_source(density):
    """Lemma 8: the error is 1 - ||v||_1^2 / (d ||v||_2^2) of the square, for sparse values, too.

    With the root mean square in place of the mean it would be 1.5 and 1.8 times the square at these densities.
    """
    rng = np.random.default_rng(1)
    v = np.where(rng.random(10_000) < density, rng.standard_normal(10_000), 0).astype(np.float32)
    y = EFSignSGD(group="tensor").decode(EFSignSGD(group="tensor").encode(v)).astype(np.float64)
    square = (v.astype(np.float64) ** 2).sum()
    error = ((v - y) ** 2).sum() / square
    assert error == pytest.approx(1 - np.abs(v).sum(dtype=np.float64) ** 2 / (v.size * square), rel=1e-5)
    assert error < 1


def test_signs_are_those_of_the_error_also_of_negative_zeros():
    """Bits and error of DeepSpeed disagree on -0.0."""
    x = np.array([0.0, -0.0, -1.0, 1.0], np.float32)
    residual = np.zeros(4, np.float32)
    payload = EFSignSGD().encode(x, residual)
    y = EFSignSGD().decode(payload)
    assert payload[48] == 0b1011
    assert y.tolist() == [0.5, 0.5, -0.5, 0.5]
    assert residual.tolist() == [-0.5, -0.5, -0.5, 0.5]


def test_four_bytes_a_group_less_than_onebit():
    x = make("normal", (512, 1024), "float32")
    assert EFSignSGD().encode(x).size == OneBit().encode(x).size - 4 * 512 == 40 + 16 + 4 * 512 + 512 * 128


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_nothing_is_lost_between_ranks_and_averages_are_averages(exchange):
    """Peers sum in one framework and average in another, and owners that keep no residual lose what they round."""
    arrays = [np.random.default_rng(rank).standard_normal(2000).astype(np.float32) for rank in range(3)]
    sums, means = (Loopback(3, EFSignSGD(), exchange, op) for op in ("sum", "average"))
    total = np.zeros(2000)
    for _ in range(50):
        of_sum = sums.allreduce(arrays)[0]
        np.testing.assert_allclose(of_sum / 3, means.allreduce(arrays)[0], rtol=1e-6)
        total += of_sum
    for rank in range(3):
        total += sums.residual("tensor", rank)
        start = sums.bounds("tensor")[rank] if exchange == "two_phase" else 0
        owed = sums.owner_residual("tensor", rank)
        total[start : start + owed.size] += owed
    np.testing.assert_allclose(total, 50 * np.sum(arrays, axis=0), atol=1e-3)
