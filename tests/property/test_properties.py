"""What must hold for any array, any group size and any bytes."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hvd_compress
from hvd_compress import (
    BF16,
    QSGD,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    EFSignSGD,
    Key,
    Natural,
    NoCompression,
    OneBit,
    Percentile,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    wire,
)
from hvd_compress.errors import WireError
from tests.contract.rows import ROWS
from tests.forge import OFFSETS, forge, sealed

modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
more = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MAX = float(np.finfo(np.float32).max)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9) | st.tuples(st.integers(0, 1500))
dtypes = st.sampled_from([np.float32, np.float64])
# float64 beyond float32 is not finite by definition; below its denormals it is a remainder
elements = st.floats(-MAX, MAX, allow_nan=False, width=32)


def arrays(values=elements):
    return dtypes.flatmap(lambda t: hnp.arrays(t, shapes, elements=values, fill=values))


golombs = st.sampled_from([None, "golomb"])


@st.composite
def biased(draw):
    """A compressor with error feedback, of any settings."""
    group = draw(st.sampled_from(["row", "tensor"]) | st.integers(1, 2000))
    kind = draw(
        st.sampled_from(
            [
                "onebit",
                "threshold",
                "adaptive",
                "topk",
                "chunkedtopk",
                "percentile",
                "bf16",
                "efsignsgd",
                "blockwise",
                "signsgd",
            ]
        )
    )
    if kind == "onebit":
        return OneBit(group=group, sample=draw(st.none() | st.integers(2, 100)))
    if kind == "efsignsgd":
        return EFSignSGD(group=group)
    if kind == "blockwise":
        hadamard = draw(st.booleans())
        block = draw(st.integers(3, 11).map(lambda n: 2**n) if hadamard else st.integers(1, 200).map(lambda n: 8 * n))
        return Blockwise(bits=draw(st.sampled_from([4, 8])), block=block, hadamard=hadamard)
    if kind == "signsgd":
        return SignSGD(scale=draw(st.floats(2.0**-20, 2.0**20, width=32)), error_feedback=True)
    if kind == "threshold":
        return Threshold(tau=draw(st.floats(2.0**-149, MAX, width=32)), coding=draw(golombs))
    if kind == "adaptive":
        sample = draw(st.none() | st.integers(16, 100))
        return Adaptive(pi=draw(st.integers(2, 300)), group=group, sample=sample, coding=draw(golombs))
    if kind == "topk":
        ratios = st.builds(TopK, ratio=st.floats(0, 1, exclude_min=True), coding=golombs)
        return draw(ratios | st.builds(TopK, k=st.integers(1, 2000), coding=golombs))
    if kind == "chunkedtopk":
        ratio = draw(st.floats(0, 1, exclude_min=True))
        return ChunkedTopK(ratio, draw(st.integers(8, 2000)), draw(st.integers(1, 8)), coding=draw(golombs))
    if kind == "percentile":
        percentile = draw(st.floats(3.125, 100) | st.integers(32, 999).map(lambda n: n / 10))
        return Percentile(percentile, error_feedback=True, coding=draw(golombs))
    return BF16()


qsgds = st.builds(
    QSGD,
    bits=st.integers(1, 8),
    bucket_numel=st.integers(1, 100).map(lambda n: 8 * n),
    norm=st.sampled_from(["l2", "max"]),
    coding=st.sampled_from([None, "elias"]),
)
unbiased = qsgds | st.builds(
    TernGrad, group=st.just("row") | st.just("tensor") | st.integers(1, 2000), clip=st.none() | st.floats(1, 1000)
)
unbiased |= st.builds(Natural)
keys = st.builds(Key, seed=st.integers(0, 9), step=st.integers(0, 9))


def check_is_as_before(r, before, x):
    """To rounding, or 0 where it cannot be told from that of the gradient, or the sum comes near an overflow."""
    assert np.isfinite(r).all()
    bound = 4 * np.finfo(r.dtype).eps * np.maximum(np.abs(x), np.abs(before)).max()
    is_large = np.abs(x.astype(np.float64)) + np.abs(before) >= 2.0**126
    assert (np.isnan(x) | (np.abs(r - before) <= bound) | (is_large & (r == 0))).all()


@more
@given(compressor=biased(), x=arrays(), key=keys, data=st.data())
@example(compressor=Threshold(tau=0.5), x=np.float64(0.5), key=Key(), data=None)
@example(compressor=BF16(), x=np.full(3, MAX, np.float32), key=Key(), data=None)
def test_conservation(compressor, x, key, data):
    x = np.asarray(x)
    r = np.zeros(x.size, x.dtype)
    if data is not None:
        r = data.draw(hnp.arrays(x.dtype, x.size, elements=elements, fill=elements))
    before, given_ = r.copy(), x.copy()
    y = compressor.decode(compressor.encode(x, r, key))
    assert x.tobytes() == given_.tobytes()
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    if np.isnan(y).any():
        # the sum, or bfloat16's rounding of it, is beyond float32
        with np.errstate(over="ignore"):
            largest = np.abs((x.reshape(-1) + before).astype(np.float32)).max()
        assert largest > 3.38e38
        check_is_as_before(r, before, x.reshape(-1))
        return
    x64, r64, y64, a64 = (a.astype(np.longdouble).reshape(-1) for a in (x, before, y, r))
    allowed = 2 * np.finfo(x.dtype).eps * (np.abs(x64) + np.abs(r64) + np.abs(y64)) + 2e-45
    assert (np.abs((y64 + a64) - (x64 + r64)) <= allowed).all()


@more
@given(compressor=biased() | unbiased, x=arrays(), key=keys)
def test_payloads_hold_their_bounds_and_describe_themselves(compressor, x, key):
    payload = compressor.encode(x, key=key)
    group = compressor.group_numel(x.shape)
    assert payload.size <= compressor.capacity(x.size, group, x.shape)
    assert compressor.encode(x, key=key).tobytes() == payload.tobytes()
    y = compressor.decode(payload)
    assert y.shape == x.shape
    assert hvd_compress.decode(payload).tobytes() == y.tobytes()
    out = np.ones(x.size, x.dtype)
    compressor.decode_into(payload, out, scale=0.5, add=True)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_allclose(out, 1 + y.reshape(-1) / 2, rtol=1e-6)


@more
@given(compressor=biased() | unbiased, x=arrays(), key=keys)
def test_coding_is_lossless_and_never_longer_than_plain(compressor, x, key):
    coding = {
        "qsgd": "elias",
        "threshold": "golomb",
        "adaptive": "golomb",
        "topk": "golomb",
        "chunkedtopk": "golomb",
        "percentile": "golomb",
    }.get(compressor.id)
    if coding is None:
        return
    plain, coded = (dataclasses.replace(compressor, coding=c) for c in (None, coding))
    payload, plain_payload = coded.encode(x, key=key), plain.encode(x, key=key)
    assert coded.decode(payload).tobytes() == plain.decode(plain_payload).tobytes()
    assert payload.size <= plain_payload.size


@more
@given(x=arrays(st.floats(allow_nan=True, allow_infinity=True, width=32)), compressor=biased() | unbiased)
def test_nonfinite_is_never_hidden(x, compressor):
    y = compressor.decode(compressor.encode(x))
    if not np.isfinite(x).all():
        assert np.isnan(y).all()
    np.testing.assert_array_equal(NoCompression().decode(NoCompression().encode(x)), x)


@more
@given(x=arrays(), compressor=qsgds, key=keys)
def test_qsgd_is_within_a_level_of_every_value(x, compressor, key):
    y = compressor.decode(compressor.encode(x, key=key)).reshape(-1).astype(np.float64)
    x = x.reshape(-1).astype(np.float64)
    levels = max(1, 2 ** (compressor.bits - 1) - 1)
    for start in range(0, x.size, compressor.bucket_numel):
        part = slice(start, start + compressor.bucket_numel)
        norm = np.abs(x[part]).max() if compressor.norm == "max" else np.sqrt((x[part] ** 2).sum())
        if np.isnan(y).any():
            return  # a norm beyond float32 somewhere
        assert (np.abs(y[part] - x[part]) <= norm / levels * (1 + 1e-5) + levels * 1.5e-45).all()
        assert (y[part] * x[part] >= 0).all()


@more
@given(buffer=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(buffer):
    with pytest.raises(WireError):
        hvd_compress.decode(buffer)
    with pytest.raises(WireError):
        hvd_compress.decode(b"hvdc\x01" + buffer)
    array = np.frombuffer(buffer, np.uint8)
    with pytest.raises(WireError):
        wire.frames(np.concatenate([array, array]), 1 + len(buffer))


PAYLOADS = [r.compressor.encode(np.sin(np.arange(300, dtype=np.float32)).reshape(2, 150)) for r in ROWS]


@more
@given(data=st.data(), row=st.integers(0, len(ROWS) - 1))
def test_mutated_payloads_with_right_checksums_raise_or_return(data, row):
    """Whatever the header and body say, decoding ends, stays inside `out`, and raises nothing but WireError."""
    payload, compressor = PAYLOADS[row], ROWS[row].compressor
    fields = data.draw(
        st.dictionaries(
            st.sampled_from(sorted(set(OFFSETS) - {"magic", "version", "nbytes"})),
            st.integers(0, 400) | st.integers(0, 2**64 - 1) | st.sampled_from([2**15, 2**16, 2**31, 2**32 - 1, 2**40]),
            max_size=3,
        )
    )
    fields = {n: v % 2 ** (8 * np.dtype(OFFSETS[n][1]).itemsize) for n, v in fields.items()}
    flips = data.draw(st.dictionaries(st.integers(40, payload.size - 1), st.integers(0, 255), max_size=20))
    forged = forge(payload, {at: ("<u1", value) for at, value in flips.items()}, **fields)
    guarded = np.full(300 + 128, 7.5, np.float32)
    for add in (False, True):
        with contextlib.suppress(WireError):
            compressor.decode_into(forged, guarded[64:-64], add=add)
        assert (guarded[:64] == 7.5).all()
        assert (guarded[-64:] == 7.5).all()
    if fields.get("numel", 0) <= 2**20:
        with contextlib.suppress(WireError):
            hvd_compress.decode(forged)


@more
@given(row=st.integers(0, len(ROWS) - 1), at=st.integers(0, 2**16), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(row, at, flip):
    damaged = PAYLOADS[row].copy()
    damaged[at % damaged.size] ^= flip
    with pytest.raises(WireError):
        hvd_compress.decode(damaged)


@modest
@given(row=st.integers(0, len(ROWS) - 1), cut=st.integers(0, 2**16))
def test_any_truncation_is_noticed_even_with_a_right_checksum(row, cut):
    payload = PAYLOADS[row]
    nbytes = 56 + cut % (payload.size - 56) // 8 * 8
    shorter = payload[:nbytes].copy()
    shorter[16:24].view("<u8")[0] = nbytes
    with pytest.raises(WireError):
        hvd_compress.decode(sealed(shorter))


@modest
@given(sizes=st.lists(st.integers(0, 70), max_size=6), tail=st.binary(max_size=50))
def test_frames_are_the_inverse_of_concatenation(sizes, tail):
    parts = [OneBit().encode(np.ones(n, np.float32)) for n in sizes]
    joined = np.concatenate([np.empty(0, np.uint8), *parts, np.frombuffer(tail, np.uint8)])
    assert [p.tobytes() for p in wire.frames(joined, len(parts))] == [p.tobytes() for p in parts]
