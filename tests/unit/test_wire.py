from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest

import hvd_compress
from hvd_compress import QSGD, Adaptive, Key, NoCompression, OneBit, Percentile, Threshold, TopK, wire
from hvd_compress.compressors import COMPRESSORS
from hvd_compress.errors import HvdCompressError, WireError
from tests.arrays import make
from tests.contract.rows import ROWS
from tests.forge import field, forge, resized, sealed

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
KEY = Key(name="w")
GUARD = np.float32(123.5)
CODED = (130, 131, 132, 133, 138)


def payload_of(row, shape=(2, 150), dtype="float32"):
    return row.compressor.encode(make("normal", shape, dtype), key=KEY)


def refuses(compressor, payload, numel):
    """Decoding raises WireError, or stays within `out`: True for the error. Guards around `out` must survive."""
    guarded = np.full(numel + 128, GUARD)
    out = guarded[64 : 64 + numel]
    for add in (False, True):
        try:
            compressor.decode_into(payload, out, add=add)
            refused = False
        except WireError:
            refused = True
        assert (guarded[:64] == GUARD).all(), "written before the array"
        assert (guarded[64 + numel :] == GUARD).all(), "written behind the array"
    return refused


def assert_refused(compressor, payload, numel, match=None):
    assert refuses(compressor, payload, numel)
    with pytest.raises(WireError, match=match):
        compressor.decode(payload)
    with pytest.raises(WireError, match=match):
        hvd_compress.decode(payload)


# -- the layout ------------------------------------------------------------------------------------------------------


def test_header_layout_is_as_documented():
    x = make("normal", (3, 5, 7), "float64")
    payload = Threshold(tau=0.5).encode(x)
    head = struct.unpack("<4sBBBBQQIIIIQQQ", payload[:64].tobytes())
    sent = int((np.abs(x) > 0.5).sum())
    assert head[:5] == (b"hvdc", wire.VERSION, 2, 2, 3)
    assert head[5:7] == (105, payload.size)
    assert head[7:10] == (32768, struct.unpack("<I", struct.pack("<f", 0.5))[0], sent)
    assert head[11:] == (3, 5, 7)
    assert payload.size == 64 + 8 + (2 * sent + 7) // 8 * 8
    assert payload[64:68].view("<u4")[0] == sent
    assert wire.VERSION == 1


def test_flat_arrays_need_no_dimensions():
    assert NoCompression().encode(np.ones(2, np.float32)).size == 40 + 8
    assert NoCompression().encode(np.ones((2, 1), np.float32)).size == 40 + 16 + 8
    assert NoCompression().encode(np.float32(1)).size == 40 + 8


def test_wire_error_is_a_value_error():
    assert issubclass(WireError, HvdCompressError)
    assert issubclass(WireError, ValueError)


# -- damage ----------------------------------------------------------------------------------------------------------


@every_row
def test_every_flipped_byte_is_refused(row):
    x = make("normal", (2, 75), "float32")
    payload = row.compressor.encode(x, key=KEY)
    out = np.zeros(x.size, np.float32)
    for at in range(payload.size):
        for flip in (0x01, 0x80, 0xFF):
            damaged = payload.copy()
            damaged[at] ^= flip
            with pytest.raises(WireError):
                row.compressor.decode_into(damaged, out)


@every_row
def test_every_truncation_is_refused(row):
    payload = payload_of(row)
    for size in range(payload.size):
        with pytest.raises(WireError):
            row.compressor.decode(payload[:size])
        with pytest.raises(WireError):
            hvd_compress.decode(payload[:size].tobytes())


@every_row
def test_bytes_behind_a_payload_are_left_alone(row):
    payload = payload_of(row)
    longer = np.concatenate([payload, np.full(24, 0xAA, np.uint8)])
    assert row.compressor.decode(longer).tobytes() == row.compressor.decode(payload).tobytes()


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"hvdc",
        bytes(40),
        bytes(4096),
        b"\xff" * 4096,
        b"hvdc" * 1024,
        b"\x93NUMPY\x01\x00" + bytes(200),
        b"hvdc\x01" + bytes(100),
        b"hvdc\x01\x01" + b"\xff" * 200,
    ],
    ids=["nothing", "magic", "zeros-40", "zeros", "ones", "magics", "npy", "zero-header", "ones-header"],
)
def test_foreign_bytes_are_refused(foreign):
    with pytest.raises(WireError):
        hvd_compress.decode(foreign)
    for row in ROWS:
        with pytest.raises(WireError):
            row.compressor.decode(foreign)


@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.uint16, np.int64])
def test_arrays_of_another_type_are_refused(dtype):
    with pytest.raises(WireError, match="uint8"):
        hvd_compress.decode(np.zeros(100, dtype))


@every_row
def test_payload_of_another_codec_is_refused(row):
    payload = payload_of(row)
    for other in {type(r.compressor): r.compressor for r in ROWS}.values():
        if other.codec != row.compressor.codec:
            with pytest.raises(WireError, match=f"codec {field(payload, 'codec')}"):
                other.decode(payload)


@every_row
def test_payload_of_another_version_or_codec_number_is_refused(row):
    payload = payload_of(row)
    for version in (0, 2, 255):
        assert_refused(row.compressor, forge(payload, version=version), 300, f"version {version}")
    for codec in (0, 9, 255):
        with pytest.raises(WireError, match=f"codec {codec}"):
            hvd_compress.decode(forge(payload, codec=codec))


@every_row
def test_another_number_of_elements_is_refused(row):
    payload = payload_of(row)
    for numel in (0, 299, 301):
        with pytest.raises(WireError, match=f"300 elements, expected {numel}"):
            row.compressor.decode_into(payload, np.zeros(numel, np.float32))


def test_checksum_differs_for_every_changed_bit_and_for_swapped_words():
    payload = OneBit().encode(make("normal", (999,), "float32"))
    seen = {wire._actual_checksum(payload)}
    for bit in range(8 * payload.size):
        if bit // 8 in range(36, 40):
            continue
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        seen.add(wire._actual_checksum(damaged))
    assert len(seen) == 8 * (payload.size - 4) + 1
    words = payload.view(np.uint64)
    for a in range(len(words) - 1):
        for b in range(a + 1, len(words)):
            flipped = words.copy()
            flipped[[a, b]] ^= np.uint64(2**63)
            assert wire._actual_checksum(flipped.view(np.uint8)) != wire._actual_checksum(payload), "two signs flipped"
    for a in range(len(words) - 1):
        for b in range(a + 1, min(a + 9, len(words))):
            swapped = words.copy()
            swapped[[a, b]] = swapped[[b, a]]
            if words[a] != words[b]:
                with pytest.raises(WireError):
                    wire.open_payload(swapped.view(np.uint8))


# -- forged headers with a right checksum ----------------------------------------------------------------------------


def test_the_forger_makes_right_checksums():
    payload = OneBit().encode(make("normal", (999,), "float32"))
    assert forge(payload).tobytes() == payload.tobytes()


@every_row
def test_unknown_flags_are_refused(row):
    for flags in (0x10, 0x40, 0x80, 0xF8, 0xFC):
        assert_refused(row.compressor, forge(payload_of(row), flags=flags), 300, "flags")


@every_row
@pytest.mark.parametrize("flags", [4, 4 | 2])
def test_a_gradient_that_is_said_to_be_absent_has_no_body(row, flags):
    assert_refused(row.compressor, forge(payload_of(row), flags=flags), 300, "too long")
    absent = resized(payload_of(row, (300,)), 40, flags=flags)
    out = np.full(300, GUARD)
    assert row.compressor.decode_into(absent, out, add=True)
    assert (out == GUARD).all()
    assert row.compressor.decode_into(absent, out)
    assert not out.any()


@every_row
def test_a_compressor_says_absent_as_documented(row):
    payload = np.full(row.compressor.capacity(300, 150), 0xAA, np.uint8)
    assert row.compressor.say_absent(payload, 300, 150) == 40
    assert (field(payload, "flags"), field(payload, "numel"), field(payload, "nbytes")) == (4, 300, 40)
    assert wire.open_payload(payload)[0].absent
    assert (payload[40:] == 0xAA).all()


@every_row
def test_forged_number_of_elements(row):
    payload = row.compressor.encode(make("normal", (300,), "float32"), key=KEY)
    for numel in (0, 1, 150, 299, 301, 308, 309, 2**16, 2**20, 2**31, 2**32 + 300, 2**40, 2**63, 2**64 - 1):
        forged = forge(payload, numel=numel)
        assert refuses(row.compressor, forged, 300), numel
        # an array of that size: the sections no longer fit, or hold fewer elements, which is no harm
        if numel <= 2**20:
            refuses(row.compressor, forged, numel)
        if numel > max(2**16, field(payload, "group")):
            with pytest.raises(WireError):
                hvd_compress.decode(forged)


@every_row
def test_forged_dimensions(row):
    payload = payload_of(row)
    for ndim in (0, 1, 3, 32, 33, 63, 64, 65, 255):
        assert refuses(row.compressor, forge(payload, ndim=ndim), 300) or ndim == 1
        with pytest.raises(WireError):
            hvd_compress.decode(forge(payload, ndim=ndim))
    for first in (0, 1, 3, 299, 2**32, 2**63, 2**64 - 1):
        assert_refused(row.compressor, forge(payload, {40: ("<u8", first)}), 300, "makes no sense")


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("ndim", [33, 64, 65, 200, 255])
def test_many_dimensions_of_one_or_no_element(numel, ndim):
    payload = NoCompression().encode(np.ones(numel, np.float32))
    forged = np.zeros(40 + 8 * ndim + 8 * numel, np.uint8)
    forged[:40] = payload[:40]
    forged[40 : 40 + 8 * ndim].view("<u8")[:] = 1
    forged[40 : 40 + 8 * ndim].view("<u8")[ndim // 2] = numel
    forged = forge(forged, ndim=ndim, nbytes=forged.size)
    if ndim <= 64 and np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        assert hvd_compress.decode(forged).ndim == ndim
    else:
        with pytest.raises(WireError, match="dimensions"):
            hvd_compress.decode(forged)


@pytest.mark.parametrize("dims", [(0, 2**64 - 1), (0, 2**63), (2**41, 0), (0, 2**40, 2**40), (2**32, 2**32, 0)])
def test_impossible_shapes_of_no_elements(dims):
    forged = np.zeros(40 + 8 * len(dims), np.uint8)
    forged[:40] = NoCompression().encode(np.empty(0, np.float32))[:40]
    forged[40:].view("<u8")[:] = dims
    with pytest.raises(WireError, match="makes no sense"):
        hvd_compress.decode(forge(forged, ndim=len(dims), nbytes=forged.size))


@every_row
def test_forged_length(row):
    payload = payload_of(row)
    for nbytes in (0, 8, 40, 48, payload.size - 8, payload.size - 1, payload.size + 8, 2**32, 2**63, 2**64 - 8):
        forged = payload.copy()
        forged[16:24].view("<u8")[0] = nbytes
        if 40 <= nbytes <= payload.size and nbytes % 8 == 0:
            sealed(forged[:nbytes])
        assert_refused(row.compressor, forged, 300)


@every_row
def test_every_shorter_body_with_right_length_and_checksum_is_refused(row):
    payload = payload_of(row)
    for nbytes in range(56, payload.size, 8):
        assert_refused(row.compressor, resized(payload, nbytes), 300)


@every_row
def test_forged_group(row):
    for group in (0, 1, 7, 8, 149, 299, 301, 512, 32769, 65537, 2**31, 2**32 - 1):
        forged = forge(payload_of(row), group=group)
        refused = refuses(row.compressor, forged, 300)
        assert refused or group > 0
        try:
            assert hvd_compress.decode(forged).shape == (2, 150), group
        except WireError:
            assert refused, group


@every_row
def test_forged_entries(row):
    """The sparse ones must refuse every other number; the dense ones do not read it."""
    payload = payload_of(row)
    true = field(payload, "entries")
    for entries in {0, 1, true - 1, true + 1, true + 4, 300, 301, 2**16, 2**31, 2**32 - 1} - {true, -1}:
        refused = refuses(row.compressor, forge(payload, entries=entries), 300)
        sparse = (
            row.compressor.id in ("threshold", "adaptive", "topk", "chunkedtopk", "randomk", "percentile")
            or getattr(row.compressor, "bits", 0) == 1
        )
        sparse = sparse or field(payload, "codec") == row.compressor.coded_codec
        assert refused == sparse, entries


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("claimed", [0, 1, 2, 5, 8, 9, 31, 32, 64, 2**31, 2**32 - 1])
def test_forged_bits_of_qsgd(bits, claimed):
    compressor = QSGD(bits=bits)
    forged = forge(compressor.encode(make("normal", (300,), "float32"), key=KEY), parameter=claimed)
    refused = refuses(compressor, forged, 300)
    assert refused or claimed <= bits
    if not 1 <= claimed <= 8:
        assert_refused(compressor, forged, 300, "bits")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("form", [0, 1, 2, 3, 4, 255, 2**24 - 1])
def test_forged_form_of_coded_qsgd(bits, form):
    compressor = QSGD(bits=bits, coding="elias")
    payload = compressor.encode(make("normal", (3000,), "float32"), key=KEY)
    assert field(payload, "codec") == 133
    true = field(payload, "parameter") >> 8
    for claimed in range(10):
        refused = refuses(compressor, forge(payload, parameter=claimed | form << 8), 3000)
        assert not refused or (claimed, form) != (bits, true)
        if not 1 <= claimed <= 8:
            assert_refused(compressor, forge(payload, parameter=claimed | form << 8), 3000, "bits")
        elif form not in (1, 2, 3):
            assert_refused(compressor, forge(payload, parameter=claimed | form << 8), 3000, "form")


@pytest.mark.parametrize("codec", CODED)
def test_a_coded_form_is_refused_by_other_compressors(codec):
    """Also where the compressor has no coded form at all."""
    payload = forge(NoCompression().encode(np.ones(300, np.float32)), codec=codec)
    for compressor in {type(r.compressor): r.compressor for r in ROWS}.values():
        if compressor.coded_codec != codec:
            with pytest.raises(WireError, match=f"codec {codec}"):
                compressor.decode(payload)


@pytest.mark.parametrize(
    "compressor",
    [Threshold(0.5), Adaptive(pi=4), TopK(0.2), Percentile(80), Percentile(97), QSGD(bits=1), QSGD(bits=4)],
    ids=repr,
)
def test_either_form_is_decoded_whatever_the_setting(compressor):
    x = make("normal", (3000,), "float32")
    coded = dataclasses.replace(compressor, coding="elias" if compressor.id == "qsgd" else "golomb")
    plain_payload, coded_payload = compressor.encode(x, key=KEY), coded.encode(x, key=KEY)
    assert field(coded_payload, "codec") == coded.coded_codec
    assert coded_payload.size < plain_payload.size
    expected = compressor.decode(plain_payload)
    for payload in (plain_payload, coded_payload):
        for reader in (compressor, coded):
            assert reader.decode(payload).tobytes() == expected.tobytes(), "coding is not lossless"


@pytest.mark.parametrize("tau", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
def test_forged_tau(tau):
    payload = Threshold(tau=0.5).encode(make("normal", (300,), "float32"))
    assert_refused(Threshold(tau=0.5), forge(payload, parameter=int(np.float32(tau).view(np.uint32))), 300, "tau")


SPARSE = [
    # compressor, dtype of a count, offset of the entries behind the header for one group, dtype of an entry, shift
    (Threshold(tau=0.5), "<u4", 8, "<u2", 1),
    (Adaptive(pi=4), "<u2", 16, "<u2", 1),
    (Adaptive(pi=4, group="tensor"), "<u4", 16, "<u4", 1),
    (TopK(k=50), "<u4", 8, "<u2", 0),
    (Percentile(95), "<u4", 8, "<u2", 0),
    (QSGD(bits=1, bucket_numel=32768), "<u2", 16, "<u2", 1),
]
sparse = pytest.mark.parametrize(("compressor", "count", "first", "entry", "shift"), SPARSE, ids=repr)


@sparse
def test_forged_counts(compressor, count, first, entry, shift):
    numel = 40000 if compressor == Adaptive(pi=4, group="tensor") else 300
    payload = compressor.encode(make("normal", (numel,), "float32"), key=KEY)
    true = int(payload[40 : 40 + np.dtype(count).itemsize].view(count)[0])
    assert true > 3
    for value in {0, 1, true - 1, true + 1, 300, np.iinfo(count).max} - {true}:
        assert_refused(compressor, forge(payload, {40: (count, value)}), numel)
        # also where the header agrees with the table
        if value < true:
            continue
        assert refuses(compressor, forge(payload, {40: (count, value)}, entries=value), numel)


@sparse
def test_forged_indices(compressor, count, first, entry, shift):
    numel = 40000 if compressor == Adaptive(pi=4, group="tensor") else 300
    payload = compressor.encode(make("normal", (numel,), "float32"), key=KEY)
    size = np.dtype(entry).itemsize
    true = int(payload[40 : 40 + np.dtype(count).itemsize].view(count)[0])
    indices = payload[40 + first : 40 + first + true * size].view(entry).astype(np.int64) >> shift
    assert (np.diff(indices) > 0).all()
    assert indices[-1] < numel
    for position in (0, 1, true // 2, true - 1):
        at = 40 + first + position * size
        neighbour = int(indices[position - 1]) if position else numel
        for index in (numel, numel + 1, 2 * numel, np.iinfo(entry).max >> shift, neighbour):
            if index > np.iinfo(entry).max >> shift:
                continue
            forged = forge(payload, {at: (entry, (index << shift) & np.iinfo(entry).max)})
            assert_refused(compressor, forged, numel, "outside of its group")


@sparse
def test_index_beyond_a_short_last_group_is_refused(compressor, count, first, entry, shift):
    """A group further than the array reaches: the bound is the array's end, not the group's."""
    if compressor.group_numel((1000,)) < 1000:
        pytest.skip("its groups are shorter")
    payload = compressor.encode(np.eye(1, 300, 299, dtype=np.float32)[0], key=KEY)
    forged = forge(payload, {40 + first: (entry, 300 << shift)})
    assert_refused(compressor, forged, 300)


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 300])
def test_forged_bitmap(numel):
    """One bit more, one less, one behind the last element: refused before anything is written."""
    compressor = Percentile(50)
    payload = compressor.encode(make("normal", (numel,), "float32") + np.float32(9))
    bits = np.unpackbits(payload[40 : 40 + 8 * -(-numel // 64)], bitorder="little")
    kept = numel - numel // 2
    assert bits[:numel].sum() == bits.sum() == kept == field(payload, "entries")
    first, last = np.flatnonzero(bits)[[0, -1]]
    for place in {0, first, last, numel - 1, numel, bits.size - 1} - {bits.size}:
        changed = bits.copy()
        changed[place] ^= 1
        if place >= numel:
            # as many as there are values
            changed[first] = 0
        forged = payload.copy()
        forged[40 : 40 + bits.size // 8] = np.packbits(changed, bitorder="little")
        assert_refused(compressor, sealed(forged), numel, f"are not {kept} among {numel}")
        out = np.full(numel, GUARD)
        with pytest.raises(WireError):
            compressor.decode_into(forged, out)
        assert (out == GUARD).all(), "written before it was checked"


@pytest.mark.parametrize("coding", [None, "golomb"])
@pytest.mark.parametrize("percentile", [80, 97])
@pytest.mark.parametrize("form", [0, 1, 2, 255, 2**32 - 1])
def test_forged_form_of_percentile(coding, percentile, form):
    compressor = Percentile(percentile, coding=coding)
    payload = compressor.encode(make("normal", (3000,), "float32"))
    assert field(payload, "parameter") == (percentile == 80 and coding is None)
    if form != field(payload, "parameter"):
        assert_refused(compressor, forge(payload, parameter=form), 3000, None if form < 2 else f"form {form}")


@every_row
def test_random_bodies_with_right_checksums_stay_inside(row):
    payload = payload_of(row)
    rng = np.random.default_rng(3)
    for _ in range(300):
        forged = payload.copy()
        where = rng.integers(56, payload.size, rng.integers(1, 12))
        forged[where] = rng.integers(0, 256, where.size)
        refuses(row.compressor, sealed(forged), 300)


@every_row
def test_random_headers_with_right_checksums_stay_inside(row):
    payload = payload_of(row)
    rng = np.random.default_rng(4)
    values = (0, 1, 2, 3, 4, 8, 255, 299, 300, 301, 512, 65535, 65536, 2**31, 2**32 - 1)
    for _ in range(300):
        fields = {
            n: int(rng.choice(values)) for n in rng.permutation(["group", "parameter", "entries"])[: rng.integers(1, 4)]
        }
        refuses(row.compressor, forge(payload, **fields), 300)


@every_row
def test_bodies_of_noise_with_right_checksums_stay_inside(row):
    payload = payload_of(row)
    rng = np.random.default_rng(5)
    for _ in range(100):
        forged = payload.copy()
        forged[56:] = rng.integers(0, 256, payload.size - 56)
        refuses(row.compressor, sealed(forged), 300)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", sorted({*(c.codec for c in COMPRESSORS.values()), *CODED}))
@pytest.mark.parametrize("group", [1, 512, 32768, 2**32 - 1])
@pytest.mark.parametrize("flags", [0, 1, 2, 3, 4, 7])
def test_small_payloads_cannot_claim_much_memory(codec, group, flags):
    payload = NoCompression().encode(np.zeros(16, np.float32))
    tracemalloc.start()
    for numel in (2**28 + 1, 2**32, 2**36, 2**40):
        for parameter in (0, 1, 4, 0x3F800000):
            forged = forge(payload, codec=codec, group=group, flags=flags, numel=numel, parameter=parameter, entries=0)
            with pytest.raises(WireError):
                hvd_compress.decode(forged)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_group_of_qsgd_does_not_size_a_buffer():
    payload = QSGD(bits=4).encode(make("normal", (300,), "float32"))
    with pytest.raises(WireError, match="buckets of 4294967288"):
        QSGD().decode(forge(payload, group=2**32 - 8))


# -- frames ----------------------------------------------------------------------------------------------------------


def test_frames_cut_what_was_joined():
    parts = [payload_of(row, (n,)) for row, n in zip(ROWS, (1, 7, 8, 9, 300, 1009, 2, 64), strict=False)]
    cut = wire.frames(np.concatenate(parts), len(parts))
    assert [p.tobytes() for p in cut] == [p.tobytes() for p in parts]
    assert wire.frames(np.concatenate(parts), 0) == []
    assert [p.tobytes() for p in wire.frames(np.concatenate(parts), 2)] == [p.tobytes() for p in parts[:2]]


def test_frames_refuse_every_truncation():
    parts = [payload_of(ROWS[0], (n,)) for n in (9, 64)]
    joined = np.concatenate(parts)
    for size in range(joined.size):
        with pytest.raises(WireError):
            wire.frames(joined[:size], 2)
    with pytest.raises(WireError, match="payload 2 of 3"):
        wire.frames(joined, 3)


def test_zeros_are_told_as_what_horovod_sends_for_a_rank_that_has_joined():
    zeros = np.zeros(80, np.uint8)
    with pytest.raises(WireError, match=r"join\(\).* same number of batches"):
        wire.open_payload(zeros)
    for before in ([], [payload_of(ROWS[0], (9,))]):
        with pytest.raises(WireError, match=r"join\(\).* same number of batches"):
            wire.frames(np.concatenate([*before, zeros]), 2)
    zeros[39] = 1
    with pytest.raises(WireError, match="not an hvd_compress payload"):
        wire.open_payload(zeros)


@pytest.mark.parametrize("nbytes", [0, 8, 39, 2**31, 2**63, 2**64 - 1])
def test_frames_refuse_forged_lengths(nbytes):
    parts = [payload_of(ROWS[0], (n,)) for n in (9, 64)]
    joined = np.concatenate(parts)
    joined[16:24].view("<u8")[0] = nbytes
    with pytest.raises(WireError):
        wire.frames(joined, 2)


# -- sections --------------------------------------------------------------------------------------------------------


def test_sections_hand_out_padded_views_and_no_more_than_there_is():
    body = np.full(32, 0xFF, np.uint8)
    sections = wire.Sections(body)
    sections.blank(3, np.uint16)[...] = 1
    assert body[:8].tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert sections.used == 8
    assert sections.take(2, np.float32).nbytes == 8
    assert sections.take(0, np.float64).size == 0
    with pytest.raises(WireError, match="asks for 40 bytes of body, 32 are there"):
        sections.take(3, np.float64)
    with pytest.raises(WireError):
        sections.take(2**62, np.float64)
    assert sections.take(16, np.uint8).size == 16


@pytest.mark.parametrize("bad", [np.zeros((5, 8), np.uint8), np.zeros(40, np.int8), np.zeros(80, np.uint8)[::2]])
def test_open_payload_takes_flat_contiguous_bytes_only(bad):
    with pytest.raises(WireError, match="flat contiguous uint8"):
        wire.open_payload(bad)


@every_row
@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_a_header_without_its_body_is_refused_whatever_stands_before_it(row, shape):
    at = wire.header_bytes(shape)
    group = row.compressor.group_numel(shape)
    buffer = np.zeros(3 * at, np.uint8)
    payload = buffer[at : 2 * at]
    wire.seal(
        payload, codec=row.compressor.codec, shape=shape, group=group, parameter=0, entries=0, float64=False,
        nonfinite=False,
    )  # fmt: skip
    # such bytes before it as kernels would take for a header of a payload that is as long as it has to be
    words = buffer[:at].view("<u8")
    words[0], words[1], words[2], words[3] = 1 << 56, 64, 3 * at, group
    assert_refused(row.compressor, payload, 64)
