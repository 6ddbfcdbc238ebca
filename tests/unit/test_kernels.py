from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from hvd_compress import Key
from hvd_compress.kernels import cast, common, onebit, qsgd
from hvd_compress.kernels.checksum import checksum
from hvd_compress.kernels.collect import TILE, collect, count_at_least
from hvd_compress.kernels.jit import kernel
from hvd_compress.kernels.llvm import (
    add_chosen_64,
    at_least_64,
    common_bits_64,
    count_ones,
    leading_zeros,
    outside_64,
    put_chosen_64,
    put_word,
    trailing_zeros,
)

PATTERNS = np.arange(65536, dtype=np.uint16)
KEY = (np.uint32(0x12345678), np.uint32(0x9ABCDEF0))
UNIT = np.float32(1)


def around(halves: np.ndarray) -> np.ndarray:
    """float32 patterns at every 16-bit value, halfway to the next, and one unit beside each of these."""
    values = np.unique(halves.astype(np.float32)[np.isfinite(halves.astype(np.float32))])
    middles = (values[:-1].astype(np.float64) + values[1:]).astype(np.float64) / 2
    with np.errstate(over="ignore"):
        points = np.concatenate([values, middles.astype(np.float32)])
    with np.errstate(over="ignore"):
        points = np.concatenate(
            [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, -np.float32(np.inf))]
        )
    return points.astype(np.float32)


# -- casts: every pattern, against NumPy and ml_dtypes ---------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_half_is_widened_exactly(kind, out_dtype):
    decode, dtype = {"fp16": (cast.from_fp16, np.float16), "bf16": (cast.from_bf16, ml_dtypes.bfloat16)}[kind]
    out = np.empty(65536, out_dtype)
    decode(PATTERNS, UNIT, out, False)
    expected = PATTERNS.view(dtype).astype(np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(out) == nan).all()
    assert (out[~nan].astype(np.float32).view(np.uint32) == expected[~nan].view(np.uint32)).all(), "signs of zero too"


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_half_survives_the_round_trip(kind):
    encode, decode = {"fp16": (cast.to_fp16, cast.from_fp16), "bf16": (cast.to_bf16, cast.from_bf16)}[kind]
    wide, back = np.empty(65536, np.float32), np.empty(65536, np.uint16)
    decode(PATTERNS, UNIT, wide, False)
    encode(wide.view(np.uint32), back)
    nan = np.isnan(wide)
    assert (back[~nan] == PATTERNS[~nan]).all()
    decode(back, UNIT, wide, False)
    assert np.isnan(wide[nan]).all()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_rounding_is_to_nearest_even_at_every_boundary(kind):
    encode, dtype = {"fp16": (cast.to_fp16, np.float16), "bf16": (cast.to_bf16, ml_dtypes.bfloat16)}[kind]
    points = around(PATTERNS.view(dtype))
    out = np.empty(points.size, np.uint16)
    encode(points.view(np.uint32), out)
    with np.errstate(over="ignore"):
        expected = points.astype(dtype).view(np.uint16)
    wrong = out != expected
    assert not wrong.any(), points[wrong][:5]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_rounding_of_random_patterns_and_nan_payloads(kind):
    encode, dtype = {"fp16": (cast.to_fp16, np.float16), "bf16": (cast.to_bf16, ml_dtypes.bfloat16)}[kind]
    patterns = np.random.default_rng(0).integers(0, 2**32, 1_000_003, dtype=np.uint32)
    patterns[:6] = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000]
    out = np.empty(patterns.size, np.uint16)
    encode(patterns, out)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = patterns.view(np.float32).astype(dtype)
    nan = np.isnan(patterns.view(np.float32))
    assert np.isnan(out.view(dtype)[nan]).all()
    assert (out[~nan] == expected.view(np.uint16)[~nan]).all()


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 4097])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_widening_adds_and_scales(kind, n):
    decode, dtype = {"fp16": (cast.from_fp16, np.float16), "bf16": (cast.from_bf16, ml_dtypes.bfloat16)}[kind]
    values = (np.arange(n) % 97 - 48).astype(dtype)
    out = np.ones(n)
    decode(values.view(np.uint16), np.float32(0.5), out, True)
    assert (out == 1 + values.astype(np.float64) / 2).all()
    decode(values.view(np.uint16), np.float32(0.25), out, False)
    assert (out == values.astype(np.float64) / 4).all()


def test_bf16_residual_is_what_was_rounded_off_and_says_if_it_is_not_finite():
    gradient = np.linspace(-3, 3, 3001, dtype=np.float32)
    left, halves = np.zeros_like(gradient), np.empty(gradient.size, np.uint16)
    assert cast.encode_bf16(left, gradient, halves)
    assert (left == gradient - halves.view(ml_dtypes.bfloat16).astype(np.float32)).all()
    # it is finite, and rounded to infinity
    gradient[3000] = 3.4e38
    left[...] = 0
    assert not cast.encode_bf16(left, gradient, halves)
    assert np.isfinite(left).all()
    assert np.isfinite(halves.view(ml_dtypes.bfloat16).astype(np.float32)).all()


# -- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("content", ["normal", "ties", "equal", "zeros", "denormal", "huge", "wide"])
def test_kth_largest_of_magnitudes_is_that_of_a_sort(content, n, dtype):
    rng = np.random.default_rng(n)
    a = {
        "normal": np.abs(rng.standard_normal(n)),
        "ties": rng.integers(0, 4, n) * 0.25,
        "equal": np.full(n, 0.3),
        "zeros": np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "denormal": rng.integers(0, 5, n) * 1.5e-45,
        "huge": np.float64(np.finfo(np.float32).max) * rng.random(n),
        "wide": 10.0 ** rng.uniform(-44, 38, n),
    }[content].astype(dtype)
    roomy = np.full(common.room_for(n), 7e37, dtype)
    roomy[:n] = a
    expected = np.sort(a)[::-1]
    assert [common.kth_largest(roomy, n, k) for k in range(1, n + 1)] == expected.tolist()
    for bound in (0.0, a[n // 2], np.nextafter(a[n // 2], dtype(np.inf)), 0.3, a.max(), np.inf):
        # a wider type than that of the values, too
        for given in (dtype(bound), np.float64(bound)):
            assert [common.kth_largest(roomy, n, k, given) for k in range(1, n + 1)] == expected.tolist()
    assert (roomy[:n] == a).all(), "the order must be kept"


def test_kth_largest_of_signed_values():
    a = np.array([-3.0, 2.0, -0.5, 0.0, 7.0, 2.0] + 58 * [9.0], np.float32)
    assert [common.kth_largest(a, 6, k) for k in range(1, 7)] == [7, 2, 2, 0, -0.5, -3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 63, 64, 65, 127, 128, 1000, TILE + 17])
@pytest.mark.parametrize(("above", "below"), [(0.5, -0.5), (0.0, 0.0), (0.25, -9.0), (9.0, -9.0), (1.0, -1.0)])
def test_collect_is_flatnonzero(n, above, below, dtype):
    # a grid, so that values equal to a bound occur
    y = (np.random.default_rng(n).integers(-8, 9, n) / 4).astype(dtype)
    expected = np.flatnonzero((y >= above) | (y <= below))
    bounds = dtype(above), dtype(below)
    memory = np.full(n + 3 + 64 + 8, -7, np.int32)
    found = memory[:-8]
    assert collect(y, *bounds, 1000, found, 3) == 3 + expected.size
    assert (found[:3] == -7).all()
    assert found[3 : 3 + expected.size].tolist() == (1000 + expected).tolist()
    if expected.size:
        assert collect(y, *bounds, 0, memory[: expected.size - 1 + 64], 0) == -1
        assert collect(y, *bounds, 0, memory[: expected.size + 64], 0) == expected.size
    assert (memory[-8:] == -7).all(), "written beyond its room"


@pytest.mark.parametrize("n", [4, 70])
def test_nan_is_not_collected_nor_counted(n):
    y = np.full(n, np.nan, np.float32)
    y[1:3] = 1, -1
    found = np.empty(n + 64, np.int32)
    assert collect(y, np.float32(0), np.float32(0), 0, found, 0) == 2
    assert found[:2].tolist() == [1, 2]
    assert count_at_least(y, np.float32(0)) == 1


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_both_zeros_count_as_not_negative(n):
    y = np.random.default_rng(n).integers(-1, 2, n) * np.float32(-0.0 if n % 2 else 1.5)
    assert count_at_least(y.astype(np.float32), np.float32(0)) == (y >= 0).sum()


# -- words of bits ---------------------------------------------------------------------------------------------------


@kernel
def words_of(y, start, bound, above, below):
    return at_least_64(y, start, bound), outside_64(y, start, above, below)


@kernel
def common_bits_of(codes, start, mask):
    return common_bits_64(codes, start, mask)


@kernel
def ones_and_zeros_of(words, ones, trailing, leading):
    for i in range(words.size):
        ones[i] = count_ones(words[i])
        trailing[i] = trailing_zeros(words[i])
        leading[i] = leading_zeros(words[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bit_k_of_a_word_belongs_to_element_k(dtype):
    y = np.random.default_rng(0).standard_normal(100).astype(dtype)
    y[[7, 40]] = np.nan, 0.5
    for start in (0, 1, 36):
        part = y[start : start + 64]
        weights = 1 << np.arange(64, dtype=np.uint64)
        at_least, outside = words_of(y, start, dtype(0.5), dtype(1), dtype(-0.25))
        assert at_least == weights[part >= 0.5].sum()
        assert outside == weights[(part >= 1) | (part <= -0.25)].sum()


@kernel
def chosen_of(y, start, word, one, zero, add):
    if add:
        add_chosen_64(y, start, word, one, zero)
    else:
        put_chosen_64(y, start, word, one, zero)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("add", [True, False])
def test_element_k_becomes_what_bit_k_of_a_word_says(add, dtype):
    y = np.random.default_rng(0).standard_normal(100).astype(dtype)
    for start in (0, 1, 36):
        is_set = np.random.default_rng(start).random(64) < 0.5
        word = np.packbits(is_set, bitorder="little").view("<u8")[0]
        expected = y.copy()
        chosen = np.where(is_set, dtype(0.1), dtype(-3))
        expected[start : start + 64] = expected[start : start + 64] + chosen if add else chosen
        chosen_of(y, start, word, dtype(0.1), dtype(-3), add)
        assert (y == expected).all()


@pytest.mark.parametrize("mask", [1, 7, 127, 128])
def test_bit_k_says_whether_integer_k_has_a_bit_of_the_mask(mask):
    codes = np.random.default_rng(mask).integers(0, 256, 100).astype(np.uint8)
    codes[::3] = 0
    for start in (0, 1, 36):
        expected = sum(1 << k for k in range(64) if int(codes[start + k]) & mask)
        assert common_bits_of(codes, start, np.uint8(mask)) == expected


@kernel
def with_word(a, start, word):
    put_word(a, start, word)


@pytest.mark.parametrize("start", [0, 1, 5, 8, 13])
def test_a_word_is_written_lowest_byte_first_from_any_place_on(start):
    a = np.full(21, 0xAA, np.uint8)
    with_word(a, start, np.uint64(0x0123456789ABCDEF))
    assert a[start : start + 8].tobytes() == bytes.fromhex("efcdab8967452301")
    assert (np.delete(a, slice(start, start + 8)) == 0xAA).all()


def test_bits_of_a_word_are_counted_and_found():
    rng = np.random.default_rng(0)
    words = np.concatenate([1 << np.arange(64, dtype=np.uint64), rng.integers(0, 2**64, 1000, np.uint64), [0]])
    words = words.astype(np.uint64)
    ones, trailing, leading = np.empty((3, words.size), np.int64)
    ones_and_zeros_of(words, ones, trailing, leading)
    texts = [f"{int(word):064b}" for word in words]
    assert ones.tolist() == [text.count("1") for text in texts]
    assert trailing.tolist() == [64 - len(text.rstrip("0")) for text in texts]
    assert leading.tolist() == [64 - len(text.lstrip("0")) for text in texts]


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 7, 8, 9, 13, 64, 1000, 1024, 1025, 5000])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1023, 1025, 4999])
def test_onebit_bits_are_packbits_for_every_alignment(n, group):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    groups = -(-n // group)
    means, bits = np.zeros(2 * groups, np.float32), np.zeros((n + 7) // 8 + 4, np.uint8)
    bits[-4:] = 0xCC
    assert onebit.encode(x, x[:0], group, 0, *KEY, 2, means, bits[:-4])
    assert (bits[:-4] == np.packbits(x >= 0, bitorder="little")).all()
    assert (bits[-4:] == 0xCC).all()
    out = np.full(n + 2, 9.0, np.float32)
    onebit.decode(means, bits[:-4], group, 2, UNIT, out[1:-1], False)
    which = np.arange(n) // group
    assert (out[1:-1] == np.where(x >= 0, means[2 * which], means[2 * which + 1])).all()
    assert out[0] == out[-1] == 9
    onebit.decode(means, bits[:-4], group, 2, np.float32(2), out[1:-1], True)
    assert np.allclose(out[1:-1], 3 * np.where(x >= 0, means[2 * which], means[2 * which + 1]), rtol=1e-6)


@pytest.mark.parametrize("bits", range(2, 8))
def test_qsgd_codes_survive_packing_and_fill_their_bytes(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 8 * 41).astype(np.uint8)
    packed = np.zeros(41 * bits, np.uint8)
    qsgd.pack(codes, bits, packed)
    again = np.zeros_like(codes)
    qsgd.unpack(packed, bits, again)
    assert (again == codes).all()
    # little-endian bit stream, as documented by the golden files
    stream = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    assert (np.packbits(stream, axis=1, bitorder="little")[:, 0] == codes).all()


# -- checksum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9, 10, 100])
def test_checksum_of_pure_python(n):
    """The same sum in Python integers: the bytes on the wire must not depend on a compiler."""
    words = np.random.default_rng(n).integers(0, 2**64, n, dtype=np.uint64)
    prime, full = 0x9FB21C651E98DF25, 2**64 - 1

    def step(chain: int, word: int) -> int:
        mixed = chain ^ word
        return (mixed ^ (mixed >> 32)) * prime & full

    start = 0
    words[4] &= np.uint64(0xFFFFFFFF)
    for word in words[:5].tolist():
        start = step(start, word)
    lanes = [start, 2, 3, 4]
    rest = words[5:].tolist()
    whole = len(rest) // 4 * 4
    for i, word in enumerate(rest):
        lane = i % 4 if i < whole else 0
        lanes[lane] = step(lanes[lane], word)
    h = len(rest)
    for lane in lanes:
        h = (h ^ lane ^ (lane >> 32)) * prime & full
        h ^= h >> 29
    words[4] |= np.uint64(0x1234567800000000)
    assert checksum(words, 4) == h >> 32


def test_checksum_tells_lengths_apart():
    sums = {int(checksum(np.zeros(n, np.uint64), 4)) for n in range(5, 200)}
    assert len(sums) == 195


# -- norms and randomness --------------------------------------------------------------------------------------------


def test_bucket_norm_is_the_norm_and_not_below_a_magnitude():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 512):
        for scale in (1e-42, 1e-30, 1.0, 1e30):
            y = (scale * rng.standard_normal(n)).astype(np.float32)
            assert common.bucket_norm(y, True) == np.abs(y).max()
            assert common.bucket_norm(y, False) == pytest.approx(
                np.linalg.norm(y.astype(np.float64)), rel=1e-6, abs=2e-45
            )
            assert common.bucket_norm(y, False) >= np.abs(y).max()
    for bad in (np.inf, -np.inf, np.nan):
        for is_max in (True, False):
            assert not np.isfinite(common.bucket_norm(np.array([1, bad, 2], np.float32), is_max))


def uniforms(n: int, key: tuple[np.uint32, np.uint32]) -> np.ndarray:
    return np.array([common.uniform(np.uint32(i), *key) for i in range(n)])


@pytest.mark.parametrize("key", [(0, 0), (1, 0), (0, 1), (0xFFFFFFFF, 0xFFFFFFFF), (0x12345678, 0x9ABCDEF0)])
def test_uniform_is_uniform(key):
    """Within 6 standard deviations: about two false alarms in a billion, and the draws never change."""
    n = 65536
    u = uniforms(n, (np.uint32(key[0]), np.uint32(key[1])))
    assert u.min() >= 0
    assert u.max() < 1
    assert (u * 2**24 == np.floor(u * 2**24)).all()
    assert abs(u.mean() - 0.5) < 6 / np.sqrt(12 * n)
    assert abs((u**2).mean() - 1 / 3) < 6 * np.sqrt(4 / 45 / n)
    for bins in (16, 256):
        counts = np.bincount((u * bins).astype(int), minlength=bins)
        chi2 = ((counts - n / bins) ** 2).sum() * bins / n
        assert abs(chi2 - (bins - 1)) < 6 * np.sqrt(2 * (bins - 1))
    for lag in (1, 2, 7, 8, 64, 512):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 6 / np.sqrt(n - lag)
    for bit in range(24):
        share = ((u * 2**24).astype(np.int64) >> bit & 1).mean()
        assert abs(share - 0.5) < 3 / np.sqrt(n)


def test_draws_of_neighbouring_keys_are_independent():
    """Of keys as they are used; the two words of one are a digest, so neighbours share no bits."""
    n = 16384
    keys = [
        Key(),
        Key(seed=1),
        Key(step=1),
        Key(step=2),
        Key(rank=1),
        Key(rank=2),
        Key(hop=1),
        Key(chunk=1),
        Key(name="w"),
    ]
    draws = [uniforms(n, key.words()) for key in keys]
    for (i, a), (j, b) in itertools.combinations(enumerate(draws), 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(n), (keys[i], keys[j])


@pytest.mark.parametrize(
    ("count", "numel"), [(1, 1), (1, 1000), (7, 7), (7, 1000), (64, 65), (1000, 1001), (16, 2**31)]
)
def test_draw_takes_one_of_each_stratum(count, numel):
    for j in range(count):
        i = common.draw(j, count, numel, *KEY)
        assert j * numel // count <= i < (j + 1) * numel // count


def test_draw_is_even_within_a_stratum():
    n = 32000
    hits = np.bincount([common.draw(j, n, n * 16, *KEY) % 16 for j in range(n)], minlength=16)
    chi2 = ((hits - n / 16) ** 2).sum() * 16 / n
    assert chi2 < 15 + 6 * np.sqrt(30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_correct_adds_and_reports(dtype):
    x, gradient = np.array([1, 2, 3], dtype), np.array([0.5, -2, 0], dtype)
    assert common.correct(x, gradient) == 0
    assert x.tolist() == [1.5, 0, 3]
    assert common.correct(x, gradient[:0]) == 0
    assert x.tolist() == [1.5, 0, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3.5e38, 1e300])
def test_correct_writes_nothing_that_is_not_finite(dtype, bad):
    with np.errstate(over="ignore"):
        gradient = np.array([1, bad, 1] * 30, dtype)
    x = np.full(90, 0.25, dtype)
    assert common.correct(x, gradient) != 0
    assert x.tolist() == [1.25, 0.25, 1.25] * 30
    assert common.correct(gradient, gradient[:0]) != 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_residual_that_is_taken_back_is_off_by_rounding_only(dtype):
    rng = np.random.default_rng(0)
    before = (rng.standard_normal(10000) * 10.0 ** rng.integers(-6, 7, 10000)).astype(dtype)
    gradient = (rng.standard_normal(10000) * 10.0 ** rng.integers(-6, 7, 10000)).astype(dtype)
    gradient[::7] = np.nan
    gradient[3::7] = np.inf
    x = before.copy()
    common.correct(x, gradient)
    common.take_back(x, gradient)
    assert np.isfinite(x).all()
    is_bad = ~np.isfinite(gradient)
    assert (x[is_bad] == before[is_bad]).all()
    largest = np.maximum(np.abs(before), np.abs(gradient))[~is_bad]
    bound = 4 * np.finfo(dtype).eps
    assert (np.abs(x - before)[~is_bad] <= bound * largest).all()
    # noise is not kept: what is left is as good as exact, or nothing
    with np.errstate(invalid="ignore"):
        is_noise = ~is_bad & (np.abs(x) < np.abs(gradient) * np.finfo(dtype).eps)
    assert (x[is_noise] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_made_up_where_a_gradient_has_swallowed_the_residual(dtype):
    x = np.full(100, 1.0, dtype)
    gradient = np.geomspace(1e18, 1e37, 100).astype(dtype)
    common.correct(x, gradient)
    common.take_back(x, gradient)
    assert (x == 0).all()


def test_a_residual_beside_a_sum_that_overflows_becomes_0_or_what_it_was():
    before = np.array([3e38, -3e38, 1.0, 3e38, 0.5], np.float32)
    gradient = np.array([3e38, -3e38, 3e38, -3e38, np.inf], np.float32)
    x = before.copy()
    common.correct(x, gradient)
    assert np.isfinite(x).all()
    common.take_back(x, gradient)
    # the fourth sum was none that overflows
    assert x.tolist() == [0, 0, 0, before[3], 0.5]


def test_margin_covers_what_is_asked_for():
    for k, population, draws in ((1, 100, 100), (10, 10**6, 8192), (5000, 10**6, 8192)):
        assert common.with_margin(k, population, draws) > k * draws / population
