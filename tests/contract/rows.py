"""The table of the contract: one row per configuration, with the bytes that the issue and the papers allow it.

A new compressor is one row here. The bounds are typed from the documentation, they never ask the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvd_compress import (
    BF16,
    FP16,
    QSGD,
    Adaptive,
    Blockwise,
    ChunkedTopK,
    EFSignSGD,
    Natural,
    NoCompression,
    OneBit,
    Percentile,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_compress.compressors import Compressor

Bound = Callable[[np.ndarray, int], float]
"""From the array and the elements per group to the most bytes of a body."""


@dataclass(frozen=True)
class Row:
    """A configuration under contract.

    Args:
        id: readable, unique.
        compressor: the configuration.
        body: the most bytes of a body.
        exceeds_dense: why its payload may be larger than the float32 gradient, or "" if it must not be.
        largest: finite magnitudes beyond it are documented to become infinite.
    """

    id: str
    compressor: Compressor
    body: Bound
    exceeds_dense: str = ""
    largest: float = np.inf


def _groups(x: np.ndarray, group: int) -> int:
    return math.ceil(x.size / group) if x.size else 0


def _onebit(x: np.ndarray, group: int) -> float:
    return math.ceil(x.size / 8) + 8 * _groups(x, group)


def _threshold(tau: float) -> Bound:
    def bound(x: np.ndarray, group: int) -> float:
        # residuals of the contract are at most 1/16 of a normal deviate
        sent = np.count_nonzero(np.abs(x.astype(np.float64)) > tau / 2)
        return 2 * sent + 4 * math.ceil(x.size / 32768)

    return bound


def _adaptive(pi: int) -> Bound:
    def bound(x: np.ndarray, group: int) -> float:
        entry, table = (2, 10) if group <= 32768 else (4, 12)
        # both signs round up, so up to two entries of a group are above the proportion
        sent = min(x.size, x.size / pi + 2 * _groups(x, group))
        return entry * sent + table * _groups(x, group)

    return bound


def _topk(kept: Callable[[int], int]) -> Bound:
    return lambda x, group: 6 * kept(x.size) + 4 * math.ceil(x.size / 65536)


def _chunked(thousandths: int, bits: int, index: int) -> Bound:
    """An index and a value for each entry, and for each chunk its count, base and (from 2 bits on) step."""

    def bound(x: np.ndarray, group: int) -> float:
        sizes = [min(group, x.size - start) for start in range(0, x.size, group)]
        kept = sum(max(1, math.ceil(n * thousandths / 1000)) for n in sizes)
        # its words are filled up
        return (index + bits) * kept / 8 + 7 + (6 if bits == 1 else 10) * len(sizes)

    return bound


def _qsgd(bits: int) -> Bound:
    # eight codes fill `bits` bytes
    return lambda x, group: bits * math.ceil(x.size / 8) + 4 * _groups(x, group)


def _ternary(x: np.ndarray, group: int) -> float:
    return 2 * x.size + 10 * _groups(x, group)


def _ternary_elias(x: np.ndarray, group: int) -> float:
    # a gap of g takes at most 2 * g - 1 bits, and its sign one
    return x.size / 4 + 4 * _groups(x, group)


def _threshold_golomb(x: np.ndarray, group: int) -> float:
    # at most a unary gap and a sign for each element
    return x.size / 4 + 4 * math.ceil(x.size / 32768)


def _topk_golomb(kept: Callable[[int], int]) -> Bound:
    # a gap never takes more than the 2 bytes of an index, nor all of them more than a bit an element and entry
    return lambda x, group: min(6 * kept(x.size), 4.125 * kept(x.size) + x.size / 8) + 4 * math.ceil(x.size / 65536)


def _percentile(thousandths: int, golomb: bool = False) -> Bound:
    """A value and a bit, or from 1 in 16 on a value and 16 bits, with the share to be dropped in thousandths."""

    def bound(x: np.ndarray, group: int) -> float:
        kept = max(1, x.size - x.size * thousandths // 1000)
        plain = x.size / 8 if 16 * kept > x.size else 2 * kept + 4 * math.ceil(x.size / 65536)
        # a bit for each entry, and at most one for each element and the parameter's share of 2**k elements
        coded = 0.25 * kept + x.size / 8 + 4 * math.ceil(x.size / 65536)
        return 4 * kept + (min(plain, coded) if golomb else plain)

    return bound


def _randomk(ratio: float) -> Bound:
    return lambda x, group: 8 + 4 * max(1, math.ceil(ratio * x.size))


def _halves(x: np.ndarray, group: int) -> float:
    return 2 * x.size


def _whole(x: np.ndarray, group: int) -> float:
    return x.size * (8 if x.dtype == np.float64 else 4)


def _efsignsgd(x: np.ndarray, group: int) -> float:
    return math.ceil(x.size / 8) + 4 * _groups(x, group)


def _blockwise(bits: int) -> Bound:
    return lambda x, group: bits * math.ceil(x.size / 8) + 4 * _groups(x, group)


def _terngrad(x: np.ndarray, group: int) -> float:
    # five elements in a byte, and each group begins a new one
    return x.size / 5 + 5 * _groups(x, group)


def _natural(x: np.ndarray, group: int) -> float:
    return x.size + _groups(x, group)


def _signsgd(x: np.ndarray, group: int) -> float:
    return math.ceil(x.size / 8)


_TINY_GROUPS = "the user asked for groups so small that their tables are larger than what they describe"
_TINY_VALUES = "8 bytes say which entries were drawn, however few there are"
_EVERYTHING = "the user asked for every entry of a small tensor, with its place"

ROWS = (
    Row("onebit", OneBit(), _onebit),
    Row("onebit-tensor", OneBit(group="tensor"), _onebit),
    Row("onebit-group-13", OneBit(group=13), _onebit),
    Row("onebit-group-1", OneBit(group=1), _onebit, _TINY_GROUPS),
    Row("onebit-sampled", OneBit(sample=64), _onebit),
    Row("onebit-no-feedback", OneBit(error_feedback=False), _onebit),
    Row("threshold", Threshold(tau=0.5), _threshold(0.5)),
    Row("threshold-small", Threshold(tau=1e-30), _threshold(0.0)),
    Row("threshold-golomb", Threshold(tau=0.5, coding="golomb"), _threshold_golomb),
    Row("threshold-golomb-small", Threshold(tau=1e-30, coding="golomb"), _threshold_golomb),
    Row("threshold-no-feedback", Threshold(tau=1.5, error_feedback=False), _threshold(1.5)),
    Row("adaptive", Adaptive(), _adaptive(64)),
    Row("adaptive-tensor", Adaptive(group="tensor"), _adaptive(64)),
    Row("adaptive-pi-2-group-33", Adaptive(pi=2, group=33), _adaptive(2)),
    Row("adaptive-pi-2-group-1", Adaptive(pi=2, group=1), _adaptive(2), _TINY_GROUPS),
    Row("adaptive-golomb", Adaptive(coding="golomb"), _adaptive(64)),
    Row("adaptive-golomb-pi-4-tensor", Adaptive(pi=4, group="tensor", coding="golomb"), _adaptive(4)),
    Row("adaptive-unsampled", Adaptive(pi=16, sample=None), _adaptive(16)),
    Row("adaptive-no-feedback", Adaptive(pi=1024, error_feedback=False), _adaptive(1024)),
    Row("topk", TopK(), _topk(lambda n: math.ceil(0.01 * n))),
    Row("topk-k-100", TopK(k=100), _topk(lambda n: min(n, 100)), _EVERYTHING),
    Row("topk-all", TopK(ratio=1.0), _topk(lambda n: n), _EVERYTHING),
    Row("topk-golomb", TopK(ratio=0.1, coding="golomb"), _topk_golomb(lambda n: math.ceil(0.1 * n))),
    Row("topk-golomb-all", TopK(ratio=1.0, coding="golomb"), _topk_golomb(lambda n: n), _EVERYTHING),
    Row("topk-no-feedback", TopK(ratio=0.1, error_feedback=False), _topk(lambda n: math.ceil(0.1 * n))),
    Row("chunked", TopK(chunk=4096, ratio=1 / 64, value_bits=2), _chunked(16, 2, 12)),
    Row("chunked-1-bit", ChunkedTopK(0.1, 4096, 1), _chunked(100, 1, 12)),
    Row("chunked-8-bits-chunk-32768", ChunkedTopK(0.01, 32768, 8), _chunked(10, 8, 15)),
    Row("chunked-3-bits-chunk-100-all", ChunkedTopK(1.0, 100, 3), _chunked(1000, 3, 7)),
    Row("chunked-chunk-8", ChunkedTopK(0.25, 8, 4), _chunked(250, 4, 3), _TINY_GROUPS),
    Row("chunked-golomb", ChunkedTopK(coding="golomb"), _chunked(16, 2, 12)),
    Row("chunked-no-feedback", ChunkedTopK(0.1, 1000, error_feedback=False), _chunked(100, 2, 10)),
    Row("percentile", Percentile(90), _percentile(900)),
    Row("percentile-99", Percentile(99), _percentile(990)),
    Row("percentile-feedback", Percentile(75, error_feedback=True), _percentile(750)),
    Row("percentile-999-feedback", Percentile(99.9, error_feedback=True), _percentile(999)),
    Row("percentile-5", Percentile(5), _percentile(50), _EVERYTHING),
    Row("percentile-golomb", Percentile(90, coding="golomb"), _percentile(900, golomb=True)),
    Row("percentile-99-golomb", Percentile(99, True, "golomb"), _percentile(990, golomb=True)),
    Row("qsgd-1", QSGD(bits=1), _ternary),
    Row("qsgd-1-max-bucket-8", QSGD(bits=1, norm="max", bucket_numel=8), _ternary),
    Row("qsgd-1-elias", QSGD(bits=1, coding="elias"), _ternary_elias),
    Row("qsgd-1-elias-one-bucket", QSGD(bits=1, bucket_numel=2**24, coding="elias"), _ternary_elias),
    Row("qsgd-2-elias", QSGD(bits=2, coding="elias"), _qsgd(2)),
    Row("qsgd-4-elias", QSGD(coding="elias"), _qsgd(4)),
    Row("qsgd-8-elias", QSGD(bits=8, coding="elias"), _qsgd(8)),
    Row("qsgd-8-max-elias", QSGD(bits=8, norm="max", bucket_numel=64, coding="elias"), _qsgd(8)),
    Row("qsgd-2", QSGD(bits=2), _qsgd(2)),
    Row("qsgd-3", QSGD(bits=3, bucket_numel=24), _qsgd(3)),
    Row("qsgd-4", QSGD(), _qsgd(4)),
    Row("qsgd-5-max", QSGD(bits=5, norm="max"), _qsgd(5)),
    Row("qsgd-6", QSGD(bits=6, bucket_numel=32768), _qsgd(6)),
    Row("qsgd-7", QSGD(bits=7, seed=3), _qsgd(7)),
    Row("qsgd-8-max", QSGD(bits=8, norm="max", bucket_numel=64), _qsgd(8)),
    Row("randomk", RandomK(), _randomk(0.01), _TINY_VALUES),
    Row("randomk-all", RandomK(ratio=1.0), _randomk(1.0), _EVERYTHING),
    Row("randomk-seed", RandomK(ratio=0.1, seed=7), _randomk(0.1), _TINY_VALUES),
    Row("randomk-no-feedback", RandomK(ratio=0.1, error_feedback=False), _randomk(0.1), _TINY_VALUES),
    Row("fp16", FP16(), _halves, largest=65504.0),
    Row("bf16", BF16(), _halves),
    Row("bf16-no-feedback", BF16(error_feedback=False), _halves),
    Row("none", NoCompression(), _whole),
    Row("efsignsgd", EFSignSGD(), _efsignsgd),
    Row("efsignsgd-tensor", EFSignSGD(group="tensor"), _efsignsgd),
    Row("efsignsgd-group-13", EFSignSGD(group=13), _efsignsgd),
    Row("efsignsgd-group-1", EFSignSGD(group=1), _efsignsgd, _TINY_GROUPS),
    Row("efsignsgd-no-feedback", EFSignSGD(error_feedback=False), _efsignsgd),
    Row("signsgd", SignSGD(), _signsgd),
    Row("signsgd-feedback", SignSGD(scale=0.5, error_feedback=True), _signsgd),
    Row("terngrad", TernGrad(), _terngrad),
    Row("terngrad-tensor-unclipped", TernGrad(group="tensor", clip=None, seed=5), _terngrad),
    Row("terngrad-group-13", TernGrad(group=13), _terngrad),
    Row("terngrad-group-1", TernGrad(group=1), _terngrad, _TINY_GROUPS),
    Row("natural", Natural(), _natural),
    Row("natural-seed", Natural(seed=7), _natural),
    Row("blockwise-8", Blockwise(), _blockwise(8)),
    Row("blockwise-4-block-24", Blockwise(bits=4, block=24), _blockwise(4)),
    Row("blockwise-4-hadamard", Blockwise(bits=4, block=128, hadamard=True), _blockwise(4)),
    Row("blockwise-8-hadamard", Blockwise(block=8, hadamard=True), _blockwise(8)),
    Row("blockwise-4-no-feedback", Blockwise(bits=4, block=32768, error_feedback=False), _blockwise(4)),
)

_WITNESSES = {
    "onebit", "onebit-tensor", "onebit-group-1", "onebit-no-feedback", "threshold", "threshold-small",
    "threshold-golomb", "threshold-golomb-small", "adaptive", "adaptive-tensor", "adaptive-golomb",
    "adaptive-golomb-pi-4-tensor", "topk", "topk-all", "topk-golomb", "chunked", "chunked-8-bits-chunk-32768",
    "chunked-golomb", "percentile", "percentile-feedback", "percentile-golomb", "qsgd-1", "qsgd-1-elias",
    "qsgd-1-elias-one-bucket", "qsgd-4", "qsgd-4-elias", "randomk", "randomk-all", "fp16", "bf16", "none", "efsignsgd",
    "efsignsgd-tensor", "signsgd", "signsgd-feedback", "terngrad", "terngrad-tensor-unclipped", "natural",
    "blockwise-8", "blockwise-4-hadamard",
}  # fmt: skip
ONE_FOR_EACH_KERNEL = [row for row in ROWS if row.id in _WITNESSES]
"""Rows of which each has a kernel, or a way through one, that none of the others has."""
if len(ONE_FOR_EACH_KERNEL) != len(_WITNESSES):
    raise ValueError("a witness has no row")
