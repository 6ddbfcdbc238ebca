"""Align columns of text, and shorten the names in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_compress.compressors import Compressor

__all__ = ["short", "table"]


def short(compressor: Compressor) -> str:
    """Return the repr without settings that are at their default, but with the one that a compressor is known by.

    Example:
        >>> from hvd_compress import Adaptive, OneBit
        >>> from hvd_compress.cli.table import short
        >>> short(Adaptive()), short(OneBit(sample=128))
        ('Adaptive(pi=64)', 'OneBit(sample=128)')
    """
    fields = dataclasses.fields(compressor)  # type: ignore[arg-type]
    shown = []
    for i, field in enumerate(fields):
        value = getattr(compressor, field.name)
        if value != field.default or (i == 0 and type(value) in (int, float)):
            shown.append(f"{field.name}={value!r}")
    return f"{type(compressor).__name__}({', '.join(shown)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out columns as wide as they must be, the first `left` of them flush left, the others right.

    Example:
        >>> from hvd_compress.cli.table import table
        >>> print(table(["name", "bytes"], [["onebit", "8"]]))
        name    bytes
        onebit      8
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
