"""Tables of payloads on a device beside the same ones on the host: a GPU where HVD_COMPRESS_TEST_GPU=1 is set, else
Triton's interpreter, see `conftest`, whose device memory is that of the host.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from hvd_compress.compressors import Compressor, Key
from hvd_compress.kernels import table
from hvd_compress.kernels.checksum import checksum_of_parts
from hvd_compress.kernels.cuda import feedback
from hvd_compress.kernels.cuda.launch import Launch
from hvd_compress.kernels.cuda.rows import FOUND, NBYTES

ON_GPU = os.environ.get("HVD_COMPRESS_TEST_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def upload(array):
    return torch.from_numpy(np.ascontiguousarray(array)).clone().to(DEVICE)


def empty(count, kind):
    return torch.empty(count, dtype=getattr(torch, kind), device=DEVICE)


class Tables:
    """Rows of `compressor` for gradients of these sizes on the device, and their payloads.

    Args:
        compressor: of all.
        shapes: of the tensors; one group size must be right for all.
        group: elements per group; that of the first shape by default.
        kind: of the gradients.
        senders: rows of each tensor, for decoding.
        fill: what payload memory holds before.
    """

    def __init__(self, compressor: Compressor, numels, group, kind="float32", senders=1, fill=0):
        self.compressor, self.group, self.kind = compressor, group, kind
        self.numels = list(numels)
        self.senders = senders
        self.room = [compressor.capacity(n, group) for n in numels for _ in range(senders)]
        starts = np.cumsum([0, *self.room])
        self.starts = starts[:-1]
        self.payloads = torch.full((int(starts[-1]) + 64,), fill, dtype=torch.uint8, device=DEVICE)
        rows = np.zeros((len(self.room), table.COLUMNS), np.int64)
        rows[:, table.NUMEL] = np.repeat(self.numels, senders)
        rows[:, table.GROUP] = group
        rows[:, table.LIMIT] = [compressor.limit_of(int(n), group) for n in rows[:, table.NUMEL]]
        rows[:, table.DIMENSIONS] = 1
        rows[:, table.ADD] = np.arange(len(rows)) % senders != 0
        rows[:, table.ROOM] = self.room
        rows[:, table.PAYLOAD] = self.payloads.data_ptr() + self.starts
        self.rows = rows
        self.launch = Launch(rows, upload, empty)
        self.kernels = compressor.device_kernels(group)

    def encode(self, xs, gradients=None, keys=None):
        """Encode tensors on the device; returns the payloads as NumPy arrays. `xs` are renewed with feedback."""
        self.rows[:, table.X] = [x.data_ptr() for x in xs]
        self.rows[:, table.GRADIENT] = 0 if gradients is None else [g.data_ptr() for g in gradients]
        for i, key in enumerate(keys or []):
            low, high = self.compressor.drawing_key(key).words()
            self.rows[i, table.KEY] = np.array(int(low) | int(high) << 32, np.uint64).view(np.int64)
        self.launch.place(self.rows, self.kind, gradients is not None)
        self.kernels.encode(self.launch)
        return self.taken()

    def taken(self):
        memory = self.payloads.cpu().numpy()
        state = self.launch.state.cpu().numpy()
        return [memory[at : at + n].copy() for at, n in zip(self.starts, state[:, NBYTES], strict=True)]

    def put(self, payloads):
        """Bring payloads into device memory, as if they had come."""
        for at, payload in zip(self.starts, payloads, strict=True):
            self.payloads[int(at) : int(at) + len(payload)] = torch.from_numpy(payload.copy()).to(DEVICE)

    def check(self):
        """Check what has come; returns what was found of each row: flags, or less than 0."""
        self.launch.place(self.rows, self.kind, False)
        self.launch.check(self.compressor.codec)
        self.kernels.verify(self.launch)
        return self.launch.state.cpu().numpy()[:, FOUND]

    def decode(self, outs, scale=1.0, force=False):
        """Decode what was checked, or encoded, into tensors on the device, one for each tensor."""
        self.rows[:, table.X] = np.repeat([out.data_ptr() for out in outs], self.senders)
        self.rows[:, table.GRADIENT] = 0
        self.launch.place(self.rows, {v: k for k, v in TYPES.items()}[outs[0].dtype], False)
        self.kernels.decode(self.launch, scale, force)


def host_encode(compressor, x, gradient, group, key=None):
    """Encode float32 arrays on the host; returns the payload. `x` is renewed where a gradient is given."""
    payload = np.zeros(compressor.capacity(x.size, group), np.uint8)
    if gradient is None:
        used = compressor.encode_into(x, None, payload, group, key or Key())
    else:
        used = compressor.encode_into(gradient, x, payload, group, key or Key())
    return payload[:used]


def host_decode(compressor, payloads, numel, scale=1.0):
    """Decode and add up payloads on the host."""
    out = np.zeros(numel, np.float32)
    for number, payload in enumerate(payloads):
        compressor.decode_into(payload, out, scale, add=number > 0)
    return out


def on_device(array, kind="float32"):
    """Return a copy of an array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).clone().to(TYPES[kind]).to(DEVICE)


CANARY = 77.0
BEFORE = 7.0  # what outputs hold before something is decoded into them


def resealed(payload):
    """Give a payload, whatever its bytes are, the header that devices check."""
    payload = payload.copy()
    payload[6] |= table.SUMMED
    payload.view(np.uint32)[9] = checksum_of_parts(payload.view(np.uint32), 9)
    return payload


def numel_of(payload):
    """Return the number of elements that a header states."""
    return int(payload[8:16].view(np.uint64)[0])


def framed(numel, kind="float32", unaligned=False):
    """Return memory for an output, and that with canaries around it."""
    whole = torch.full((numel + 129,), CANARY, dtype=TYPES[kind], device=DEVICE)
    begin = 65 if unaligned else 64
    whole[begin : begin + numel] = BEFORE
    return whole[begin : begin + numel], whole


def is_unharmed(whole):
    """Tell whether nobody has written to the canaries."""
    return bool((torch.cat([whole[:64], whole[-64:]]) == CANARY).all())


def wide(tensor):
    """Copy a tensor to the host, as float32."""
    return tensor.float().cpu().numpy().copy()


def assert_same_bits(actual, expected):
    """Compare all bits."""
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint32), np.asarray(expected).view(np.uint32))


def assert_same_values(actual, expected):
    """Compare bits, but those of NaN, which say nothing."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def assert_decoded(compressor, payloads, group, same, kind, scale, add, unaligned):
    """Decode payloads, a list for each tensor, on the device and on the host, and compare them with `same`."""
    numels = [numel_of(of_tensor[0]) for of_tensor in payloads]
    tables_there = Tables(compressor, numels, group, kind, len(payloads[0]))
    tables_there.put([resealed(p) for of_tensor in payloads for p in of_tensor])
    assert (tables_there.check() >= 0).all()
    if add:
        tables_there.rows[:, table.ADD] = 1
    frames = [framed(n, kind, unaligned) for n in numels]
    tables_there.decode([out for out, _ in frames], scale)
    for (out, whole), of_tensor in zip(frames, payloads, strict=True):
        expected = np.full(len(out), BEFORE, np.float32)
        for number, payload in enumerate(of_tensor):
            compressor.decode_into(payload, expected, scale, add=add or number > 0)
        same(wide(out), wide(torch.from_numpy(expected).to(TYPES[kind])))
        assert is_unharmed(whole)


def assert_taken_back(compressor, group, numels, rng, spoil):
    """Encode tensors of which `spoil` has made the first one's gradient bad, and take the step back on the device."""
    tables = Tables(compressor, numels, group)
    before = [0.1 * rng.standard_normal(n).astype(np.float32) for n in numels]
    gradients = [rng.standard_normal(n).astype(np.float32) for n in numels]
    spoil(gradients[0])
    residuals, given = [on_device(x) for x in before], [on_device(g) for g in gradients]
    assert [p.size > table.HEADER for p in tables.encode(residuals, given)] == [False, True]
    tables.rows[:, table.ADD] = 1
    tables.decode(residuals, 1.0, force=True)
    tables.rows[:, table.GRADIENT] = [g.data_ptr() for g in given]
    tables.launch.place(tables.rows, "float32", True)
    feedback.take_back(tables.launch)
    for residual, old in zip(residuals, before, strict=True):
        np.testing.assert_allclose(wide(residual), old, atol=1e-6)
