from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hvd_compress import Adaptive, Key
from tests.arrays import FINITE, make
from tests.thorough import shown_by


def oracle(v: np.ndarray, group: int, pi: int) -> np.ndarray:
    """Dryden 3.3: of k non-negative values of a column the largest k / pi (here rounded up, and never a zero) are sent
    as their mean; of the negative ones likewise. Among equals, the first."""
    y = np.zeros(v.size)
    for start in range(0, v.size, group):
        column = v.reshape(-1)[start : start + group].astype(np.float64)
        for sign, mine in ((1, column >= 0), (-1, column < 0)):
            order = np.argsort(-np.where(mine, sign * column, -np.inf), kind="stable")
            chosen = order[: int(np.ceil(mine.sum() / pi))]
            chosen = chosen[column[chosen] != 0]
            if chosen.size:
                y[start + chosen] = column[chosen].mean()
    return y.reshape(v.shape)


CONTENTS, SAMPLES = list(FINITE), [None, 16, 1024]
GROUPINGS = [
    ((60, 600), "row", 600, 64),
    ((40, 20, 5, 5), "row", 1000, 7),
    ((20000,), "row", 20000, 64),
    ((3, 20000), "tensor", 60000, 64),
    ((30, 70), 1, 1, 2),
    ((30, 70), 13, 13, 3),
    ((7,), "row", 7, 1024),
]


def shows(content, dtype, sample, grouping):
    """All contents and groupings in float32; samples, which change nothing, take turns."""
    c, g, s = CONTENTS.index(content), GROUPINGS.index(grouping), SAMPLES.index(sample)
    takes_turn = s == (c + g) % len(SAMPLES)
    if dtype == "float32":
        return takes_turn or content == "normal"
    return takes_turn and (c % 3 == g % 3 if dtype == "float64" else c == g)


@pytest.mark.parametrize(
    ("content", "dtype", "sample", "grouping"),
    shown_by(shows, product(CONTENTS, ["float32", "float64", "float16", "bfloat16"], SAMPLES, GROUPINGS)),
)
def test_oracle(content, dtype, sample, grouping):
    shape, group, group_numel, pi = grouping
    x = make(content, shape, dtype)
    compressor = Adaptive(pi=pi, group=group, sample=sample)
    y = compressor.decode(compressor.encode(x))
    expected = oracle(x, group_numel, pi)
    assert ((y != 0) == (expected != 0)).all() or content == "denormal"
    np.testing.assert_allclose(y, expected, rtol=2e-7, atol=2e-45)


@pytest.mark.parametrize("seed", range(5))
def test_the_selection_is_exact_whatever_the_groups_before_were_like(seed):
    """Thresholds are guessed from the neighbour; groups of wildly different scale must not be misjudged."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((50, 700)) * 10.0 ** rng.integers(-6, 7, (50, 1))
    x[rng.random(50) < 0.2] = 0
    x[10] = np.abs(x[10])
    x[11] = -np.abs(x[11])
    x = x.astype(np.float32)
    y = Adaptive(pi=32).decode(Adaptive(pi=32).encode(x, key=Key(step=seed)))
    np.testing.assert_allclose(y, oracle(x, 700, 32), rtol=2e-7)


@pytest.mark.parametrize("pi", [2, 3, 64, 1000])
def test_a_sign_never_falls_silent_and_the_proportion_is_kept(pi):
    x = make("normal", (10, 1000), "float32")
    x[:, :997] = np.abs(x[:, :997])
    x[:, 997:] = -np.abs(x[:, 997:])
    y = Adaptive(pi=pi).decode(Adaptive(pi=pi).encode(x))
    assert ((y > 0).sum(axis=1) == -(-997 // pi)).all()
    assert ((y < 0).sum(axis=1) == -(-3 // pi)).all()


def test_error_feedback_over_steps():
    rng = np.random.default_rng(0)
    residual = np.zeros((20, 640), np.float32)
    for step in range(20):
        x = rng.standard_normal((20, 640)).astype(np.float32)
        corrected = (x + residual).astype(np.float32)
        y = Adaptive().decode(Adaptive().encode(x, residual, Key(step=step)))
        np.testing.assert_allclose(y, oracle(corrected, 640, 64), rtol=2e-7)
        np.testing.assert_allclose(residual, corrected - y, atol=1e-5)


def test_the_sample_does_not_change_what_is_sent():
    x = make("normal", (40, 5000), "float32")
    exact = Adaptive(sample=None).encode(x)
    for step, sample in enumerate((16, 100, 1024, 5000)):
        assert (Adaptive(sample=sample).encode(x, key=Key(step=step)) == exact).all()


def test_entries_are_16_bit_up_to_groups_of_32768_and_32_bit_beyond():
    for n, entry_bytes in ((32768, 2), (32769, 4)):
        x = make("all-equal", (n,), "float32")
        sent = -(-n // 64)
        size = Adaptive(group="tensor").encode(x).size
        assert size == 40 + 8 + 8 + (sent * entry_bytes + 7) // 8 * 8
    assert (Adaptive(group="tensor").decode(Adaptive(group="tensor").encode(x)) != 0).sum() == sent


@pytest.mark.parametrize("scale", [1e18, 1e20, 1e30])
def test_groups_whose_squares_overflow(scale):
    x = (np.random.default_rng(0).standard_normal((50, 700)) * scale).astype(np.float32)
    y = Adaptive(pi=32).decode(Adaptive(pi=32).encode(x))
    np.testing.assert_allclose(y, oracle(x, 700, 32), rtol=2e-7)


def test_a_warm_up_sends_at_least_what_it_is_asked_for():
    for share in (1.0, 0.9, 0.5, 0.34, 0.22, 0.25, 0.0625, 1e-6):
        assert Adaptive(pi=64).keeping(share).kept_share(1000) >= min(share, 2 / 64)
    assert Adaptive(pi=64).keeping(0.25).pi == 4
    assert Adaptive(pi=64).keeping(0.001) == Adaptive(pi=64)


def test_a_group_that_indices_cannot_reach_is_refused():
    assert Adaptive(group="tensor").group_numel((2**31 - 1,)) == 2**31 - 1
    with pytest.raises(ValueError, match=r"a group of 2147483648 elements; .* Use group=\"row\""):
        Adaptive(group="tensor").group_numel((2**16, 2**15))
