from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Blockwise
from hvd_compress.kernels import blockwise as kernels
from tests.arrays import make


def sylvester(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def oracle(v: np.ndarray, bits: int, block: int, hadamard: bool = False) -> np.ndarray:
    """Round to nearest, levels = 2**(bits - 1) - 1, scale = largest magnitude, block by block; H orthonormal."""
    levels, flat = 2 ** (bits - 1) - 1, v.reshape(-1).astype(np.float64)
    y = np.zeros(v.size)
    for start in range(0, v.size, block):
        x = flat[start : start + block]
        h = sylvester(block) / np.sqrt(block) if hadamard and x.size == block else np.eye(x.size)
        turned = h @ x
        scale = np.abs(turned).max() / levels
        if scale:
            y[start : start + block] = h.T @ (np.sign(turned) * np.floor(np.abs(turned) / scale + 0.5) * scale)
    return y.reshape(v.shape)


@pytest.mark.parametrize("content", ["normal", "all-zero", "all-equal", "all-negative", "signed-zeros", "one-huge"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("bits", "block"), [(8, 256), (4, 256), (8, 24), (4, 8), (4, 4096)])
def test_oracle(content, dtype, bits, block):
    x = make(content, (13, 431), dtype)
    compressor = Blockwise(bits=bits, block=block)
    y = compressor.decode(compressor.encode(x))
    step = np.abs(x.astype(np.float64)).max() / (2 ** (bits - 1) - 1)
    wrong = ~np.isclose(y, oracle(x, bits, block), rtol=3e-7, atol=0)
    # next to the middle between two levels float32 decides otherwise
    assert wrong.mean() < 1e-3
    assert np.abs(y[wrong] - x[wrong]).max(initial=0) <= step


@pytest.mark.parametrize("block", [2**n for n in range(3, 16)])
def test_rotation_is_sylvesters_matrix_and_its_own_inverse(block):
    x = np.random.default_rng(block).integers(-8, 9, block).astype(np.float32)
    y = x.copy()
    kernels.rotate(y, np.empty_like(y))
    # integers are exact
    if block <= 2048:
        assert (y == sylvester(block) @ x).all()
    kernels.rotate(y, np.empty_like(y))
    assert (y == block * x).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [8, 64, 256])
def test_rotated_blocks_are_those_of_the_oracle(bits, block):
    x = make("normal", (7 * block + 5,), "float32")
    compressor = Blockwise(bits=bits, block=block, hadamard=True)
    y = compressor.decode(compressor.encode(x))
    expected = oracle(x, bits, block, hadamard=True)
    assert np.isclose(y, expected, atol=1e-5).mean() > 0.9
    assert np.linalg.norm(y - x) == pytest.approx(np.linalg.norm(expected - x), rel=0.02)


def test_rotation_saves_the_others_from_one_large_value():
    x = make("normal", (256,), "float32")
    x[100] = 30
    error = {}
    for hadamard in (False, True):
        compressor = Blockwise(bits=4, hadamard=hadamard)
        error[hadamard] = np.delete(compressor.decode(compressor.encode(x)) - x, 100)
    assert np.linalg.norm(error[False]) > 12, "nearly all others are rounded to zero"
    assert np.linalg.norm(error[True]) < 5


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-10, 1.0, 1e20, 1e36])
def test_every_magnitude_of_float32(hadamard, scale):
    """Peers flush blocks below 1e-10 to their minimum, and divide zero blocks by zero."""
    x = (make("normal", (512,), "float32").astype(np.float64) * scale).astype(np.float32)
    compressor = Blockwise(block=64, hadamard=hadamard)
    y = compressor.decode(compressor.encode(x)).astype(np.float64)
    assert np.linalg.norm(y - x) <= 0.02 * np.linalg.norm(x.astype(np.float64)) + 512 * 1.5e-45
    assert (compressor.decode(compressor.encode(np.zeros(512, np.float32))) == 0).all()


@pytest.mark.parametrize("hadamard", [False, True])
def test_the_largest_float32_stays_finite(hadamard):
    x = np.full(128, np.finfo(np.float32).max)
    x[::3] *= -1
    compressor = Blockwise(bits=4, block=64, hadamard=hadamard)
    residual = np.zeros_like(x)
    assert (compressor.decode(compressor.encode(x, residual)) / x).tolist() == pytest.approx([1] * 128)
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("content", ["normal", "sparse", "one-huge", "ties"])
def test_the_error_is_smaller_than_the_source(content):
    x = make(content, (5000,), "float32")
    for compressor in (Blockwise(bits=4, block=32768), Blockwise(bits=4), Blockwise(bits=4, hadamard=True)):
        y = compressor.decode(compressor.encode(x)).astype(np.float64)
        assert np.linalg.norm(y - x) < np.linalg.norm(x.astype(np.float64))


def test_without_feedback_what_is_small_never_arrives_and_with_it_does():
    """The bias that peers without error feedback have."""
    x = np.full(256, 0.01, np.float32)
    x[0] = 1.0
    for hadamard in (False, True):
        residual, total = np.zeros_like(x), np.zeros(256)
        compressor = Blockwise(bits=4, hadamard=hadamard)
        for _ in range(100):
            total += compressor.decode(compressor.encode(x, residual))
        np.testing.assert_allclose(total / 100, x, atol=2e-3)
    plain = Blockwise(bits=4, error_feedback=False)
    assert (plain.decode(plain.encode(x))[1:] == 0).all()


def test_what_the_header_says_decides_how_it_is_decoded():
    x = make("normal", (1000,), "float32")
    for compressor in (
        Blockwise(bits=4, block=8),
        Blockwise(hadamard=True),
        Blockwise(bits=4, block=64, hadamard=True),
    ):
        payload = compressor.encode(x)
        assert (Blockwise().decode(payload) == compressor.decode(payload)).all()


def test_size():
    x = make("normal", (5120,), "float32")
    assert Blockwise().encode(x).size == 40 + 4 * 20 + 5120
    assert Blockwise(bits=4).encode(x).size == 40 + 4 * 20 + 2560
