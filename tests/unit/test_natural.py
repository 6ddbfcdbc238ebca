from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hvd_compress
from hvd_compress import Key, Natural
from hvd_compress.errors import WireError
from tests.arrays import make
from tests.forge import forge

COPIES = 4096


def draws_of(v: np.ndarray) -> np.ndarray:
    """4096 draws; the values are those of one block each, so that the block's largest is theirs."""
    return Natural().decode(Natural().encode(np.repeat(v, COPIES))).reshape(v.size, COPIES).astype(np.float64)


def neighbours(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Horvath et al. 2019, definition 1: the powers of two around |v|."""
    low = 2.0 ** np.floor(np.log2(np.abs(v.astype(np.float64))))
    return low, 2 * low


def test_values_are_the_neighbouring_powers_and_their_mean_is_kept():
    v = make("normal", (40,), "float32", seed=2)
    y = draws_of(v)
    low, high = neighbours(v)
    magnitudes = np.abs(y)
    assert ((magnitudes == low[:, None]) | (magnitudes == high[:, None])).all()
    assert (np.sign(y) == np.sign(v)[:, None]).all()
    size = np.abs(v.astype(np.float64))
    standard_error = np.sqrt((size - low) * (high - size) / COPIES)
    assert (np.abs(y.mean(axis=1) - v) <= 6 * standard_error + 1e-6).all()


def test_variance_is_an_eighth_of_the_square_at_most():
    """Theorem 1; tight for 4/3 of a power."""
    v = np.array([4 / 3, 1.1, -1.5, 1.9, -3.3, 1e-20], np.float32)
    ratio = ((draws_of(v) - v[:, None]) ** 2).mean(axis=1) / v.astype(np.float64) ** 2
    assert ratio.max() < 0.135
    assert ratio[0] == pytest.approx(1 / 8, rel=0.1)


def test_powers_of_two_zeros_and_signs_are_kept():
    v = np.array([0.0, -0.0, 1.0, -2.0, 0.25, 2.0**-100, -(2.0**20)], np.float32)
    y = Natural().decode(Natural().encode(v))
    assert (y == v).all()
    assert not np.signbit(y[:2]).any()


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-126, 2.0**-60, 1.0, 2.0**60, 2.0**120])
def test_every_magnitude_of_float32(scale):
    v = (np.array([1.25, -1.75, 3.0]) * scale).astype(np.float32)
    low, high = neighbours(v)
    # denormals become zero or the least power that is none
    low, high = (np.where(high < 2.0**-126, least, a) for a, least in ((low, 0), (high, 2.0**-126)))
    size = np.abs(v.astype(np.float64))
    error = np.abs(draws_of(v).mean(axis=1) - v.astype(np.float64))
    assert (error <= 6 * np.sqrt((size - low) * (high - size) / COPIES) + 1e-6 * size).all()


def test_what_is_far_below_the_largest_of_its_block_is_zero_and_only_there():
    v = np.full(3 * 4096, 2.0**-60, np.float32)
    v[4096] = 2.0**100
    y = Natural().decode(Natural().encode(v))
    assert y[4096] == 2.0**100
    assert (y[4097:8192] == 0).all()
    assert (np.delete(y, slice(4096, 8192)) == 2.0**-60).all()
    v[4096] = 2.0**66
    assert (Natural().decode(Natural().encode(v)) == v).all()


def test_the_largest_float32_stays_finite():
    v = np.full(100, -np.finfo(np.float32).max)
    assert (Natural().decode(Natural().encode(v)) == -(2.0**127)).all()


def test_draws_depend_on_seed_tensor_step_and_rank():
    x = make("normal", (2000,), "float32")
    base = Key(seed=3, name="w", step=5, rank=1, hop=0)
    others = [dataclasses.replace(base, **{f: v}) for f, v in
              (("seed", 4), ("name", "v"), ("step", 6), ("rank", 2), ("hop", 1), ("chunk", 1))]  # fmt: skip
    assert len({Natural().encode(x, key=key).tobytes() for key in (base, *others)}) == 7
    assert Natural(seed=1).encode(x).tobytes() == Natural().encode(x, key=Key(seed=1)).tobytes()


def test_a_block_beyond_the_exponents_of_float32_is_refused():
    payload = Natural().encode(make("normal", (1000,), "float32"))
    with pytest.raises(WireError):
        hvd_compress.decode(forge(payload, {40: ("<u1", 128)}))
    with pytest.raises(WireError, match="blocks of 8192"):
        hvd_compress.decode(forge(payload, {}, group=8192))


def test_size():
    assert Natural().encode(make("normal", (40960,), "float32")).size == 40 + 16 + 40960
