"""Say what predictions and trials come to: a sentence, a table, the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_compress import NoCompression
from hvd_compress.cli.predict import Prediction
from hvd_compress.cli.table import short, table
from hvd_compress.cli.units import show_bandwidth, show_bytes, show_seconds
from hvd_compress.cost import Network
from hvd_compress.engine import DEFAULT_MIN_NUMEL

__all__ = ["ONE_RANK", "TIME_ALONE", "advice", "as_fields", "report"]

ONE_RANK = "Don't compress: one rank exchanges nothing."
TIME_ALONE = "This is about time alone. Compression may cost accuracy: train a short stretch both ways, and compare."

# predictions and trials are not exact enough to tell smaller differences
_LEAST_GAIN = 1.05

Shape = tuple[int, ...]


def advice(rows: Sequence[Prediction]) -> str:
    """Write the plain sentence about a table whose first row is dense float32.

    Compressors have to be faster than the faster of float32 and fp16, which Horovod has itself.
    """
    dense, free = rows[0], _free(rows)
    leave = "Don't compress" if free is dense else "Use compression=hvd.Compression.fp16, which Horovod has itself"
    against = f"{_name(free)} {show_seconds(free.seconds)}"
    if free is not dense:
        against += f" and {_name(dense)} {show_seconds(dense.seconds)}"
    compressing = _compressing(rows)
    if not compressing:
        reason = f"no tensor has {DEFAULT_MIN_NUMEL:,} elements, from which on compressors take them (min_numel)"
        return f"{leave}: {reason}; a step takes with {against}."
    best = _best(compressing)
    gain, seconds = free.seconds / best.seconds, show_seconds(best.seconds)
    if 1 / _LEAST_GAIN < gain < _LEAST_GAIN:
        return f"{leave}: it is a tie, a step takes {seconds} with {_how(best)}, with {against}."
    if gain < 1:
        return f"{leave}: a step would take {seconds} with {_how(best)} at best, with {against}."
    sentence = f"Use {_how(best)}: a step takes {seconds}, {gain:.1f} times faster than {_name(free)}; with {against}."
    even = [row for row in compressing if row is not best and row.seconds < _LEAST_GAIN * best.seconds]
    if even:
        sentence += f" As fast, to 5 %: {'; '.join(map(_how, even))}."
    if math.isinf(best.break_even):
        return f"{sentence} It beats float32 at any bandwidth."
    return f"{sentence} It beats float32 below {show_bandwidth(best.break_even)}." if best.break_even > 0 else sentence


def _compressing(rows: Sequence[Prediction]) -> list[Prediction]:
    return [row for row in rows if row.compresses and not row.is_free]


def _free(rows: Sequence[Prediction]) -> Prediction:
    """Return the faster of float32 and fp16; float32 where it is a tie."""
    best = _best([row for row in rows if row.is_free])
    return rows[0] if rows[0].seconds < _LEAST_GAIN * best.seconds else best


def _pays(rows: Sequence[Prediction]) -> bool:
    """Tell whether a compressor is advised."""
    compressing = _compressing(rows)
    return bool(compressing) and _free(rows).seconds / _best(compressing).seconds >= _LEAST_GAIN


def report(shapes: Sequence[Shape], network: Network, rows: Sequence[Prediction], link: str, step: float) -> str:
    """Write what was looked at, the table and the sentence; no table where nothing can be compressed.

    Args:
        shapes: of the gradients.
        network: of the ranks.
        rows: of `predict` or `tried`; none for one rank.
        link: where the network's numbers come from.
        step: seconds of a step without communication; 0 if only exchanges are of interest.
    """
    hosts = f", {network.ranks_per_host} on each host" if network.ranks_per_host > 1 else ""
    numel = sum(math.prod(shape) for shape in shapes)
    lines = [f"{_count(len(shapes), 'tensor')}, {_count(numel, 'element')}, {_count(network.ranks, 'rank')}{hosts}"]
    if not rows:
        return "\n".join([*lines, ONE_RANK])
    if _compressing(rows):
        lines += [f"link: {link}; kernels: measured on this machine", _table(rows, step)]
    return "\n".join([*lines, f"{advice(rows)} {TIME_ALONE}" if _pays(rows) else advice(rows)])


def as_fields(
    shapes: Sequence[Shape], network: Network, rows: Sequence[Prediction], measured: bool, step: float
) -> dict[str, Any]:
    """Return the same for programs, see `hvd-compress advise --help`; arguments as `report`."""
    return {
        "tensors": len(shapes),
        "elements": sum(math.prod(shape) for shape in shapes),
        "ranks": network.ranks,
        "ranks_per_host": network.ranks_per_host,
        "link": "measured" if measured else "on paper",
        "step_seconds": step,
        "rows": [
            {
                "compressor": "none" if isinstance(row.compressor, NoCompression) else short(row.compressor),
                "exchange": row.exchange,
                "compresses": row.compresses and not isinstance(row.compressor, NoCompression),
                "sent_bytes": row.sent_bytes,
                "seconds": row.seconds,
                "tried": row.tried,
                "beats_float32": _beats(row.break_even),
                "beats_float32_below_bits_per_second": row.break_even if 0 < row.break_even < math.inf else None,
            }
            for row in rows
        ],
        "advice": advice(rows) if rows else ONE_RANK,
    }


def _table(rows: Sequence[Prediction], step: float) -> str:
    dense = rows[0]
    trials = any(row.tried for row in rows)
    cells = [
        [
            "none (float32)" if row is dense else short(row.compressor),
            row.exchange,
            show_bytes(row.sent_bytes),
            f"{dense.sent_bytes / row.sent_bytes:.1f}x",
            show_seconds(row.seconds),
            f"{dense.seconds / row.seconds:.2f}x",
            "" if row is dense else show_bandwidth(row.break_even),
            *(["tried" if row.tried else "predicted"] if trials else []),
        ]
        for row in rows
    ]
    head = [
        "compressor",
        "exchange",
        "sent/rank",
        "fewer",
        "step" if step else "exchange",
        "faster",
        "beats fp32 below",
    ]
    return table([*head, *(["how"] if trials else [])], cells, left=2)


def _beats(break_even: float) -> str | None:
    if math.isnan(break_even):
        return None
    return {0.0: "never", math.inf: "always"}.get(break_even, "below")


def _best(rows: Sequence[Prediction]) -> Prediction:
    return min(rows, key=lambda row: row.seconds)


def _name(row: Prediction) -> str:
    return "float32" if isinstance(row.compressor, NoCompression) else "fp16"


def _how(row: Prediction) -> str:
    how = f"compression={short(row.compressor)}"
    return how if row.exchange == "dense" else f'{how}, exchange="{row.exchange}"'


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
