"""What workers of all frameworks share: settings, shapes, gradients that are known on every rank."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvd_compress import BF16, QSGD, Adaptive, OneBit, Percentile, PowerSGD, RandomK, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.elastic import note_parting

COMPRESSORS: dict[str, Compressor] = {
    "onebit": OneBit(),
    "threshold": Threshold(0.5),
    "adaptive": Adaptive(pi=16),
    "qsgd": QSGD(bits=4),
    "topk": TopK(ratio=0.05),
    "percentile": Percentile(90),
    "percentile-feedback": Percentile(90, error_feedback=True),
    "adaptive-golomb": Adaptive(pi=16, coding="golomb"),
    "topk-golomb": TopK(ratio=0.05, coding="golomb"),
    "qsgd-elias": QSGD(bits=4, coding="elias"),
    "bf16": BF16(),
    "powersgd": PowerSGD(rank=2),
    "randomk": RandomK(ratio=0.05),
}
EXCHANGES = ("two_phase", "allgather")
# those of `COMPRESSORS_AND_EXCHANGES` that show each kind of payload once, and both exchanges
WITNESSES = [
    "onebit-two_phase", "adaptive-golomb-allgather", "qsgd-elias-two_phase", "topk-allgather", "powersgd-two_phase",
    "randomk-allgather",
]  # fmt: skip
COMPRESSORS_AND_EXCHANGES = {f"{c}-{e}": (COMPRESSORS[c], e) for c in COMPRESSORS for e in EXCHANGES}
# each compressor once, by one of the exchanges in turn, and the ones above
EACH_ONCE = list(dict.fromkeys([*(f"{c}-{EXCHANGES[i % 2]}" for i, c in enumerate(COMPRESSORS)), *WITNESSES]))

# weights above, biases below; no size is a multiple of the number of ranks, of a group or of 8
MIN_NUMEL = 1000
SHAPES = {"first.weight": (48, 601), "first.bias": (48,), "second.weight": (37, 803), "second.bias": (37,)}


def numbers(name: str, rank: int, step: int, shape: Sequence[int]) -> np.ndarray:
    """The gradient of a parameter on a rank in a step, float32."""
    return _drawn(name, rank, step, tuple(shape)).copy()


@functools.lru_cache(maxsize=1024)
def _drawn(name: str, rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    # every rank asks for those of all ranks, in one case after the other: drawing them took longer than training
    rng = np.random.default_rng([zlib.crc32(name.encode()), rank, step])
    return rng.standard_normal(shape).astype(np.float32)


@contextmanager
def in_elastic_run() -> Iterator[None]:
    """As in a process that the driver of elastic runs has started."""
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]
        note_parting()


def ranks_of_start() -> int:
    """How many ranks were started, which `hvd.size()` tells only when process sets have been given."""
    return int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], *parts: str) -> None:
    """Fail unless the call raises an error of this kind that says all of these parts."""
    try:
        call()
    except kind as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"{kind} was not raised")
    missing = [part for part in parts if part not in said]
    assert not missing, f"this does not say {missing}: {said}"
