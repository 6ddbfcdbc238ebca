"""Lay the tensors of one dtype end to end, and cut them into the shares that the ranks of a node synchronize."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.tensors import ParameterSpec

__all__ = ["Array", "FlatTensors", "Piece", "Share", "kept_at"]

Array = npt.NDArray[Any]

# bit streams of pieces begin on byte boundaries
_UNIT = 8


class Piece(NamedTuple):
    """Describes the part of a tensor that lies in a share.

    Args:
        name: of the tensor.
        tensor: its index among all.
        within: its elements of the tensor, flat.
        at: its elements, of those laid end to end.
        shape: rows of the tensor, if the piece has whole ones.
    """

    name: str
    tensor: int
    within: slice
    at: slice
    shape: tuple[int, ...]

    def of(self, arrays: Sequence[Array]) -> Array:
        """Take this piece's values from the flat arrays of all tensors."""
        return arrays[self.tensor][self.within]


class Share(NamedTuple):
    """Describes what one rank of a node synchronizes.

    Args:
        pieces: of tensors.
        at: its elements, of those laid end to end.
    """

    pieces: tuple[Piece, ...]
    at: slice

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.at.stop - self.at.start)

    def place(self, piece: Piece) -> slice:
        """Return the elements of this share that one of its pieces has."""
        return slice(piece.at.start - self.at.start, piece.at.stop - self.at.start)


class FlatTensors:
    """Lays the tensors of one dtype end to end.

    Args:
        tensors: of a network.
        dtype: of those that are laid end to end.
        shares: into how many parts of about equal size to cut it.

    Example:
        >>> from hvd_compress.averaging.flat_tensors import FlatTensors
        >>> from hvd_compress.tensors import ParameterSpec
        >>> flat = FlatTensors([ParameterSpec("w", (10, 16)), ParameterSpec("b", (10,))], "float32", shares=2)
        >>> [[(p.name, p.shape) for p in share.pieces] for share in flat.shares]
        [[('w', (5, 16))], [('w', (5, 16)), ('b', (10,))]]
    """

    def __init__(self, tensors: Sequence[ParameterSpec], dtype: str, shares: int) -> None:
        self.dtype = np.dtype(dtype)
        self._tensors = [(i, t) for i, t in enumerate(tensors) if t.dtype == dtype]
        self._starts = list(accumulate((t.numel for _, t in self._tensors), initial=0))
        self.size = self._starts[-1]
        cuts = [self._cut(i * self.size / shares) for i in range(1, shares)]
        self.shares = [self._share(a, b) for a, b in pairwise([0, *cuts, self.size])]

    def gather(self, arrays: Sequence[Array], out: Array) -> None:
        """Copy the values of all tensors into one array."""
        for (i, _), (a, b) in zip(self._tensors, pairwise(self._starts), strict=True):
            out[a:b] = arrays[i]

    def views(self, array: Array) -> dict[int, Array]:
        """Return the parts of an array of all elements that its tensors have, by their numbers among all."""
        return {i: array[a:b] for (i, _), (a, b) in zip(self._tensors, pairwise(self._starts), strict=True)}

    def _cut(self, wanted: float) -> int:
        """Find an offset near the wanted one that divides no row of a tensor."""
        for (_, tensor), (a, b) in zip(self._tensors, pairwise(self._starts), strict=True):
            if a <= wanted < b:
                row = _row_of(tensor)
                unit = row if tensor.numel >= 2 * row else _UNIT
                return min(a + round((wanted - a) / unit) * unit, b)
        return self.size

    def _share(self, begin: int, end: int) -> Share:
        pieces = []
        for (i, tensor), (a, b) in zip(self._tensors, pairwise(self._starts), strict=True):
            start, stop = max(a, begin), min(b, end)
            if start < stop:
                within = slice(start - a, stop - a)
                pieces.append(Piece(tensor.name, i, within, slice(start, stop), _shape_of(tensor, within)))
        return Share(tuple(pieces), slice(begin, end))


def _row_of(tensor: ParameterSpec) -> int:
    return math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else _UNIT


def _shape_of(tensor: ParameterSpec, within: slice) -> tuple[int, ...]:
    count, row = within.stop - within.start, _row_of(tensor)
    if count == tensor.numel:
        return tensor.shape
    if len(tensor.shape) > 1 and within.start % row == 0 and count % row == 0:
        return (count // row, *tensor.shape[1:])
    return (count,)


def kept_at(values: Array | None, places: Iterable[slice]) -> Array | None:
    """Copy what lies at these places, and put zeros everywhere else; None if nothing is left."""
    if values is None:
        return None
    kept = np.zeros_like(values)
    for place in places:
        kept[place] = values[place]
    return kept if kept.any() else None
