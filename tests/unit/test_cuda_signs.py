from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Adaptive, Threshold
from hvd_compress.errors import WireError
from hvd_compress.kernels import table
from tests import device
from tests.device import (
    Tables,
    assert_same_bits,
    framed,
    host_decode,
    host_encode,
    is_unharmed,
    numel_of,
    on_device,
    resealed,
    wide,
)

# NaN and infinities in what is not sent
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADER = 40
rng = np.random.default_rng(7)


def normal(numel):
    return rng.standard_normal(numel)


def forged(payload, at, value):
    """Write a number over a payload."""
    payload = payload.copy()
    payload[at : at + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
    return resealed(payload)


def resized(payload, nbytes):
    """Cut a payload, or append zeros."""
    cut = np.zeros(nbytes, np.uint8)
    cut[: min(nbytes, payload.size)] = payload[:nbytes]
    return forged(cut, 16, np.uint64(nbytes))


def assert_same_body(compressor, payload, expected, group, numel):
    """Compare a body made on the device with that of the host, whose means are summed in another order."""
    assert len(payload) == len(expected)
    groups = -(-numel // group)
    if isinstance(compressor, Adaptive):
        means = slice(HEADER + (2 * groups + 7) // 8 * 8, HEADER + (2 * groups + 7) // 8 * 8 + 8 * groups)
        np.testing.assert_array_max_ulp(payload[means].view(np.float32), expected[means].view(np.float32), 1)
        expected = expected.copy()
        expected[means] = payload[means]
    np.testing.assert_array_equal(payload, resealed(expected))


def assert_encoded(compressor, numels, group, kind="float32", feedback=True, unaligned=False, draw=normal, steps=1):
    """Encode on the device and on the host, and compare; returns the last payloads."""
    tables = Tables(compressor, numels, group, kind)
    begin = 1 if unaligned else 0
    xs = [on_device((0.1 * normal(n + begin)).astype(np.float32))[begin:] for n in numels]
    for _ in range(steps):
        tables.payloads.zero_()
        gradients = [on_device(np.float32([0] * begin + [*draw(n)]), kind)[begin:] for n in numels]
        residuals = [wide(x) for x in xs]
        payloads = tables.encode(xs if feedback else gradients, gradients if feedback else None)
        memory = tables.payloads.cpu().numpy()
        for number, numel in enumerate(numels):
            payload, gradient, residual = payloads[number], wide(gradients[number]), residuals[number]
            given = residual + gradient
            expected = host_encode(
                compressor, residual if feedback else gradient, gradient if feedback else None, group
            )
            assert_same_body(compressor, payload, expected, group, numel)
            # what is not sent of a slot shows nothing
            end = tables.starts[number] + tables.room[number]
            assert not memory[tables.starts[number] + len(payload) : end].any()
            if feedback:
                decoded = host_decode(compressor, [payload], numel)
                assert_same_bits(wide(xs[number]), given - decoded)
    assert (tables.check() == 8).all()
    return payloads


# -- encoding --------------------------------------------------------------------------------------------------------


# type of gradients, whether there are residuals, whether arrays begin on boundaries of words
WAYS = [
    ("float32", True, False),
    ("float32", False, False),
    ("float16", True, True),
    ("float16", False, False),
    ("bfloat16", True, False),
    ("bfloat16", False, True),
]


def assert_decoded(compressor, numels, group, payloads, kind="float32", scale=1.0, add=False, unaligned=False):
    assert [numel_of(of_tensor[0]) for of_tensor in payloads] == list(numels)
    device.assert_decoded(compressor, payloads, group, assert_same_bits, kind, scale, add, unaligned)


@pytest.mark.parametrize("tau", [0.001, 2.5])
def test_threshold_encodes_as_the_host_does(tau):
    assert_encoded(Threshold(tau), [1, 33000], 32768)
    assert_encoded(Threshold(tau), [5000, 5], 4096, steps=3)


@pytest.mark.parametrize(("kind", "feedback", "unaligned"), WAYS)
def test_threshold_encodes_any_type(kind, feedback, unaligned):
    assert_encoded(Threshold(0.5), [5000, 3], 4096, kind, feedback, unaligned)


def test_threshold_is_strict_and_takes_signs_as_they_are():
    values = [0.5, -0.5, 0.0, -0.0, np.nextafter(np.float32(0.5), 1), -np.nextafter(np.float32(0.5), 1)]
    assert_encoded(Threshold(0.5), [60], 32768, feedback=False, draw=lambda n: np.resize(values, n))
    least = Threshold(2.0**-149)
    assert_encoded(least, [60], 32768, feedback=False, draw=lambda n: np.resize([0.0, 1e-45, -3e-45, -0.0], n))


@pytest.mark.parametrize(("numel", "left_out"), [(32768, 50), (40960, 3), (65535, 100000), (32769, 100000)])
def test_threshold_may_send_every_element(numel, left_out):
    # entries come where the marks of others were
    def draw(n):
        return np.where(np.arange(n) % left_out == 1, 0, rng.choice([-2, 2], n))

    assert_encoded(Threshold(1.0), [numel, 100], 32768, feedback=False, draw=draw)


def test_counts_of_many_groups_are_added_up_in_turn(monkeypatch):
    from hvd_compress.kernels.cuda import signs, threshold

    monkeypatch.setattr(threshold, "_COUNTS", 2)
    monkeypatch.setattr(signs, "_SCANNED", 4)
    for compressor, group, numel in ((Threshold(1.5), 4096, 16400), (Adaptive(pi=3), 13, 150)):
        payloads = assert_encoded(compressor, [numel, 10], group)
        assert_decoded(compressor, [numel, 10], group, [[payload] for payload in payloads])


@pytest.mark.parametrize("pi", [2, 64])
def test_adaptive_encodes_as_the_host_does(pi):
    assert_encoded(Adaptive(pi=pi), [1, 2, 513, 1000], 512)
    assert_encoded(Adaptive(pi=pi), [5000, 3], 4096, steps=3)
    assert_encoded(Adaptive(pi=pi), [2100], 2100)
    assert_encoded(Adaptive(pi=pi), [40], 13)
    assert_encoded(Adaptive(pi=100000), [300], 100)


@pytest.mark.parametrize(("kind", "feedback", "unaligned"), WAYS)
def test_adaptive_encodes_any_type(kind, feedback, unaligned):
    # groups of 16 bits have many equal elements
    assert_encoded(Adaptive(pi=16), [1024, 3, 1027], 1024, kind, feedback, unaligned)
    assert_encoded(Adaptive(pi=16), [700], 350, kind, feedback, unaligned)


def test_adaptive_encodes_groups_of_any_size_in_one_table():
    assert_encoded(Adaptive(), [40, 3000, 9000, 20000], 32768)
    assert_encoded(Adaptive(pi=3), [33000, 500], 32768, draw=lambda n: np.round(normal(n)))


CONTENTS = {
    "zeros": lambda n: np.zeros(n),
    "negative zeros": lambda n: np.full(n, -0.0),
    "equal": lambda n: np.full(n, 0.5),
    "equal negative": lambda n: np.full(n, -0.5),
    "two values": lambda n: rng.choice([-2.0, 2.0], n),
    "few values": lambda n: np.round(normal(n)),
    "few nonzero": lambda n: rng.choice([0.0, 1.0, -3.0], n, p=[0.99, 0.005, 0.005]),
    "one": lambda n: np.where(np.arange(n) == n // 2, -3.0, 0.0),
    "positive": lambda n: np.abs(normal(n)),
    "negative": lambda n: -np.abs(normal(n)),
    "denormal": lambda n: normal(n) * 1e-44,
    "all magnitudes": lambda n: np.float32(np.exp(rng.uniform(-100, 88, n)) * rng.choice([-1, 1], n)),
    "largest": lambda n: np.where(np.arange(n) % 5 == 0, np.finfo(np.float32).max, normal(n)),
    "clustered": lambda n: normal(n) * np.where(np.arange(n) // 100 % 7 == 0, 100, 1),
    "ascending": lambda n: np.arange(n) - n / 2,
    "neighbours": lambda n: 1 + np.arange(n) * 2.0**-23,
}


@pytest.mark.parametrize("content", CONTENTS)
def test_adaptive_selects_exactly(content):
    assert_encoded(Adaptive(pi=10), [1100], 1000, feedback=False, draw=CONTENTS[content])


@pytest.mark.parametrize(
    ("compressor", "group", "bad"),
    [(Threshold(1.0), 4096, np.inf), (Threshold(1.0), 4096, np.nan), (Adaptive(pi=8), 512, -np.inf)],
)
def test_tells_of_values_that_are_not_finite(compressor, group, bad):
    tables = Tables(compressor, [600, 600], group)
    gradients = [on_device(np.float32(normal(600))) for _ in range(2)]
    gradients[0][400] = bad
    xs = [on_device(np.float32(normal(600))) for _ in range(2)]
    residuals = [wide(x) for x in xs]
    payloads = tables.encode(xs, gradients)
    expected = host_encode(compressor, residuals[0].copy(), wide(gradients[0]), group)
    assert (payloads[0] == resealed(expected)).all()
    assert payloads[1].size > HEADER
    # the body that is not sent says what was taken out of the residual
    tables.rows[:, table.ADD] = 1
    tables.decode(xs, 1.0, force=True)
    for x, residual, gradient in zip(xs, residuals, gradients, strict=True):
        given = residual + np.where(np.isfinite(wide(gradient)), wide(gradient), 0)
        np.testing.assert_allclose(wide(x), given, rtol=1e-6, atol=1e-6)
    assert tables.check().tolist() == [9, 8]
    # without residuals, and as of any step
    tables.payloads.zero_()
    tables.rows[:, table.ADD] = 0
    assert tables.encode(gradients)[0].size == HEADER
    gradients[0][400] = 1
    tables.payloads.zero_()
    assert tables.encode(gradients)[0].size > HEADER


# -- decoding --------------------------------------------------------------------------------------------------------


def sent_by_hosts(compressor, numel, group, senders):
    return [host_encode(compressor, np.float32(normal(numel)), None, group) for _ in range(senders)]


@pytest.mark.parametrize(
    ("compressor", "group", "numels"),
    [
        (Threshold(1.5), 32768, [1, 512, 33001]),
        (Threshold(0.01), 4096, [5000]),
        (Adaptive(), 512, [1, 512, 1033]),
        (Adaptive(pi=2), 4096, [5000]),
        (Adaptive(pi=3), 13, [40]),
        (Adaptive(), 32768, [33000]),
    ],
)
def test_decodes_what_hosts_send(compressor, group, numels):
    payloads = [sent_by_hosts(compressor, n, group, 3) for n in numels]
    assert_decoded(compressor, numels, group, payloads, scale=1 / 3)
    assert_decoded(compressor, numels, group, [of_tensor[:1] for of_tensor in payloads], add=True)


@pytest.mark.parametrize(("kind", "unaligned"), [("float32", True), ("float16", False), ("bfloat16", True)])
def test_decodes_into_any_type(kind, unaligned):
    for compressor, group in ((Threshold(0.7), 32768), (Adaptive(pi=8), 500)):
        payloads = [sent_by_hosts(compressor, 1501, group, 1)]
        for add in (False, True):
            assert_decoded(compressor, [1501], group, payloads, kind, 0.3, add, unaligned)


def test_sums_of_several_payloads_are_made_in_float32():
    tables = Tables(Adaptive(), [600], 512, "bfloat16", senders=2)
    tables.put([resealed(p) for p in sent_by_hosts(Adaptive(), 600, 512, 2)])
    tables.check()
    with pytest.raises(NotImplementedError):
        tables.decode([framed(600, "bfloat16")[0]])


def test_threshold_decodes_by_the_threshold_of_the_sender():
    payloads = [[host_encode(Threshold(tau), np.float32(normal(600)), None, 32768) for tau in (0.5, 1.0, 2.0)]]
    assert_decoded(Threshold(0.1), [600], 32768, payloads)


def test_what_is_missing_counts_as_nothing_and_what_is_not_finite_as_nan():
    for compressor, group in ((Threshold(1.0), 32768), (Adaptive(pi=8), 512)):
        (sent,) = sent_by_hosts(compressor, 600, group, 1)
        bad = host_encode(compressor, np.full(600, np.nan, np.float32), None, group)
        absent = bad.copy()
        absent[6] = 8 | 4
        absent = resealed(absent)
        assert_decoded(compressor, [600], group, [[absent, sent, absent]])
        assert_decoded(compressor, [600], group, [[absent]])
        tables = Tables(compressor, [600], group, senders=3)
        tables.put([resealed(sent), resealed(bad), resealed(sent)])
        assert tables.check().tolist() == [8, 9, 8]
        out, whole = framed(600)
        tables.decode([out])
        assert np.isnan(wide(out)).all()
        assert is_unharmed(whole)


def test_own_payloads_are_decoded_without_a_check():
    for compressor, group in ((Threshold(1.0), 32768), (Adaptive(pi=8), 512)):
        tables = Tables(compressor, [1500, 20], group)
        payloads = tables.encode([on_device(np.float32(normal(n))) for n in (1500, 20)])
        outs = [framed(1500), framed(20)]
        tables.decode([out for out, _ in outs], 1.0, force=True)
        for (out, whole), payload in zip(outs, payloads, strict=True):
            assert_same_bits(wide(out), host_decode(compressor, [payload], len(out)))
            assert is_unharmed(whole)


# -- payloads of anybody ---------------------------------------------------------------------------------------------


def found(compressor, payload, numel, group):
    """Return what a check says, and whether the host agrees; nothing beyond the payload is read by chance."""
    tables = Tables(compressor, [numel], group, fill=255)
    tables.put([payload])
    (flags,) = tables.check().tolist()
    try:
        host_decode(compressor, [payload], numel)
    except WireError:
        return flags, flags == -1
    return flags, flags == 8


def test_refuses_sizes_that_do_not_fit():
    for compressor, group in ((Threshold(1.0), 32768), (Adaptive(pi=8), 512)):
        sent = resealed(sent_by_hosts(compressor, 1100, group, 1)[0])
        (entries,) = sent[32:36].view(np.uint32)
        assert found(compressor, sent, 1100, group) == (8, True)
        wrong = [resized(sent, n) for n in (HEADER, HEADER + 8, len(sent) - 8, len(sent) + 8)]
        wrong += [forged(sent, 32, np.uint32(n)) for n in (0, entries - 1, entries + 1, entries + 8, 2**31, 2**32 - 1)]
        for payload in wrong:
            assert found(compressor, payload, 1100, group) == (-1, True)


def test_refuses_counts_and_entries_that_do_not_fit():
    threshold, adaptive = Threshold(0.5), Adaptive(pi=8)
    cases = [(threshold, 4096, 5000, np.uint32, 8), (adaptive, 512, 1100, np.uint16, 8 + 8 * 3)]
    for compressor, group, numel, kind, ahead in cases:
        sent = resealed(sent_by_hosts(compressor, numel, group, 1)[0])
        counts = sent[HEADER : HEADER + 8].view(kind)
        most = np.iinfo(kind).max
        moved = np.array([counts[0] - 1, counts[1] + 1], kind)
        wrong = [forged(sent, HEADER, kind(n)) for n in (0, counts[0] - 1, counts[0] + 1, most // 2, most)]
        at = HEADER + ahead
        entries = sent[at : at + 2 * (int(counts[0]) + int(counts[1]))].view(np.uint16)
        wrong += [
            # the sum is right, but an entry is taken for the next group's, or wraps around
            forged(sent, HEADER, moved),
            forged(sent, HEADER, np.array([most, int(counts[0]) + int(counts[1]) + 1 & most], kind)),
            # not ascending, equal, beyond the group, beyond the tensor
            forged(sent, at, entries[[1, 0]]),
            forged(sent, at, entries[[0, 0]] ^ np.uint16([0, 1])),
            forged(sent, at + 2 * (int(counts[0]) - 1), np.uint16(2 * group)),
            forged(sent, at + 2 * (int(counts[0]) - 1), np.uint16(65535)),
        ]
        last = len(sent) - 2
        while not sent[last : last + 2].any():
            last -= 2
        wrong.append(forged(sent, last, np.uint16(2 * (numel % group))))
        for payload in wrong:
            assert found(compressor, payload, numel, group) == (-1, True)
        assert found(compressor, sent, numel, group) == (8, True)


def test_refuses_thresholds_that_are_none():
    (sent,) = sent_by_hosts(Threshold(1.0), 600, 32768, 1)
    for tau in (0.0, -0.0, -1.0, np.inf, -np.inf, np.nan):
        assert found(Threshold(1.0), forged(sent, 28, np.float32(tau)), 600, 32768) == (-1, True)
    for tau in (1e-45, 3e38):
        assert found(Threshold(1.0), forged(sent, 28, np.float32(tau)), 600, 32768) == (8, True)


def test_takes_no_bodies_but_those_that_hosts_take():
    # of its own: it counts on bodies of both kinds, whichever tests came before
    rng = np.random.default_rng(1)
    for compressor, group in ((Threshold(1.5), 4096), (Adaptive(pi=32), 64)):
        sent = resealed(sent_by_hosts(compressor, 130, group, 1)[0])
        verdicts = []
        for _ in range(24):
            at = rng.integers(HEADER, len(sent))
            flags, agrees = found(compressor, forged(sent, at, np.uint8(rng.integers(256))), 130, group)
            assert agrees
            verdicts.append(flags)
        assert len(set(verdicts)) == 2


def test_others_go_through_host_memory():
    assert Threshold(1.0, coding="golomb").device_kernels(32768) is None
    assert Threshold(1.0).device_kernels(1000) is None
    assert Adaptive(coding="golomb").device_kernels(512) is None
    assert Adaptive().device_kernels(32769) is None
