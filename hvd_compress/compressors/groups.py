"""Say which elements of a tensor share reconstruction values: the papers' columns."""

from __future__ import annotations

import math

__all__ = ["group_numel"]

# Rows shorter than this are taken together, so that two means a group (8 bytes) cost at most 1/8 bit per element.
LEAST_ROW_GROUP = 512


def group_numel(shape: tuple[int, ...], group: str | int, most: int) -> int:
    """Return the elements per group for a tensor of `shape`; the last group may be shorter.

    "row" is one index of the first dimension: the weights into one neuron or filter, which the papers keep as a column.
    Short rows share a group, and rows longer than `most` are divided evenly; a one-dimensional tensor is one row.
    "tensor" is a single group. A number is used as it is.
    """
    numel = math.prod(shape)
    if numel <= 1:
        return 1
    if group == "tensor":
        return numel
    if group != "row":
        return min(int(group), numel)
    row = numel // shape[0] if len(shape) > 1 else numel
    if row < LEAST_ROW_GROUP:
        row *= -(-LEAST_ROW_GROUP // row)
    if row > most:
        row = -(-row // -(-row // most))
    return min(row, numel)
