from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvd_compress import BF16, FP16, NoCompression
from tests.arrays import CONTENTS, make


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_none_keeps_every_bit(content, dtype):
    x = make(content, (3, 500), dtype)
    y = NoCompression().decode(NoCompression().encode(x))
    expected = x if dtype == "float64" else x.astype(np.float32)
    np.testing.assert_array_equal(y, expected)
    assert (np.signbit(y) == np.signbit(expected)).all()
    assert NoCompression().encode(x).size == 56 + expected.nbytes


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_fp16_is_the_cast_of_numpy(content, dtype):
    x = make(content, (3, 500), dtype)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(FP16().decode(FP16().encode(x)), expected)


@pytest.mark.parametrize("content", [c for c in CONTENTS if c not in ("inf", "minus-inf", "nan")])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_bf16_is_the_cast_of_ml_dtypes(content, dtype):
    x = make(content, (3, 500), dtype)
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(BF16().decode(BF16().encode(x)), expected)


def test_bf16_error_feedback_gives_the_rest_later():
    x = np.array([1.001], np.float32)
    residual = np.zeros(1, np.float32)
    total = sum(float(BF16().decode(BF16().encode(x, residual))[0]) for _ in range(1000))
    assert total + residual[0] == pytest.approx(1001, rel=1e-6)
    assert abs(residual[0]) < 2.0**-8


def test_a_residual_next_to_the_largest_float_stays_finite_when_a_step_is_taken_back():
    # the first sum is rounded to infinity; the second one, less its gradient, is rounded beyond the largest float
    residual = np.full(2, -np.finfo(np.float32).max, np.float32)
    BF16().encode(np.array([-1.0141205e31, 1.6469863e38], np.float32), residual)
    assert np.isfinite(residual).all()
    assert residual[1] == -np.finfo(np.float32).max


def test_bf16_overflow_spares_the_residual():
    """The largest float32 rounds to infinity; its residual would be infinite for ever."""
    x = np.array([np.finfo(np.float32).max, 1.0], np.float32)
    residual = np.full(2, 0.25, np.float32)
    assert not np.isfinite(BF16().decode(BF16().encode(x, residual))).all()
    # beside the largest float32 there is no 0.25
    assert residual.tolist() == [0, 0.25]


@pytest.mark.parametrize("compressor", [NoCompression(), FP16(), BF16()], ids=repr)
@pytest.mark.parametrize("out_dtype", [np.float32, np.float64])
def test_decode_into_scales_and_adds(compressor, out_dtype):
    x = (np.arange(3000) % 64 - 32).astype(np.float32)
    payload = compressor.encode(x)
    out = np.ones(3000, out_dtype)
    assert compressor.decode_into(payload, out, scale=0.25, add=True)
    assert (out == 1 + x / 4).all()
    assert compressor.decode_into(payload, out, scale=0.5)
    assert (out == x / 2).all()


torch = pytest.importorskip("torch", reason="Horovod's own interface takes framework tensors")


def test_fp16_as_horovods_compressor():
    tensor = torch.tensor([1.0, 1.001], dtype=torch.float32)
    small, ctx = FP16().compress(tensor)
    assert small.dtype == torch.float16
    assert FP16().decompress(small, ctx).dtype == torch.float32
    whole = torch.tensor([1, 2])
    assert FP16().compress(whole)[0] is whole
    with pytest.raises(TypeError, match="torch or TensorFlow"):
        FP16().compress(np.ones(3, np.float32))


def test_none_as_horovods_compressor():
    tensor = torch.ones(3)
    assert NoCompression().compress(tensor) == (tensor, None)
    assert NoCompression().decompress(tensor, None) is tensor
