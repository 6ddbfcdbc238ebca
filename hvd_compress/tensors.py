"""Parameters as those know them who average parameters: by name, shape and dtype; and their mean over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire

__all__ = ["ParameterSpec", "averaged"]

Array = npt.NDArray[Any]


class ParameterSpec(NamedTuple):
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


def averaged(arrays: Sequence[Array], mean: Callable[[Array], Array]) -> list[Array]:
    """Means over ranks, flat, of arrays; `mean` is called once for all that share a dtype, if they have elements."""
    means: list[Array] = [np.empty(0)] * len(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        of_dtype = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        together = np.concatenate([arrays[i].reshape(-1) for i in of_dtype])
        found = mean(together) if together.size else together
        ends = np.cumsum([arrays[i].size for i in of_dtype])
        for i, part in zip(of_dtype, np.split(found, ends[:-1]), strict=True):
            means[i] = part
    return means
