"""Codes against bit strings typed from their definitions; a string's first character is the stream's lowest bit."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress import QSGD, Adaptive, Key, Percentile, Threshold, TopK, wire
from hvd_compress.errors import WireError
from hvd_compress.kernels import bits as bit_kernels
from hvd_compress.kernels import elias as elias_kernels
from hvd_compress.kernels import golomb as golomb_kernels
from tests.streams_of_bits import elias, golomb

many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def low_first(v: int, n: int) -> str:
    return "".join(str(v >> i & 1) for i in range(n))


def rice(gap: int, k: int) -> str:
    """Rice 1971: the quotient by 2**k in unary, then the k bits of the remainder."""
    return "0" * (gap >> k) + "1" + low_first(gap, k)


def gamma(v: int) -> str:
    """Elias 1975: floor(log2 v) zeros, then v in binary, here the leading one and the other bits from the lowest on."""
    n = int(math.log2(v))
    return "0" * n + "1" + low_first(v, n)


def omega(v: int) -> str:
    """Elias 1975, the recursive code: v in binary, then a zero; before v the same for the number of its bits - 1."""
    code = "0"
    while v > 1:
        n = int(math.log2(v))
        code = "1" + low_first(v, n) + code
        v = n
    return code


def words_of(stream: str) -> np.ndarray:
    padded = stream + "0" * (-len(stream) % 64)
    return np.array([int(padded[i : i + 64][::-1], 2) for i in range(0, len(padded), 64)], np.uint64)


def string_of(words: np.ndarray) -> str:
    return "".join(low_first(int(w), 64) for w in words)


# -- Golomb-Rice -----------------------------------------------------------------------------------------------------


def best_rice_parameter(count: int, size: int) -> int:
    """The k of the least expected length for geometric gaps, P(g) = p (1 - p)**g, p = count / size."""
    p = count / size
    # E[g >> k] is the sum over j of P(g >= j * 2**k)
    expected = [1 + k + (r := (1 - p) ** (2**k)) / (1 - r) for k in range(32)]
    return int(np.argmin(expected))


@pytest.mark.parametrize("size", [1, 2, 7, 100, 4096, 32768, 2**20, 2**32 - 1])
def test_the_rice_parameter_is_the_best_for_geometric_gaps(size):
    for count in {1, 2, 3, 5, size // 200, size // 64, size // 10, size // 3, size // 2, size - 1, size}:
        if not 1 <= count < size:
            continue
        p = count / size
        length = lambda k: 1 + k + (1 - p) ** (2**k) / (1 - (1 - p) ** (2**k))  # noqa: E731, B023
        assert length(golomb_kernels.rice_parameter(count, size)) <= length(best_rice_parameter(count, size)) + 0.02
    assert golomb_kernels.rice_parameter(size, size) == 0


def sample_entries(counts: list[int], group: int, numel: int, flag_bits: int, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(len(counts))
    parts = []
    for g, count in enumerate(counts):
        size = min(group, numel - g * group)
        index = np.sort(rng.permutation(size)[:count])
        parts.append(index << flag_bits | rng.integers(0, 1 << flag_bits, count))
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(dtype)


def rice_string(counts: list[int], entries: np.ndarray, group: int, numel: int, flag_bits: int) -> str:
    code, at = "", 0
    for g, count in enumerate(counts):
        size = min(group, numel - g * group)
        previous = -1
        for entry in entries[at : at + count].tolist():
            k = golomb_kernels.rice_parameter(count, size)
            code += rice((entry >> flag_bits) - previous - 1, k) + low_first(entry, flag_bits)
            previous = entry >> flag_bits
        at += count
    return code


GOLOMB = [
    ([3], 32768, 30000, 1, np.uint16),
    ([100, 0, 7], 1000, 2500, 1, np.uint16),
    ([655, 1], 65536, 65537, 0, np.uint16),
    ([64] * 8, 4096, 32768, 1, np.uint16),
    ([900], 1000, 1000, 1, np.uint16),
    ([5, 700], 40000, 80000, 1, np.uint32),
]


@pytest.mark.parametrize("case", GOLOMB, ids=lambda c: str(c[:2]))
def test_golomb_streams_are_those_of_the_definition(case):
    counts, group, numel, flag_bits, dtype = case
    entries = sample_entries(counts, group, numel, flag_bits, dtype)
    table = np.array(counts, np.uint32)
    words = golomb.encode(table, entries, group, numel, flag_bits)
    expected = rice_string(counts, entries, group, numel, flag_bits)
    if words is None:
        assert -(-len(expected) // 64) >= -(-entries.nbytes // 8)
        return
    assert words.tolist() == words_of(expected).tolist()
    decoded = golomb.decode(words, table, entries.size, dtype, group, numel, flag_bits)
    assert decoded.dtype == dtype
    assert decoded.tolist() == entries.tolist()


def test_golomb_of_nothing_and_of_what_would_grow_is_none():
    assert golomb.encode(np.zeros(1, np.uint32), np.empty(0, np.uint16), 1000, 1000, 1) is None
    # 17 bits for an index of 16
    assert golomb.encode(np.ones(1, np.uint32), np.array([60000], np.uint16), 32768, 32768, 1) is None


def test_golomb_never_takes_more_than_two_bits_an_element():
    entries = np.arange(20000, dtype=np.uint16) << 1
    words = golomb.encode(np.array([20000], np.uint32), entries, 20000, 20000, 1)
    assert words is not None
    assert words.nbytes <= 20000 / 4 + 8


@many
@given(data=st.data())
def test_golomb_round_trip(data):
    group = data.draw(st.sampled_from([1, 2, 63, 64, 1000, 32768]))
    numel = data.draw(st.integers(1, 4 * group))
    flag_bits = data.draw(st.integers(0, 1))
    places = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=150)))
    flags = data.draw(st.lists(st.integers(0, 2**flag_bits - 1), min_size=len(places), max_size=len(places)))
    counts = np.bincount(np.array(places, np.int64) // group, minlength=-(-numel // group)).astype(np.uint32)
    entries = np.array([(p % group) << flag_bits | f for p, f in zip(places, flags, strict=True)], np.uint16)
    words = words_of(rice_string(counts.tolist(), entries, group, numel, flag_bits))
    decoded = golomb.decode(words, counts, entries.size, np.uint16, group, numel, flag_bits)
    assert decoded.tolist() == entries.tolist()
    coded = golomb.encode(counts, entries, group, numel, flag_bits)
    assert coded is None or coded.tolist() == words.tolist()
    assert coded is not None or 8 * words.size >= -(-entries.nbytes // 8) * 8


@many
@given(data=st.data())
def test_any_golomb_stream_raises_or_gives_ascending_indices_within_their_groups(data):
    flag_bits = data.draw(st.integers(0, 1))
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32]))
    group = data.draw(st.sampled_from([1, 64, 1000, 32768, 65536 >> flag_bits]))
    numel = data.draw(st.integers(1, 3 * group))
    words = np.array(data.draw(st.lists(st.integers(0, 2**64 - 1) | st.just(0), max_size=6)), np.uint64)
    groups = -(-numel // group)
    counts = data.draw(st.lists(st.integers(0, 40) | st.integers(0, 2**32 - 1), min_size=groups, max_size=groups))
    # decoders make room for as many entries as a tensor has elements, at most
    count = data.draw(st.just(min(sum(counts), 2**24)) | st.integers(0, 2**24))
    table = np.array(counts, np.uint32)
    try:
        entries = golomb.decode(words, table, count, dtype, group, numel, flag_bits)
    except WireError:
        return
    at = 0
    for g, n in enumerate(counts):
        index = entries[at : at + n].astype(np.int64) >> flag_bits
        assert (np.diff(index) > 0).all()
        assert (index < min(group, numel - g * group)).all()
        at += n
    assert at == count


@pytest.mark.parametrize("case", GOLOMB[1:2] + GOLOMB[3:4], ids=str)
def test_golomb_streams_end_with_the_last_index(case):
    counts, group, numel, flag_bits, dtype = case
    entries = sample_entries(counts, group, numel, flag_bits, dtype)
    table = np.array(counts, np.uint32)
    words = golomb.encode(table, entries, group, numel, flag_bits)
    longer = np.append(words, np.uint64(0))
    padded = words.copy()
    padded[-1] |= np.uint64(2**63)
    for bad in (longer, padded, words[:-1], words[:0]):
        with pytest.raises(WireError):
            golomb.decode(bad, table, entries.size, dtype, group, numel, flag_bits)


@pytest.mark.parametrize(
    "compressor", [Adaptive(coding="golomb"), Threshold(1.0, coding="golomb"), TopK(0.01, coding="golomb"),
                   Percentile(99, coding="golomb"), QSGD(bits=4, coding="elias")], ids=lambda c: c.id
)  # fmt: skip
def test_a_forged_number_of_entries_allocates_nothing(compressor):
    payload = compressor.encode(np.random.default_rng(0).standard_normal(4096).astype(np.float32) / 2)
    header, _ = wire.open_payload(payload)
    assert header.codec == compressor.coded_codec
    for entries in (2**32 - 1, 64 * header.nbytes + 1):
        wire.seal(
            payload, codec=header.codec, shape=header.shape, group=header.group, parameter=header.parameter,
            entries=entries, float64=False, nonfinite=False,
        )  # fmt: skip
        tracemalloc.start()
        with pytest.raises(WireError):
            compressor.decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


# -- Elias -----------------------------------------------------------------------------------------------------------

NUMBERS = [*range(1, 300), 4095, 4096, 2**15 - 1, 2**15, 2**31 - 1]


@pytest.mark.parametrize("name", ["gamma", "omega"])
def test_elias_codes_are_those_of_the_definition(name):
    write, oracle = {"gamma": (elias_kernels.gamma, gamma), "omega": (elias_kernels.omega, omega)}[name]
    read = {"gamma": elias_kernels.read_gamma, "omega": elias_kernels.read_omega}[name]
    for v in NUMBERS:
        code, length = write(v)
        assert low_first(int(code), length) == oracle(v), v
        for at in (0, 1, 63):
            assert read(words_of("0" * at + oracle(v) + "1" * 9), at) == (v, at + length)
    for v in (2**33, 2**40 - 1):
        assert read(words_of("000" + oracle(v)), 3) == (v, 3 + len(oracle(v)))


def test_known_codes():
    """Of Elias' paper, as its bits are ordered: 17 in gamma and omega."""
    assert [gamma(v) for v in (1, 2, 3, 4)] == ["1", "010", "011", "00100"]
    assert [omega(v) for v in (1, 2, 3, 4, 8)] == ["0", "100", "110", "101000", "1110000"]


@pytest.mark.parametrize("words", [[], [0], [2**64 - 1], [2**63], [0, 0, 0]])
def test_numbers_that_are_not_there_are_0(words):
    stream = np.array(words, np.uint64)
    assert elias_kernels.read_omega(stream, 0)[0] in (0, 1)
    for at in (0, 64 * stream.size, 64 * stream.size + 1000):
        if words not in ([2**64 - 1], [2**63]):
            assert elias_kernels.read_gamma(stream, at)[0] == 0


def pack(codes: list[int], bits: int) -> np.ndarray:
    """Eight codes in `bits` bytes, the first in the lowest bits."""
    stream = "".join(low_first(c, bits) for c in codes)
    return np.packbits([int(b) for b in stream + "0" * (-len(codes) % 8 * bits)], bitorder="little")


def sparse_string(levels: list[int], most: int, code) -> str:
    stream, previous = "", -1
    for place, level in enumerate(levels):
        if level:
            stream += code(place - previous) + str(int(level < 0)) + (gamma(abs(level)) if most > 1 else "")
            previous = place
    return stream


def dense_string(levels: list[int]) -> str:
    return "".join(gamma(abs(v) + 1) + (str(int(v < 0)) if v else "") for v in levels)


def string_for(form: int, levels: list[int], most: int) -> str:
    if form == elias_kernels.DENSE:
        return dense_string(levels)
    return sparse_string(levels, most, gamma if form == elias_kernels.SPARSE_GAMMA else omega)


def random_levels(n: int, bits: int, density: float, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    most = max(1, 2 ** (bits - 1) - 1)
    sizes = np.minimum(rng.geometric(0.4, n), most) * rng.choice([-1, 1], n)
    return np.where(rng.random(n) < density, sizes, 0).tolist()


def values_of(levels: list[int], norms: np.ndarray, bucket: int, most: int) -> np.ndarray:
    steps = (norms.astype(np.float64) / most).astype(np.float32)
    return np.array(levels, np.float32) * np.repeat(steps, bucket)[: len(levels)]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("density", [0.0, 0.002, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n", [70, 4096, 10_001])
def test_streams_of_levels_are_those_of_the_definition(bits, density, n):
    levels = random_levels(n, bits, density)
    most = 2 ** (bits - 1) - 1
    # zeros keep the sign of what was rounded to them
    codes = [abs(v) | (1 << bits - 1) * (v < 0 or (v == 0 and i % 3 == 0)) for i, v in enumerate(levels)]
    stream = elias.encode_levels(pack(codes, bits), bits, n)
    if stream is None:
        shortest = min(len(string_for(form, levels, most)) for form in (1, 2, 3))
        assert shortest > 0.9 * n * bits - 128
        return
    words, form, nonzeros = stream
    assert nonzeros == np.count_nonzero(levels)
    assert string_of(words) == string_of(words_of(string_for(form, levels, most)))

    norms = np.linspace(0.5, 2, -(-n // 64)).astype(np.float32)
    out = np.ones(n, np.float32)
    elias.decode(stream, norms, 64, bits, np.float32(1), out)
    assert (out == 1 + values_of(levels, norms, 64, most)).all()


def test_the_form_follows_from_the_share_of_zeros():
    forms = []
    for density in (0.001, 0.1, 0.9):
        levels = random_levels(50_000, 6, density)
        codes = [abs(v) | 32 * (v < 0) for v in levels]
        form = elias.encode_levels(pack(codes, 6), 6, 50_000)[1]
        forms.append(form)
        sizes = {f: len(string_for(f, levels, 31)) for f in (1, 2, 3)}
        assert sizes[form] <= 1.05 * min(sizes.values())
    assert forms == [elias_kernels.SPARSE_OMEGA, elias_kernels.SPARSE_GAMMA, elias_kernels.DENSE]


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bucket", [8, 64, 2**20])
def test_ternary_streams_are_those_of_the_definition(norm, bucket):
    n = 30_000
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    compressor = QSGD(bits=1, bucket_numel=bucket, norm=norm, coding="elias")
    room = np.full(compressor.capacity(n, bucket), 255, np.uint8)
    header, body = wire.open_payload(room[: compressor.encode_into(x, None, room, bucket, Key())])
    norms, form, nonzeros = body.take(-(-n // bucket), np.float32), header.parameter >> 8, header.entries
    words = body.rest()
    assert words.size <= -(-2 * n // 64) + 2
    out = np.zeros(n, np.float32)
    elias.decode((words, form, nonzeros), norms, bucket, 1, np.float32(1), out)
    levels = np.sign(out).astype(int).tolist()
    assert (np.abs(out)[out != 0] == np.repeat(norms, bucket)[:n][out != 0]).all()
    assert (np.sign(out) * np.sign(x) >= 0).all()
    assert nonzeros == np.count_nonzero(levels)
    assert form == (elias_kernels.SPARSE_OMEGA if (norm, bucket) == ("l2", 2**20) else elias_kernels.SPARSE_GAMMA)
    assert string_of(words) == string_of(words_of(string_for(form, levels, 1)))


@pytest.mark.parametrize("code", [gamma, omega])
def test_a_gap_and_its_sign_take_at_most_two_bits_an_element(code):
    """What the room for a ternary stream relies on."""
    assert all(len(code(g)) + 1 <= 2 * g for g in range(1, 5000))


@many
@given(data=st.data(), form=st.integers(0, 5), bits=st.integers(1, 8), bucket=st.sampled_from([8, 64, 2**30]))
def test_any_elias_stream_raises_or_stays_inside(data, form, bits, bucket):
    words = np.array(data.draw(st.lists(st.integers(0, 2**64 - 1) | st.just(0), max_size=6)), np.uint64)
    n = data.draw(st.integers(1, 200))
    nonzeros = data.draw(st.integers(0, n) | st.integers(0, 2**32))
    guarded = np.full(n + 128, 7.5, np.float32)
    try:
        norms = np.ones(-(-n // bucket), np.float32)
        elias.decode((words, form, nonzeros), norms, bucket, bits, np.float32(1), guarded[64:-64])
    except WireError:
        pass
    else:
        assert np.count_nonzero(guarded[64:-64] != 7.5) == nonzeros
    assert (guarded[:64] == 7.5).all()
    assert (guarded[-64:] == 7.5).all()


@many
@given(data=st.data(), form=st.integers(1, 3), bits=st.integers(1, 8))
def test_elias_streams_end_with_the_last_level(data, form, bits):
    """Every stream of the definition decodes; with another number of levels, a bit or a word too much it does not."""
    if form == elias_kernels.DENSE and bits == 1:
        bits = 2
    most = max(1, 2 ** (bits - 1) - 1)
    levels = data.draw(st.lists(st.integers(-most, most) | st.just(0), min_size=1, max_size=150))
    nonzeros, n = int(np.count_nonzero(levels)), len(levels)
    words = words_of(string_for(form, levels, most))
    norms = np.ones(-(-n // 8), np.float32)

    def decode(words, nonzeros):
        out = np.zeros(n, np.float32)
        elias.decode((words, form, nonzeros), norms, 8, bits, np.float32(1), out)
        return out

    assert (decode(words, nonzeros) == values_of(levels, norms, 8, most)).all()
    bad = [(np.append(words, np.uint64(0)), nonzeros)]
    if nonzeros:
        bad += [(words[:-1], nonzeros)]
    if form != elias_kernels.SPARSE_OMEGA:
        # the omega code of 1 with its sign looks like padding: there the header's number alone says how many there are
        bad += [(words, nonzeros + 1)] + [(words, nonzeros - 1)] * (nonzeros > 0)
    for stream, number in bad:
        with pytest.raises(WireError):
            decode(stream, number)


def test_a_level_out_of_range_is_refused():
    out = np.zeros(8, np.float32)
    for form, stream in ((1, gamma(2) + "0" + gamma(4)), (3, gamma(5) + "0" + 7 * gamma(1))):
        with pytest.raises(WireError):
            elias.decode((words_of(stream), form, 1), np.ones(1, np.float32), 8, 3, np.float32(1), out)


# -- bits ------------------------------------------------------------------------------------------------------------


def test_codes_of_any_length_follow_one_another():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 500).tolist()
    codes = [int(rng.integers(0, 2**64, dtype=np.uint64)) >> (64 - n) for n in lengths]
    words = np.zeros(sum(lengths) // 64 + 2, np.uint64)
    at = 0
    for code, length in zip(codes, lengths, strict=True):
        at = bit_kernels.put(words, at, np.uint64(code), length)
    assert string_of(words)[:at] == "".join(low_first(c, n) for c, n in zip(codes, lengths, strict=True))
    at = 0
    for code, length in zip(codes, lengths, strict=True):
        assert int(bit_kernels.peek(words, at)) & (2**length - 1) == code
        at += length
    assert bit_kernels.peek(words, 64 * words.size) == 0
