from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Percentile, TopK
from hvd_compress.errors import WireError
from hvd_compress.kernels import table
from hvd_compress.kernels.cuda import bitmap, select, topk
from tests import device
from tests.device import (
    Tables,
    assert_same_values,
    framed,
    host_decode,
    host_encode,
    is_unharmed,
    on_device,
    resealed,
    wide,
)
from tests.thorough import shown_by

# NaN and infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADER = 40
GROUP = 65536
rng = np.random.default_rng(7)


EVERY = [TopK(0.01), TopK(k=3), TopK(0.4), Percentile(90.0, True), Percentile(50.0, True), Percentile(99.0, True)]
every_compressor = pytest.mark.parametrize("compressor", EVERY, ids=str)
# a list, and bits; of a top-k and of a percentile
every_form = pytest.mark.parametrize(
    "compressor",
    shown_by(lambda c: c in (TopK(0.01), TopK(0.4), Percentile(90.0, True)), [(c,) for c in EVERY]),
    ids=str,
)
one_of_each = pytest.mark.parametrize("compressor", [TopK(0.1), Percentile(90, True), Percentile(97, True)], ids=str)
all_kinds = pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])


def without_feedback(compressor):
    if isinstance(compressor, TopK):
        return TopK(compressor.ratio, compressor.k, error_feedback=False)
    return Percentile(compressor.percentile)


def normal(numel):
    return rng.standard_normal(numel)


def assert_encodes(compressor, numels, group=GROUP, kind="float32", make=normal, steps=1, unaligned=False):
    """Encode on the device and on the host, and compare payloads and residuals."""
    tables = Tables(compressor, numels, group, kind)
    frames = [framed(n, unaligned=unaligned) for n in numels]
    xs = [x.fill_(0) for x, _ in frames]
    hosts = [wide(x) for x in xs]
    for _ in range(steps):
        gradients = [on_device(np.append(np.asarray(make(n), np.float32), np.float32(0)), kind)[:n] for n in numels]
        tables.payloads.zero_()
        payloads = tables.encode(xs, gradients) if compressor.feedback else tables.encode(gradients)
        for host, gradient, payload in zip(hosts, gradients, payloads, strict=True):
            values = wide(gradient)
            if compressor.feedback:
                expected = host_encode(compressor, host, values, group)
            else:
                expected = host_encode(compressor, values, None, group)
            np.testing.assert_array_equal(payload, resealed(expected))
    for (x, whole), host in zip(frames, hosts, strict=True):
        if compressor.feedback:
            assert_same_values(wide(x), host)
        assert is_unharmed(whole)
    return tables


def assert_decoded(compressor, payloads, kind="float32", scale=1.0, add=False, unaligned=False, group=GROUP):
    device.assert_decoded(compressor, payloads, group, assert_same_values, kind, scale, add, unaligned)


@every_compressor
@all_kinds
def test_encodes_as_the_host_does(compressor, kind):
    assert_encodes(compressor, [1, 17, 4096, 5001], kind=kind, steps=2)
    assert_encodes(without_feedback(compressor), [3, 5000], kind=kind, unaligned=True)


@every_form
def test_encodes_long_rows_beside_short_ones(compressor):
    assert_encodes(compressor, [16385, 40000, 16384, 5])


@one_of_each
def test_encodes_long_rows_of_16_bits(compressor):
    assert_encodes(compressor, [17001], kind="bfloat16", steps=2, unaligned=True)
    assert_encodes(without_feedback(compressor), [17000], kind="bfloat16")


@one_of_each
@pytest.mark.parametrize("group", [1, 13, 1000, 4096])
def test_groups_of_any_size(compressor, group):
    numels = {1: [20], 13: [5, 100], 1000: [100, 3001], 4096: [5001, 17000]}[group]
    assert_decodes_its_own(assert_encodes(compressor, numels, group))


def assert_decodes_its_own(tables):
    payloads = tables.taken()
    for force in (True, False):
        outs = [framed(n) for n in tables.numels]
        tables.decode([out for out, _ in outs], 0.5, force)
        for (out, whole), payload in zip(outs, payloads, strict=True):
            assert_same_values(wide(out), host_decode(tables.compressor, [payload], len(out), 0.5))
            assert is_unharmed(whole)
    assert (tables.check() == 8).all()


@one_of_each
def test_rows_that_are_summed_in_several_steps(compressor, monkeypatch):
    for module, name, value in (
        (select, "_STEP", 4),
        (select, "_DRAWN", 64),
        (bitmap, "_STEP", 2),
        (topk, "_CHUNK", 16),
    ):
        monkeypatch.setattr(module, name, value)
    assert_decodes_its_own(assert_encodes(compressor, [17000, 9000, 40]))


def spread(numel):
    return normal(numel) * 10.0 ** rng.integers(-40, 38, numel)


def cluster(numel):
    return np.where(np.arange(numel) < 300, 1e6, 1e-6) * normal(numel)


def denormal(numel):
    return rng.integers(-9, 10, numel) * 1e-40


def few(numel):
    return np.where(rng.random(numel) < 0.005, 0.75, 0.0) - np.where(rng.random(numel) < 0.005, 0.25, 0.0)


CONTENTS = {
    "zeros": np.zeros,
    "ones": np.ones,
    "ties": lambda n: rng.integers(-2, 3, n) * 0.5,
    "half ties": lambda n: np.where(np.arange(n) % 2 == 0, 1.5, normal(n)),
    "negative zeros": lambda n: np.where(np.arange(n) % 3 == 0, -0.0, np.where(np.arange(n) % 3 == 1, 0.0, -0.5)),
    "sorted": lambda n: np.sort(normal(n)),
    "one": lambda n: np.where(np.arange(n) == n - 1, -3e38, 0),
    "cauchy": rng.standard_cauchy,
    "spread": spread,
    "cluster": cluster,
    "denormal": denormal,
    "few": few,
}


@pytest.mark.parametrize("content", CONTENTS)
def test_selects_from_all_contents(content):
    # one takes many, the other few
    assert_encodes(TopK(0.1), [300], make=CONTENTS[content])
    assert_encodes(Percentile(50.0, True), [16400, 300], make=CONTENTS[content])


def drawn(numel):
    """Return the places that the sample of a long row is drawn from."""
    # as many as there are bins, a power of two
    in_group = select._BINS * 2 ** (numel - 1).bit_length() // 65536
    count = min(numel >> 3, 32768, 2 ** (in_group.bit_length() - 1))
    h = (np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        h ^= h >> np.uint64(shift)
        h = (h * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    stride = numel // count
    return np.arange(count) * stride + ((h * np.uint64(stride)) >> np.uint64(32)).astype(np.int64)


@pytest.mark.parametrize("compressor", [TopK(0.02), TopK(0.7), TopK(k=1), Percentile(90.0)], ids=str)
@pytest.mark.parametrize("bins", [512, 2**20])
@pytest.mark.parametrize("misled", ["too small", "too large", "zeros", "same", "tiny"])
def test_the_selection_is_exact_whatever_the_sample_says(compressor, bins, misled, monkeypatch):
    monkeypatch.setattr(select, "_BINS", bins)

    def make(numel):
        x = spread(numel) if misled == "tiny" else normal(numel)
        at = drawn(numel)
        x[at] = {"too small": 1e-3 * x[at], "too large": 1e3 * x[at], "zeros": 0, "same": 0.25, "tiny": 1e-30 * x[at]}[
            misled
        ]
        return x

    assert_encodes(compressor, [16385], make=make)


@every_form
def test_tells_of_what_is_not_finite_and_can_take_it_back(compressor):
    numels = [3000, 20000, 10]
    tables = Tables(compressor, numels, GROUP)
    before = [normal(n).astype(np.float32) for n in numels]
    gradients = [normal(n).astype(np.float32) for n in numels]
    gradients[0][7] = np.inf
    gradients[1][8] = np.nan
    before[1][9] = gradients[1][9] = 3e38
    xs = [on_device(x) for x in before]
    payloads = tables.encode(xs, [on_device(g) for g in gradients])
    assert [len(p) == HEADER for p in payloads] == [True, True, False]
    assert tables.check().tolist() == [9, 9, 8]
    hosts = [x.copy() for x in before]
    for host, gradient, payload in zip(hosts, gradients, payloads, strict=True):
        np.testing.assert_array_equal(payload, resealed(host_encode(compressor, host, gradient, GROUP)))
    # the bodies are still there
    tables.payloads.zero_()
    xs = [on_device(x) for x in before]
    tables.encode(xs, [on_device(g) for g in gradients])
    tables.rows[:, table.ADD] = 1
    tables.decode(xs, 1.0, force=True)
    for x, old, gradient in zip(xs, before, gradients, strict=True):
        total = old + gradient
        np.testing.assert_array_equal(wide(x), np.where(np.isfinite(total), total, old))


@one_of_each
def test_without_feedback_anything_can_come(compressor):
    compressor = without_feedback(compressor)
    tables = Tables(compressor, [3000, 20000], GROUP)
    for bad in (np.inf, np.nan):
        xs = [normal(n).astype(np.float32) for n in (3000, 20000)]
        xs[0][::2] = xs[1][::3] = bad
        assert [len(p) for p in tables.encode([on_device(x) for x in xs])] == [HEADER, HEADER]
        assert tables.check().tolist() == [9, 9]
        tables.payloads.zero_()


def sent_by(compressor, numel, group=GROUP):
    return host_encode(without_feedback(compressor), normal(numel).astype(np.float32), None, group)


@every_form
@all_kinds
def test_decodes_what_hosts_send(compressor, kind):
    payloads = [[sent_by(compressor, n) for _ in range(3)] for n in (1, 3, 5000)]
    assert_decoded(compressor, payloads, kind, scale=1 / 3)
    assert_decoded(compressor, [of_tensor[:1] for of_tensor in payloads], kind, unaligned=True)
    assert_decoded(compressor, payloads, kind, add=True)
    assert_decoded(compressor, [of_tensor[:1] for of_tensor in payloads], kind, scale=0.7, add=True)


@one_of_each
@pytest.mark.parametrize("group", [13, 1000, 4096])
def test_decodes_groups_of_any_size(compressor, group, monkeypatch):
    payloads = [[sent_by(compressor, n, group) for _ in range(2)] for n in ((5, 100) if group == 13 else (5, 4500))]
    assert_decoded(compressor, payloads, group=group)
    monkeypatch.setattr(topk, "_MOST_SUMMED", 1)
    assert_decoded(compressor, payloads, "bfloat16", group=group)


def test_rows_of_one_tensor_may_differ_in_form():
    numel = 4500
    some = [sent_by(Percentile(p), numel) for p in (90.0, 97.0, 50.0, 99.9)]
    assert len({int(p[28]) for p in some}) == 2
    for order in ([0, 1, 2, 3], [1, 3, 2, 0]):
        payloads = [[some[i] for i in order]]
        # the room that any of them needs
        assert_decoded(Percentile(50.0), payloads, scale=0.3)
        assert_decoded(Percentile(50.0), payloads, scale=0.3, add=True)
        assert_decoded(Percentile(50.0), payloads, "bfloat16", scale=0.3)


@one_of_each
def test_zeros_become_positive(compressor):
    payload = sent_by(compressor, 5000)
    entries = int(payload[32:36].view(np.uint32)[0])
    payload[-8 * ((entries + 1) // 2) :].view(np.float32)[: entries // 2] = -0.0
    assert_decoded(compressor, [[resealed(payload)]])
    assert_decoded(compressor, [[resealed(payload)] * 2], "float16")


@one_of_each
def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan(compressor):
    sent = sent_by(compressor, 5000)
    bad = host_encode(without_feedback(compressor), np.full(5000, np.nan, np.float32), None, GROUP)
    absent = bad.copy()
    absent[6] = 4
    absent = resealed(absent)
    for payloads in ([absent, sent, absent], [absent, absent], [sent, bad, sent]):
        assert_decoded(compressor, [payloads])
        assert_decoded(compressor, [payloads], "bfloat16", add=True)


def host_refuses(compressor, payload):
    try:
        compressor.decode(payload)
    except WireError:
        return True
    return False


def assert_judged_alike(compressor, payload, numel, group=GROUP):
    """Check on the device what the host checks, and decode what both accept."""
    tables = Tables(compressor, [numel, numel], group)
    good = host_encode(compressor, np.ones(numel, np.float32), None, group)
    payload = resealed(payload)
    tables.put([payload, resealed(good)])
    refuses = host_refuses(compressor, payload)
    assert tables.check().tolist() == [-1 if refuses else 8, 8]
    if not refuses:
        assert_decoded(compressor, [[payload]], group=group)
    return refuses


def damaged_lists(payload, numel, group):
    """Return copies of a payload of indices with all that can be wrong with it."""
    counts = -(-numel // group)
    entries = int(payload[32:36].view(np.uint32)[0])
    at = HEADER + (4 * counts + 7) // 8 * 8

    def changed(change):
        copy = payload.copy()
        indices = copy[at : at + 2 * entries].view(np.uint16)
        change(copy[HEADER:at].view(np.uint32), indices, copy[32:36].view(np.uint32))
        return copy

    def swap(counts, indices, _):
        indices[[3, 4]] = indices[[4, 3]]

    def same(counts, indices, _):
        indices[4] = indices[3]

    def beyond(counts, indices, _):
        indices[-1] = (numel - 1) % group + 1

    def more(counts, indices, _):
        counts[0] += 1

    def moved(counts, indices, _):
        counts[0] -= 1
        counts[1] += 1

    def huge(counts, indices, _):
        counts[0] = 2**32 - 1

    def wrapped(counts, indices, _):
        counts[0] += 2**31
        counts[1] += 2**31

    def stated(counts, indices, number):
        number += 2

    def none(counts, indices, number):
        number[0] = 0

    def all_that_can_be(counts, indices, number):
        number[0] = 2**32 - 1

    return [changed(c) for c in (swap, same, beyond, more, moved, huge, wrapped, stated, none, all_that_can_be)]


@pytest.mark.parametrize("compressor", [TopK(0.1), Percentile(97.0)], ids=str)
def test_refuses_lists_that_the_host_refuses(compressor):
    for numel, group in ((4500, 4096), (300, 200)):
        payload = sent_by(compressor, numel, group)
        judged = [assert_judged_alike(compressor, p, numel, group) for p in damaged_lists(payload, numel, group)]
        assert sum(judged) >= 9
        assert not assert_judged_alike(compressor, payload, numel, group)


@pytest.mark.parametrize("numel", [5000, 129, 64])
def test_refuses_bits_that_the_host_refuses(numel):
    compressor = Percentile(90.0)
    payload = sent_by(compressor, numel)
    words = slice(HEADER, HEADER + 8 * -(-numel // 64))
    changes = []
    for change in ("more", "fewer", "moved", "beyond", "form 0", "form 2", "form", "entries", "fewer entries"):
        copy = payload.copy()
        bits = np.unpackbits(copy[words], bitorder="little")
        if change == "more":
            bits[np.flatnonzero(bits[:numel] == 0)[0]] = 1
        elif change == "fewer":
            bits[np.flatnonzero(bits)[0]] = 0
        elif change == "moved":
            bits[np.flatnonzero(bits[:numel] == 0)[-1]] = 1
            bits[np.flatnonzero(bits)[0]] = 0
        elif change == "beyond":
            if numel % 64 == 0:
                continue
            bits[np.flatnonzero(bits)[0]] = 0
            bits[-1] = 1
        copy[words] = np.packbits(bits, bitorder="little")
        stated = copy[24:40].view(np.uint32)
        if change.startswith("form"):
            stated[1] = {"form 0": 0, "form 2": 2, "form": 2**31 + 1}[change]
        elif change == "entries":
            stated[2] += 1
        elif change == "fewer entries":
            stated[2] -= 2
        changes.append(assert_judged_alike(compressor, copy, numel))
    assert sum(changes) >= len(changes) - 2


@one_of_each
def test_judges_random_damage_as_the_host_does(compressor):
    numel = 5000
    for _ in range(12):
        payload = sent_by(compressor, numel)
        # in what is not covered by the size of the payload
        for at in rng.integers(HEADER, HEADER + rng.choice([16, 200, 1000]), rng.integers(1, 3)):
            payload[min(at, len(payload) - 1)] = rng.integers(256)
        if rng.random() < 0.2:
            payload[32 + rng.integers(4)] = rng.integers(256)
        assert_judged_alike(compressor, payload, numel)


def test_payloads_of_other_sizes_are_refused():
    for compressor in (TopK(0.1), Percentile(90.0)):
        payload = sent_by(compressor, 5000)
        for nbytes in (HEADER, HEADER + 8, len(payload) - 8):
            cut = payload[:nbytes].copy()
            cut[16:24].view(np.uint64)[0] = nbytes
            assert assert_judged_alike(compressor, cut, 5000)


def test_others_go_through_host_memory():
    assert TopK(coding="golomb").device_kernels(GROUP) is None
    assert Percentile(coding="golomb").device_kernels(GROUP) is None
    assert TopK().device_kernels(2 * GROUP) is None
