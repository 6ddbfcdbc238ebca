from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hvd_compress
from hvd_compress import Key, TernGrad
from hvd_compress.errors import WireError
from hvd_compress.loopback import Loopback
from tests.arrays import make
from tests.forge import forge

BUCKET, COPIES = 64, 4000


def scale_of(v: np.ndarray, clip: float | None) -> float:
    """Wen et al. 2017: s = max |g| of what clipping at c standard deviations leaves."""
    v = v.astype(np.float64)
    most = np.inf if clip is None else clip * np.sqrt((v**2).mean())
    return float(np.minimum(np.abs(v), most).max())


def draws_of(v: np.ndarray, clip: float | None) -> np.ndarray:
    compressor = TernGrad(group=v.size, clip=clip)
    return compressor.decode(compressor.encode(np.tile(v, (COPIES, 1)))).astype(np.float64)


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
def test_the_mean_is_what_clipping_leaves(clip):
    """Within 6 standard errors; unbiased without a clip."""
    v = make("normal", (BUCKET,), "float32", seed=11)
    v[5], v[6] = 0, -1e-4
    y, scale = draws_of(v, clip), scale_of(v, clip)
    clipped = np.clip(v.astype(np.float64), -scale, scale)
    standard_error = np.sqrt(np.abs(clipped) * (scale - np.abs(clipped)) / COPIES)
    assert (np.abs(y.mean(axis=0) - clipped) <= 6 * standard_error + 1e-5 * scale).all()
    if clip is None:
        assert scale == np.abs(v).max()
    levels = y / scale
    assert np.allclose(levels, np.round(levels), atol=1e-6)
    assert ((np.sign(y) == np.sign(v)) | (y == 0)).all()
    assert (y[:, 5] == 0).all()


def test_the_largest_is_always_sent_and_has_its_value():
    v = make("normal", (1000,), "float32")
    y = TernGrad(group="tensor", clip=None).decode(TernGrad(group="tensor", clip=None).encode(v))
    top = int(np.abs(v).argmax())
    assert y[top] == v[top]


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_equal_values_are_not_clipped_to_nothing(n):
    """Their deviation from the mean is zero; that from zero is not."""
    v = np.full(n, -0.75, np.float32)
    np.testing.assert_allclose(TernGrad().decode(TernGrad().encode(v)), v, rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("scale", [1e-45, 1e-44, 1e-38, 1e-30, 1e18, 1e37])
def test_every_magnitude_of_float32(scale, clip):
    v = (make("normal", (BUCKET,), "float32", seed=3).astype(np.float64) * scale).astype(np.float32)
    y, s = draws_of(v, clip), scale_of(v, clip)
    clipped = np.clip(v.astype(np.float64), -s, s)
    assert np.isfinite(y).all()
    allowed = 6 * np.sqrt(np.abs(clipped) * np.maximum(s - np.abs(clipped), 0) / COPIES) + 1e-5 * s + 1.5e-45
    assert (np.abs(y.mean(axis=0) - clipped) <= allowed).all()


@pytest.mark.parametrize("group", [1, 5, 13, 319, 320, 321, 1000, 5000])
@pytest.mark.parametrize("n", [1, 4, 5, 6, 319, 320, 321, 4999])
def test_every_element_is_packed_in_its_place(group, n):
    x = np.random.default_rng(n).integers(-1, 2, n).astype(np.float32)
    x[0] = 1
    compressor = TernGrad(group=group, clip=None)
    assert (compressor.decode(compressor.encode(x)) == x).all()


def test_draws_depend_on_seed_tensor_step_and_rank():
    """BytePS seeds every worker and tensor alike, and CGX every rank by the clock: then averages gain nothing."""
    x = make("normal", (2000,), "float32")
    base = Key(seed=3, name="w", step=5, rank=1, hop=0)
    others = [dataclasses.replace(base, **{f: v}) for f, v in
              (("seed", 4), ("name", "v"), ("step", 6), ("rank", 2), ("hop", 1), ("chunk", 1))]  # fmt: skip
    assert len({TernGrad().encode(x, key=key).tobytes() for key in (base, *others)}) == 7
    assert TernGrad().encode(x, key=base).tobytes() == TernGrad().encode(x, key=dataclasses.replace(base)).tobytes()
    assert TernGrad(seed=1).encode(x).tobytes() == TernGrad().encode(x, key=Key(seed=1)).tobytes()
    state = np.random.get_state()[1].tobytes()  # noqa: NPY002
    TernGrad().encode(x)
    assert np.random.get_state()[1].tobytes() == state  # noqa: NPY002


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
def test_errors_of_ranks_average_out(exchange):
    x = make("normal", (3000,), "float32")
    ranks = Loopback(4, TernGrad(clip=None), exchange)
    mean = np.mean([ranks.allreduce([x] * 4)[0] for _ in range(300)], axis=0, dtype=np.float64)
    assert np.linalg.norm(mean - x) < 0.15 * np.linalg.norm(x)


def test_damping_by_the_contraction_brings_values_nearer():
    """Also of a normal group's 2.5 deviations, where plain draws are farther than zero."""
    x = make("normal", (20_000,), "float32")
    for compressor in (TernGrad(), TernGrad(group=64, clip=None), TernGrad(group="tensor", clip=1.5)):
        y = compressor.contraction(x.size) * compressor.decode(compressor.encode(x))
        assert np.linalg.norm(y - x) < np.linalg.norm(x)


def test_unbiased_without_clip_only():
    assert TernGrad(clip=None).unbiased
    assert not TernGrad().unbiased


def test_a_byte_of_no_digits_is_refused():
    payload = TernGrad(group="tensor").encode(make("normal", (1000,), "float32"))
    with pytest.raises(WireError):
        hvd_compress.decode(forge(payload, {payload.size - 8: ("<u1", 243)}))


def test_size():
    x = make("normal", (10, 3200), "float32")
    assert TernGrad().encode(x).size == 40 + 16 + 4 * 10 + 32000 // 5
