"""Name what is compared, in tables and plots, and give the `compression=` that a name stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from measure import ALONE, AUTO, DENSE, FP16, FP32, OWN_DENSE

from hvd_compress import FP16 as HALF
from hvd_compress import QSGD, Adaptive, Auto, NoCompression, OneBit, Percentile, PowerSGD, Threshold, TopK
from hvd_compress.compressors import Compressor

__all__ = ["COMPRESSORS", "NAMED", "compression_of", "style", "with_references"]

COMPRESSORS: dict[str, Compressor] = {
    "one-bit": OneBit(),
    "one-bit, sampled": OneBit(sample=128),
    "adaptive(64)": Adaptive(pi=64),
    "adaptive(64), not sampled": Adaptive(pi=64, sample=None),
    "adaptive(64), coded": Adaptive(pi=64, coding="golomb"),
    "top-k 1 %": TopK(ratio=0.01),
    "top-k 1 %, coded": TopK(ratio=0.01, coding="golomb"),
    "percentile 90": Percentile(90),
    **{f"our PowerSGD, rank {rank}": PowerSGD(rank=rank) for rank in (1, 2, 4)},
    "QSGD 4 bits": QSGD(bits=4),
    "QSGD 4 bits, coded": QSGD(bits=4, coding="elias"),
    # leaves 1/32 of the uniform values in [-4, 4] of allreduce.py, as in the paper's figure 2
    "threshold": Threshold(tau=3.875),
    # the paper's tau for its training, figures 3 and 4
    "threshold(0.001)": Threshold(tau=0.001),
}


NAMED = [ALONE, *DENSE, *COMPRESSORS]
"""What a user may ask for by name."""


def with_references(names: Sequence[str]) -> list[str]:
    """Return candidates with those in front that all others are compared with."""
    return list(dict.fromkeys([ALONE, *DENSE, *names]))


def compression_of(name: str) -> Any:
    """Return the `compression=` that a name stands for; needs Horovod for torch."""
    import horovod.torch as horovod

    others = {FP32: horovod.Compression.none, FP16: horovod.Compression.fp16, AUTO: Auto()}
    others |= zip(OWN_DENSE, (NoCompression(), HALF()), strict=True)
    return others.get(name) or COMPRESSORS[name]


def style(name: str) -> dict[str, Any]:
    """Say how a plot draws a candidate: a colour for each method, other dashes for its variants."""
    method, _, variant = name.partition(",")
    methods = (ALONE, *DENSE, "one-bit", "adaptive(64)", "top-k 1 %", "QSGD 4 bits", "threshold", "torch", "percentile")
    hues = ("blue", "red", "green", "purple", "brown", "orange", "cyan")
    colours = ("0.6", "black", "0.4", *(f"tab:{hue}" for hue in hues))
    known = next((i for i, known in enumerate(methods) if method.startswith(known)), 0)
    dashed = (" sampled", " not sampled", " top-k 1 %", " by hvd_compress")
    dashes = {**dict.fromkeys(dashed, "--"), " coded": ":"}
    return {"label": name, "color": colours[known], "linestyle": dashes.get(variant, "-")}
