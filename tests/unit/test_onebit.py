from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, OneBit
from tests.arrays import make


def oracle(v: np.ndarray, group: int) -> np.ndarray:
    """Dryden 3.1: >= 0 is a 1, else 0; reconstructed as the means of the non-negative and negative of the column."""
    y = np.empty(v.size)
    for start in range(0, v.size, group):
        column = v.reshape(-1)[start : start + group].astype(np.float64)
        ones = column >= 0
        plus = column[ones].mean() if ones.any() else 0.0
        minus = column[~ones].mean() if not ones.all() else 0.0
        y[start : start + group] = np.where(ones, plus, minus)
    return y.reshape(v.shape)


@pytest.mark.parametrize(
    "content", ["normal", "ties", "all-zero", "all-equal", "all-negative", "signed-zeros", "one-huge"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "group", "group_numel"),
    [
        ((700, 600), "row", 600),
        ((40, 20, 5, 5), "row", 1000),
        ((2000,), "row", 2000),
        ((30, 70), "tensor", 2100),
        ((30, 70), 1, 1),
        ((30, 70), 13, 13),
        ((30, 70), 10**6, 2100),
    ],
)
def test_oracle(content, dtype, shape, group, group_numel):
    x = make(content, shape, dtype)
    y = OneBit(group=group).decode(OneBit(group=group).encode(x))
    np.testing.assert_allclose(y, oracle(x, group_numel), rtol=2e-7, atol=1e-45)


def test_error_feedback_over_steps():
    rng = np.random.default_rng(0)
    kept = np.zeros((40, 640))
    residual = np.zeros((40, 640), np.float32)
    for _ in range(20):
        x = rng.standard_normal((40, 640)).astype(np.float32)
        corrected = (x + residual).astype(np.float32)
        y = OneBit().decode(OneBit().encode(x, residual))
        np.testing.assert_allclose(y, oracle(corrected, 640), rtol=2e-7)
        kept = kept + x - y
        np.testing.assert_allclose(residual, kept, atol=1e-4)


def test_zero_and_negative_zero_are_ones():
    payload = OneBit().encode(np.array([0.0, -0.0, -1.0, 1.0], np.float32))
    assert payload[48] == 0b1011
    assert payload[40:48].view("<f4").tolist() == [np.float32(1 / 3), -1.0]


def test_means_minimize_the_quantization_error():
    x = make("normal", (1, 4000), "float32").astype(np.float64)
    y = OneBit().decode(OneBit().encode(x))
    plus, minus = y.max(), y.min()
    error = ((x - y) ** 2).sum()
    for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert ((x - np.where(x >= 0, a * plus, b * minus)) ** 2).sum() > error


@pytest.mark.parametrize("sample", [2, 16, 64, 511])
def test_sampled_means_estimate_those_of_the_column(sample):
    x = make("normal", (200, 512), "float32")
    exact = oracle(x, 512)
    y = OneBit(sample=sample).decode(OneBit(sample=sample).encode(x))
    # the signs are never sampled: they differ only where a sample of this few draws missed one sign of the group
    assert ((y > 0) == (x >= 0)).mean() > (0.7 if sample == 2 else 0.999)
    # half the draws are of one sign; the deviation of a half-normal variable is 0.6, averaged over 400 means
    spread = 0.6 / np.sqrt(max(sample / 2, 1))
    assert abs(np.abs(y).mean() - np.abs(exact).mean()) < 6 * spread / np.sqrt(400) + (0.3 if sample == 2 else 0)
    if sample >= 16:
        worst = np.abs(np.abs(y) - np.abs(exact)).max()
        assert 0 < worst < 6 * spread


def test_sample_of_the_group_or_more_is_exact():
    x = make("normal", (20, 512), "float32")
    exact = OneBit().encode(x)[56:]
    assert (OneBit(sample=512).encode(x)[56:] == exact).all()
    assert (OneBit(sample=10**6).encode(x)[56:] == exact).all()


def test_sample_depends_on_the_key_only():
    x = make("normal", (20, 512), "float32")
    compressor = OneBit(sample=32)
    assert compressor.encode(x, key=Key(step=1)).tobytes() == compressor.encode(x, key=Key(step=1)).tobytes()
    assert compressor.encode(x, key=Key(step=1)).tobytes() != compressor.encode(x, key=Key(step=2)).tobytes()
    assert compressor.encode(x, key=Key(rank=1)).tobytes() != compressor.encode(x, key=Key(rank=2)).tobytes()
    assert OneBit().encode(x, key=Key(step=1)).tobytes() == OneBit().encode(x, key=Key(step=2)).tobytes()


def test_groups_draw_their_own_samples():
    row = make("normal", (512,), "float32")
    y = OneBit(sample=16).decode(OneBit(sample=16).encode(np.tile(row, (50, 1))))
    assert len(np.unique(y.max(axis=1))) > 25
