from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Blockwise,
    ChunkedTopK,
    EFSignSGD,
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
from hvd_compress.exchange.raw import CheckedHalves, CheckedRaw, Raw
from hvd_compress.kernels import table
from hvd_compress.kernels.checksum import checksum_of_parts
from tests.device import DEVICE, ON_GPU, Tables, host_encode, on_device, torch

# what is not finite is encoded, too
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADER = 40
PART = 4096 * 4  # bytes that one program sums
MADE = [OneBit(), TopK(), Threshold(0.5), Percentile(), QSGD(), QSGD(bits=3), BF16(), FP16(), NoCompression()]
MADE += [CheckedRaw(), CheckedHalves(), EFSignSGD(), SignSGD(), SignSGD(error_feedback=True), Natural(), TernGrad()]
MADE += [Blockwise(), Blockwise(bits=4, hadamard=True), ChunkedTopK()]
rng = np.random.default_rng(8)


def resealed(payload):
    """Make the checksum match whatever the bytes are."""
    payload = payload.copy()
    payload.view(np.uint32)[9] = checksum_of_parts(payload.view(np.uint32), 9)
    return payload


def changed(payload, at, value, dtype=np.uint8):
    """Return a payload with another field, and a checksum that matches."""
    payload = payload.copy()
    payload[at : at + np.dtype(dtype).itemsize].view(dtype)[0] = value
    return resealed(payload)


def values(numel):
    return on_device(rng.standard_normal(numel).astype(np.float32))


def made(compressor, numels, group):
    """Return a table and the payloads that the device makes in it."""
    tables = Tables(compressor, numels, group)
    gradients = [values(n) for n in numels]
    if getattr(compressor, "error_feedback", False):
        return tables, tables.encode([values(n) for n in numels], gradients)
    return tables, tables.encode(gradients)


def assert_ready(tables):
    """Nothing of a call may be left for the next one."""
    from hvd_compress.kernels.cuda.rows import BAD, SUM, TICKET

    assert not tables.launch.state.cpu().numpy()[:, [BAD, SUM, TICKET]].any()


def found(payload, numel, group, compressor, room=None):
    """Return what the device finds of a payload that has come."""
    tables = Tables(NoCompression(), [max(numel, payload.size // 8)], group)
    tables.compressor, tables.kernels = compressor, compressor.device_kernels(group)
    tables.rows[:, table.NUMEL] = numel
    tables.rows[:, table.ROOM] = payload.size if room is None else room
    tables.put([payload])
    (flags,) = tables.check()
    assert_ready(tables)
    return flags


@pytest.mark.parametrize("compressor", MADE, ids=repr)
def test_the_host_opens_what_the_device_makes(compressor):
    group = compressor.group_of((2, 512))
    if compressor.device_kernels(group) is None:
        pytest.skip("its gradients go through host memory")
    numels = [1, 7, 1000, 5000]
    tables, payloads = made(compressor, numels, group)
    for numel, payload in zip(numels, payloads, strict=True):
        header, _ = wire.open_payload(payload)
        assert (header.codec, header.shape, header.group) == (compressor.codec, (numel,), group)
        assert header.nbytes == payload.size
        assert (header.nonfinite, header.float64, header.absent) == (False, False, False)
        compressor.decode(payload)
        rows = np.zeros((1, table.COLUMNS), np.int64)
        rows[0, [table.NUMEL, table.PAYLOAD, table.ROOM]] = numel, payload.ctypes.data, payload.size
        assert table.check(rows, compressor.codec, -1) == -1
        assert rows[0, table.FLAGS] == table.SUMMED
    assert_ready(tables)
    assert (tables.check() == table.SUMMED).all()
    assert_ready(tables)


def test_headers_are_those_of_the_host():
    compressor = QSGD()
    x = values(1500)
    (payload,) = Tables(compressor, [1500], 512).encode([x])
    expected = host_encode(compressor, x.cpu().numpy(), None, 512)
    # but for the kind of checksum, and the checksum
    expected[6] |= table.SUMMED
    expected[36:HEADER] = payload[36:HEADER]
    assert (payload[:HEADER] == expected[:HEADER]).all()


def test_every_flipped_bit_is_noticed():
    compressor, numel = FP16(), 4
    _, (payload,) = made(compressor, [numel], 8)
    bits = 8 * payload.size
    tables = Tables(compressor, [numel] * (bits + 1), 8)
    flipped = []
    for bit in range(bits):
        copy = payload.copy()
        copy[bit // 8] ^= 1 << bit % 8
        flipped.append(copy)
        with pytest.raises(WireError):
            wire.open_payload(copy)
    tables.put([*flipped, payload])
    tables.launch.place(tables.rows, "float32", False)
    tables.launch.check(compressor.codec)
    flags = tables.launch.found_in(tables.launch.state.cpu().numpy())
    assert (flags[:-1] < 0).all()
    assert flags[-1] == table.SUMMED
    assert_ready(tables)


def test_two_words_that_changed_places_are_noticed():
    _, (payload,) = made(Raw(), [100], 512)
    words = payload.view(np.uint32)
    words[[20, 30]] = words[[30, 20]]
    assert found(payload, 100, 512, Raw()) == -1
    with pytest.raises(WireError):
        wire.open_payload(payload)


def test_refuses_headers_that_are_not_expected():
    compressor, numel, group = Raw(), 100, 512
    _, (payload,) = made(compressor, [numel], group)
    assert found(payload, numel, group, compressor) == table.SUMMED
    nbytes = payload.size
    for wrong in (
        changed(payload, 0, ord("H")),
        changed(payload, 4, 2),  # version
        changed(payload, 5, compressor.codec + 1),
        changed(payload, 7, 2),  # dimensions
        changed(payload, 7, 0),
        changed(payload, 8, numel + 1, np.uint64),
        changed(payload, 8, numel | 1 << 40, np.uint64),
        changed(payload, 24, group + 1, np.uint32),
        changed(payload, 16, 0, np.uint64),
        changed(payload, 16, HEADER - 8, np.uint64),
        changed(payload, 16, nbytes - 4, np.uint64),
        changed(payload, 16, nbytes + 8, np.uint64),
        changed(payload, 16, 2**63 + nbytes, np.uint64),
        changed(payload, 16, 2**64 - 8, np.uint64),
        *(changed(payload, 6, table.SUMMED | flag) for flag in (1, 4, 5, 16, 32, 64, 128)),
    ):
        assert found(wrong, numel, group, compressor) == -1
    # the host makes another checksum
    assert found(host_encode(compressor, np.ones(numel, np.float32), None, group), numel, group, compressor) == -2
    assert found(np.zeros(nbytes, np.uint8), numel, group, compressor) == -1


def test_refuses_what_is_cut_off():
    _, (payload,) = made(Raw(), [100], 512)
    for room in (HEADER, payload.size - 8, payload.size - 1):
        assert found(payload, 100, 512, Raw(), room) == -1
    assert found(payload, 100, 512, Raw(), payload.size + 64) == table.SUMMED


@pytest.mark.parametrize("flag", [table.NONFINITE, table.ABSENT])
def test_accepts_headers_without_a_body(flag):
    _, (payload,) = made(Raw(), [100], 512)
    header = changed(payload[:HEADER], 16, HEADER, np.uint64)
    header = changed(header, 6, flag | table.SUMMED)
    assert found(header, 100, 512, Raw()) == flag | table.SUMMED
    assert found(header, 100, 512, Raw(), 4 * PART) == flag | table.SUMMED


@pytest.mark.skipif(ON_GPU, reason="compute-sanitizer says it there")
@pytest.mark.parametrize("nbytes", [None, 2**20, 2**62, HEADER])
def test_reads_no_further_than_the_room_of_a_payload(nbytes):
    numel = 2 * PART // 4
    tables, (payload,) = made(Raw(), [numel], 512)
    if nbytes is not None:
        payload = changed(payload, 16, nbytes, np.uint64)
    # it ends where memory does: who reads on is killed
    pages = -(-payload.size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    end = whole.ctypes.data + pages * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    begin = pages * mmap.PAGESIZE - payload.size
    whole[begin : begin + payload.size] = payload
    tables.rows[:, table.PAYLOAD] = whole.ctypes.data + begin
    tables.rows[:, table.ROOM] = payload.size
    assert tables.check().tolist() == [table.SUMMED if nbytes is None else -1]
    assert_ready(tables)
    # nor where there is no room for a header
    tables.rows[:, table.PAYLOAD] = whole.ctypes.data + pages * mmap.PAGESIZE - 16
    tables.rows[:, table.ROOM] = 16
    assert tables.check().tolist() == [-1]
    assert_ready(tables)


def test_sums_of_many_parts():
    # rooms larger than what is in them, too
    numels = [3 * PART // 4, 1, PART // 4 - 10, PART // 4 - 9, 8 * PART // 4 + 3]
    tables, payloads = made(NoCompression(), numels, 512)
    for payload in payloads:
        wire.open_payload(payload)
    assert_ready(tables)
    assert (tables.check() == table.SUMMED).all()
    assert_ready(tables)
    for at in (HEADER, PART - 1, PART, 7 * PART + 5, payloads[-1].size - 1):
        wrong = payloads[-1].copy()
        wrong[at] ^= 16
        tables.put([*payloads[:-1], wrong])
        assert tables.check().tolist() == [table.SUMMED] * 4 + [-1]
        assert_ready(tables)
    tables.put(payloads)
    assert (tables.check() == table.SUMMED).all()


def test_a_row_that_is_not_finite_is_a_header_and_the_next_step_is_not():
    numel = 5 * PART // 4
    tables = Tables(CheckedRaw(), [numel, 10], 512)
    xs = [values(numel), values(10)]
    good = [p.copy() for p in tables.encode(xs)]
    xs[0][numel - 1] = float("nan")
    payloads = tables.encode(xs)
    assert payloads[0].size == HEADER
    header, _ = wire.open_payload(payloads[0])
    assert header.nonfinite
    assert (header.parameter, header.entries) == (0, 0)
    assert (payloads[1] == good[1]).all()
    assert_ready(tables)
    assert tables.check().tolist() == [table.NONFINITE | table.SUMMED, table.SUMMED]
    xs[0][numel - 1] = 1.0
    payloads = tables.encode(xs)
    assert payloads[0].size == good[0].size
    assert (tables.check() == table.SUMMED).all()


def test_checking_writes_nothing_but_the_state():
    tables, payloads = made(Raw(), [100, 3 * PART // 4], 512)
    before = torch.clone(tables.payloads)
    tables.check()
    assert (tables.payloads == before).all()
    # and sealing nothing beside the payloads
    canaries = torch.full_like(tables.payloads, 0xA5, device=DEVICE)
    tables.rows[:, table.PAYLOAD] += canaries.data_ptr() - tables.payloads.data_ptr()
    tables.payloads = canaries
    again = tables.encode([values(n) for n in tables.numels])
    assert [p.size for p in again] == [p.size for p in payloads]
    assert (canaries[-64:] == 0xA5).all()
    assert (canaries[int(tables.starts[0]) + again[0].size : int(tables.starts[1])] == 0xA5).all()
