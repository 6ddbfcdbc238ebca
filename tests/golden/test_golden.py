"""The bytes on the wire are frozen: what one release writes, every later one of the same wire version reads and writes.

Files hold the payloads of two steps with error feedback, and the residual after them as a payload of NoCompression.
Inputs are dyadic fractions, so that their sums are exact in any order. `pytest --write-golden` writes the files anew;
nothing else does, and a missing file is a failure.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hvd_compress
from hvd_compress import (
    BF16,
    FP16,
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
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    wire,
)
from hvd_compress.compressors import COMPRESSORS

FOLDER = Path(__file__).parent


def dyadic(shape: tuple[int, ...], step: int, dtype: type = np.float32) -> np.ndarray:
    """Multiples of 1/64 from -4 to 4 with zeros, ties and a few large ones; integers only, no generator."""
    i = np.arange(int(np.prod(shape)), dtype=np.int64) + 1000 * step
    values = (i * i * 31 + i * 17) % 513 - 256
    values[i % 97 == 0] = 0
    values[i % 331 == 5] *= 16
    return (values / 64).astype(dtype).reshape(shape)


CASES = {
    "onebit": (OneBit(), (5, 300)),
    "onebit-tensor": (OneBit(group="tensor"), (7, 111)),
    "onebit-group-13": (OneBit(group=13), (333,)),
    "onebit-sampled": (OneBit(sample=32), (2, 600)),
    "onebit-0-d": (OneBit(), ()),
    "onebit-empty": (OneBit(), (0, 4)),
    "threshold": (Threshold(tau=0.75), (5, 300)),
    "threshold-two-groups": (Threshold(tau=60.0), (33000,)),
    "adaptive": (Adaptive(pi=64), (5, 300)),
    "adaptive-pi-4": (Adaptive(pi=4, group=100, sample=16), (5, 300)),
    "adaptive-32-bit": (Adaptive(pi=1024, group="tensor"), (33000,)),
    "topk": (TopK(ratio=0.02), (5, 300)),
    "topk-two-blocks": (TopK(k=40), (66000,)),
    "chunked": (ChunkedTopK(ratio=0.1, chunk=256), (5, 300)),
    "chunked-1-bit": (ChunkedTopK(0.05, 4096, 1), (5, 1000)),
    "chunked-4-bits": (ChunkedTopK(0.1, 100, 4), (333,)),
    "chunked-golomb": (ChunkedTopK(ratio=0.1, chunk=256, coding="golomb"), (5, 300)),
    "percentile": (Percentile(90), (5, 300)),
    "percentile-99": (Percentile(99), (5, 300)),
    "percentile-feedback": (Percentile(75, error_feedback=True), (333,)),
    "percentile-golomb": (Percentile(90, coding="golomb"), (5, 300)),
    "percentile-99-golomb": (Percentile(99, coding="golomb"), (3000,)),
    **{f"qsgd-{bits}": (QSGD(bits=bits, bucket_numel=128), (3, 100)) for bits in range(1, 9)},
    "qsgd-4-max": (QSGD(norm="max", seed=9), (700,)),
    "threshold-golomb": (Threshold(tau=0.75, coding="golomb"), (5, 300)),
    "adaptive-golomb": (Adaptive(pi=4, coding="golomb"), (5, 300)),
    "adaptive-golomb-32-bit": (Adaptive(pi=1024, group="tensor", coding="golomb"), (33000,)),
    "topk-golomb": (TopK(ratio=0.1, coding="golomb"), (5, 300)),
    "qsgd-1-elias": (QSGD(bits=1, bucket_numel=128, coding="elias"), (3, 100)),
    "qsgd-4-elias": (QSGD(bits=4, bucket_numel=128, coding="elias"), (3, 100)),
    "qsgd-2-elias-omega": (QSGD(bits=2, bucket_numel=32768, coding="elias"), (33000,)),
    "qsgd-7-elias-dense": (QSGD(bits=7, bucket_numel=128, coding="elias"), (3, 100)),
    "randomk": (RandomK(ratio=0.1, seed=3), (5, 300)),
    "efsignsgd": (EFSignSGD(), (5, 300)),
    "efsignsgd-group-13": (EFSignSGD(group=13), (333,)),
    "blockwise-8": (Blockwise(), (5, 300)),
    "blockwise-4": (Blockwise(bits=4, block=24), (3, 100)),
    "blockwise-4-hadamard": (Blockwise(bits=4, block=64, hadamard=True), (5, 300)),
    "terngrad": (TernGrad(), (5, 300)),
    "terngrad-unclipped": (TernGrad(group=13, clip=None), (333,)),
    "natural": (Natural(), (5, 300)),
    "signsgd": (SignSGD(scale=0.25), (5, 300)),
    "signsgd-feedback": (SignSGD(error_feedback=True, seed=2), (333,)),
    "fp16": (FP16(), (3, 100)),
    "bf16": (BF16(), (3, 100)),
    "none": (NoCompression(), (3, 100)),
}
every_case = pytest.mark.parametrize("name", CASES)
# the residual of these would make files of hundreds of kilobytes; its sum says enough
LARGE = 10_000


def encoded(name: str, dtype: type = np.float32) -> bytes:
    compressor, shape = CASES[name]
    residual = np.zeros(shape, dtype) if compressor.feedback else None
    steps = [
        compressor.encode(dyadic(shape, step, dtype), residual, Key(seed=compressor.seed, name="golden", step=step))
        for step in range(2)
    ]
    if residual is not None:
        small = residual.size <= LARGE
        steps.append(NoCompression().encode(residual if small else residual.reshape(-1)[:1000]))
    return b"".join(payload.tobytes() for payload in steps)


def nonfinite() -> bytes:
    x = dyadic((3, 100), 0)
    x[1, 7] = np.nan
    return b"".join(c.encode(x).tobytes() for c in (OneBit(), Threshold(1.0), Adaptive(), TopK(), QSGD(), BF16()))


SPECIAL = {"float64": lambda: encoded("onebit", np.float64) + encoded("none", np.float64), "nonfinite": nonfinite}


def check(name: str, actual: bytes, write: bool) -> None:
    path = FOLDER / f"{name}.bin"
    if write:
        path.write_bytes(actual)
    if not path.exists():
        pytest.fail(f"{path} is missing; if it is a new case, write it with --write-golden and commit it")
    expected = path.read_bytes()
    if actual != expected:
        pairs = enumerate(zip(actual, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(actual), len(expected)))
        pytest.fail(
            f"{path.name}: bytes differ from {at} on ({len(actual)} bytes now, {len(expected)} frozen). If the change "
            "is deliberate, raise the wire version and write the file anew with --write-golden"
        )


@every_case
def test_bytes_are_frozen(name, request):
    check(name, encoded(name), request.config.getoption("--write-golden"))


@pytest.mark.parametrize("name", SPECIAL)
def test_special_bytes_are_frozen(name, request):
    check(name, SPECIAL[name](), request.config.getoption("--write-golden"))


@every_case
def test_frozen_payloads_decode_to_what_was_sent(name):
    """Readers are held to the files themselves: decoded plus kept is what went in, exactly where sums are exact."""
    compressor, shape = CASES[name]
    buffer = np.frombuffer((FOLDER / f"{name}.bin").read_bytes(), np.uint8)
    parts = wire.frames(buffer, 3 if compressor.feedback else 2)
    assert sum(p.size for p in parts) == buffer.size
    decoded = [hvd_compress.decode(part) for part in parts]
    assert all(d.shape == shape for d in decoded[:2])
    given = dyadic(shape, 0) + dyadic(shape, 1)
    if compressor.feedback:
        kept = decoded[2].reshape(-1)
        total = (decoded[0] + decoded[1]).reshape(-1)[: kept.size] + kept
        np.testing.assert_allclose(total, given.reshape(-1)[: kept.size], atol=2e-5)
    elif compressor.id == "percentile":
        for step, sent in enumerate(decoded):
            x = dyadic(shape, step)
            assert (sent == np.where(np.abs(x) > np.percentile(np.abs(x), compressor.percentile), x, sent)).all()
            assert set(sent[sent != x].tolist()) == {0}
    elif compressor.id == "natural":
        for step, sent in enumerate(decoded):
            x = dyadic(shape, step)
            assert (np.frexp(sent)[0][sent != 0] % 0.5 == 0).all(), "no power of two"
            assert ((np.abs(sent) < 2 * np.abs(x)) & (2 * np.abs(sent) > np.abs(x)) | (x == 0) & (sent == 0)).all()
    elif compressor.id == "signsgd":
        for step, sent in enumerate(decoded):
            x = dyadic(shape, step)
            assert (sent == np.where(x == 0, sent, np.sign(x) * compressor.scale)).all()
            assert 0 < (sent[x == 0] > 0).sum() < (x == 0).sum(), "zeros have signs at random"
    elif compressor.id == "terngrad":
        for step, sent in enumerate(decoded):
            assert (sent * dyadic(shape, step) >= 0).all()
    elif compressor.id != "qsgd":
        np.testing.assert_allclose(decoded[0] + decoded[1], given, rtol=1e-3)


def test_every_compressor_is_frozen():
    assert {type(c) for c, _ in CASES.values()} == set(COMPRESSORS.values())


@pytest.mark.parametrize("name", [name for name, (c, _) in CASES.items() if c.coding is not None])
def test_files_of_coded_cases_hold_coded_payloads(name):
    """A coded form that is not shorter is not sent, and a file of the plain form would freeze nothing new."""
    payload = np.frombuffer((FOLDER / f"{name}.bin").read_bytes(), np.uint8)
    assert payload[5] == CASES[name][0].coded_codec
    if name.startswith("qsgd"):
        form = {"omega": 2, "dense": 3}.get(name.rpartition("-")[2], 1)
        assert payload[29] == form


def test_no_file_is_left_over():
    assert {p.stem for p in FOLDER.glob("*.bin")} == set(CASES) | set(SPECIAL)


def test_wire_version_is_that_of_the_files():
    assert wire.VERSION == 1
    for path in FOLDER.glob("*.bin"):
        assert path.read_bytes()[:5] == b"hvdc\x01", path.name


def test_a_missing_or_changed_file_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(__name__ + ".FOLDER", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="is missing"):
        check("onebit", b"bytes", write=False)
    assert not list(tmp_path.iterdir()), "a missing file was written without being asked for"
    check("onebit", b"bytes", write=True)
    with pytest.raises(pytest.fail.Exception, match="differ from 4 on"):
        check("onebit", b"byteZ", write=False)
