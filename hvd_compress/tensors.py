"""Parameters as those know them who average parameters: by name, shape and dtype."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hvd_compress import wire

__all__ = ["Tensor"]


class Tensor(NamedTuple):
    """A parameter as its name, shape and NumPy dtype, float32 or float64."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def raw_bytes(self) -> int:
        """Of a payload that has it whole."""
        return wire.header_bytes((1,)) + wire.padded(self.numel * np.dtype(self.dtype).itemsize)
