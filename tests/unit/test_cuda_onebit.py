"""One-bit and EF-SignSGD on a device: signs and residuals of the host, and the bits that the host decodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress import EFSignSGD, OneBit
from hvd_compress.kernels.checksum import checksum
from hvd_compress.kernels.cuda.rows import FOUND
from hvd_compress.kernels.table import ADD, HEADER, SUMMED, sum_in_parts
from tests.device import DEVICE, Tables, host_decode, host_encode, on_device

ULP = 2.0**-23
CANARY = 7.25


def values(rng, numels, kind="float32", factor=1.0):
    return [on_device(factor * rng.standard_normal(n).astype(np.float32), kind) for n in numels]


def to_host(tensor):
    return tensor.float().cpu().numpy()


def parts_of(payload, numel, group):
    """Return the means, with what pads them, and the bits of a payload, whose codec says how many means there are."""
    size = {OneBit.codec: 8, EFSignSGD.codec: 4}[int(payload[5])]
    end = HEADER + (size * -(-numel // group) + 7) // 8 * 8
    return payload[HEADER:end].view(np.float32), payload[end:]


# groups of a program, of odd lengths, of one element; groups that take several programs
SIZES = [
    ([100], 13),
    ([4096, 1000, 64], 64),
    ([5000, 999, 1], 1000),
    ([1], 1),
    ([40], 1),
    ([8192 * 2 + 5], 8192),
    ([20000, 40], 20000),
    ([20000, 40000], 10007),
]
both = pytest.mark.parametrize("made", [OneBit, EFSignSGD])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("numels", "group"), SIZES)
@both
def test_steps_are_those_of_the_host(numels, group, kind, made):
    rng = np.random.default_rng(0)
    compressor = made(group=group)
    there = Tables(compressor, numels, group, kind)
    residuals = [on_device(np.zeros(n, np.float32)) for n in numels]
    here = [np.zeros(n, np.float32) for n in numels]
    for _ in range(2):
        gradients = values(rng, numels, kind)
        payloads = there.encode(residuals, gradients)
        for i, numel in enumerate(numels):
            expected = host_encode(compressor, here[i], to_host(gradients[i]), group)
            means, bits = parts_of(payloads[i], numel, group)
            of_host, bits_of_host = parts_of(expected, numel, group)
            assert np.array_equal(bits, bits_of_host)
            np.testing.assert_allclose(means, of_host, rtol=ULP)
            np.testing.assert_allclose(to_host(residuals[i]), here[i], atol=1e-6)
            # what the host reads of it
            decoded = compressor.decode(payloads[i])
            out = [on_device(np.full(n, CANARY, np.float32)) for n in numels]
            there.decode(out)
            assert np.array_equal(to_host(out[i]).view(np.int32), decoded.view(np.int32))
        there.payloads.zero_()


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize(("numels", "group"), SIZES[:6])
@both
def test_values_without_feedback_are_only_read(numels, group, kind, made):
    compressor = made(group=group, error_feedback=False)
    there = Tables(compressor, numels, group, kind)
    xs = values(np.random.default_rng(1), numels, kind)
    before = [to_host(x).copy() for x in xs]
    for payload, x, old in zip(there.encode(xs), xs, before, strict=True):
        assert np.array_equal(to_host(x), old)
        expected = host_encode(compressor, old, None, group)
        assert np.array_equal(parts_of(payload, x.numel(), group)[1], parts_of(expected, x.numel(), group)[1])


def received(compressor, numels, group, senders, rng):
    """Return payloads of several senders for each tensor, made on the host, in the form that devices check."""
    payloads = []
    for numel in np.repeat(numels, senders):
        payload = host_encode(compressor, rng.standard_normal(numel).astype(np.float32), None, group).copy()
        sum_in_parts(np.array([payload.ctypes.data]), np.array([payload.size]))
        payloads.append(payload)
    return payloads


@pytest.mark.parametrize("senders", [1, 3])
@pytest.mark.parametrize(("numels", "group"), SIZES)
@both
def test_sums_have_the_bits_of_the_host(numels, group, senders, made):
    rng = np.random.default_rng(2)
    compressor = made(group=group, error_feedback=False)
    there = Tables(compressor, numels, group, senders=senders)
    payloads = received(compressor, numels, group, senders, rng)
    there.put(payloads)
    assert (there.check() == SUMMED).all()
    outs = [on_device(np.full(n, CANARY, np.float32)) for n in numels]
    there.decode(outs, 0.3)
    for i, numel in enumerate(numels):
        expected = host_decode(compressor, payloads[i * senders : (i + 1) * senders], numel, 0.3)
        assert np.array_equal(to_host(outs[i]).view(np.int32), expected.view(np.int32))


@both
def test_absent_and_bad_payloads_among_others(made):
    rng = np.random.default_rng(3)
    compressor, numels, group = made(group=64, error_feedback=False), [200], 64
    there = Tables(compressor, numels, group, senders=3)
    payloads = received(compressor, numels, group, 3, rng)
    said = np.zeros(HEADER, np.uint8)
    for say, is_bad in ((compressor.say_absent, False), (compressor.say_nonfinite, True)):
        for place in range(3):
            say(said, 200, group)
            sum_in_parts(np.array([said.ctypes.data]), np.array([said.size]))
            mixed = [said.copy() if i == place else p for i, p in enumerate(payloads)]
            there.put(mixed)
            assert (there.check() >= 0).all()
            out = [on_device(np.full(200, CANARY, np.float32))]
            there.decode(out)
            expected = host_decode(compressor, mixed, 200)
            assert np.isnan(expected).all() == is_bad
            np.testing.assert_array_equal(to_host(out[0]), expected)


@pytest.mark.parametrize(("numels", "group"), [([300, 100], 64), ([20000], 20000), ([33], 10)])
@both
def test_a_bad_number_leaves_what_can_be_taken_back(numels, group, made):
    rng = np.random.default_rng(4)
    compressor = made(group=group)
    there = Tables(compressor, numels, group)
    residuals, gradients = values(rng, numels, factor=0.1), values(rng, numels)
    gradients[0][5] = float("nan")
    before = [to_host(r) + to_host(g) for r, g in zip(residuals, gradients, strict=True)]
    before[0][5] = to_host(residuals[0])[5]
    payloads = there.encode(residuals, gradients)
    assert len(payloads[0]) == HEADER
    assert there.launch.state.cpu().numpy()[0, FOUND] == SUMMED | 1
    there.rows[:, ADD] = 1
    there.decode(residuals, force=True)
    for residual, expected in zip(residuals, before, strict=True):
        np.testing.assert_allclose(to_host(residual), expected, atol=1e-6)


@both
def test_a_body_of_another_size_is_refused(made):
    rng = np.random.default_rng(5)
    compressor, group = made(group=64, error_feedback=False), 64
    there = Tables(compressor, [200], group)
    payload = received(compressor, [200], group, 1, rng)[0]
    short = payload[:-8].copy()
    short[16:24].view(np.int64)[0] = short.size
    short.view(np.uint64)[0] &= ~(np.uint64(SUMMED) << np.uint64(48))
    short[36:40].view(np.uint32)[0] = checksum(short.view(np.uint64), 4)
    sum_in_parts(np.array([short.ctypes.data]), np.array([short.size]))
    assert short[6] & SUMMED
    there.put([short])
    assert there.check()[0] == -1
    out = torch.full((200,), CANARY, device=DEVICE)
    there.put([payload])
    assert there.check()[0] == SUMMED
    there.decode([out])
    assert np.array_equal(to_host(out), compressor.decode(payload))
