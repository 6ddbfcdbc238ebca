"""The discrete cosine transform of the chunks of a tensor, and the largest coefficients of each chunk."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["Chunks", "cosines"]


@cache
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The orthonormal DCT-II as a matrix (n, n): `cosines(n) @ x` transforms x, and its transpose transforms back."""
    # in float64, whatever the type: cosines of large arguments are not exact in float32
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi * k * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype=dtype, device=device)


class Chunks:
    """How a tensor is cut: a matrix into squares, anything with more dimensions as the matrix (first, rest).

    A vector is cut into pieces. Where a dimension is no multiple of the size, zeros stand behind it.

    Args:
        shape: of the tensor.
        size: of a chunk in each dimension, at most; a smaller dimension has one chunk of its own size.
    """

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        self._shape = shape
        self._rows, self._columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        self._height, self._width = min(size, self._rows) or 1, min(size, self._columns) or 1
        self.elements = self._height * self._width
        """Of a chunk."""
        self._square = size * size
        self._down, self._across = -(-self._rows // self._height), -(-self._columns // self._width)
        self.count = self._down * self._across

    def coefficients(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform a tensor; returns (chunks, elements)."""
        height, width = self._down * self._height, self._across * self._width
        matrix = tensor.reshape(self._rows, self._columns)
        padded = torch.nn.functional.pad(matrix, (0, width - self._columns, 0, height - self._rows))
        blocks = padded.view(self._down, self._height, self._across, self._width).transpose(1, 2)
        left, right = self._matrices(tensor)
        with _in_full_precision(tensor):
            return (left @ blocks @ right.T).reshape(self.count, self.elements)

    def restored(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Transform back; what would lie behind the tensor is left out."""
        left, right = self._matrices(coefficients)
        blocks = coefficients.reshape(self._down, self._across, self._height, self._width)
        with _in_full_precision(coefficients):
            restored = left.T @ blocks @ right
        matrix = restored.transpose(1, 2).reshape(self._down * self._height, self._across * self._width)
        return matrix[: self._rows, : self._columns].reshape(self._shape)

    def _matrices(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cosines(self._height, like.dtype, like.device), cosines(self._width, like.dtype, like.device)

    def kept(self, k: int) -> int:
        """How many coefficients of a chunk are kept if k of a square of the full size are: the same share."""
        return min(self.elements, max(1, round(k / self._square * self.elements)))

    def largest(self, coefficients: torch.Tensor, k: int) -> torch.Tensor:
        """Keep so many coefficients of each chunk as `kept(k)` says, those of largest magnitude; others become 0."""
        places = coefficients.abs().topk(self.kept(k), dim=1, sorted=False).indices
        return torch.zeros_like(coefficients).scatter_(1, places, coefficients.gather(1, places))


def _in_full_precision(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    # what is sent and what is kept would not add up to the momentum, where a step is made inside of an autocast
    try:
        return torch.autocast(tensor.device.type, enabled=False)
    except RuntimeError:
        # this kind of device has none
        return nullcontext()
