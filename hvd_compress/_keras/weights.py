"""Weights of a Keras model as flat arrays, for callbacks that average them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress._keras.edge import Edge
from hvd_compress._keras.names import stable_name, unique
from hvd_compress.tensors import ParameterSpec

__all__ = ["Array", "arrays_of", "is_floating", "tensors_of", "write"]

Array = np.ndarray[Any, Any]


def arrays_of(edge: Edge, variables: Sequence[Any]) -> list[Array]:
    """Flat copies, float32 or float64."""
    values = [edge.values(v) for v in variables]
    return [np.array(x, np.float64 if x.dtype == np.float64 else np.float32).reshape(-1) for x in values]


def tensors_of(variables: Sequence[Any], arrays: Sequence[Array]) -> list[ParameterSpec]:
    """Names that are the same on all ranks, shapes and dtypes."""
    names = unique([stable_name(getattr(v, "path", None) or v.name) for v in variables])
    return [ParameterSpec(n, tuple(v.shape), str(x.dtype)) for n, v, x in zip(names, variables, arrays, strict=True)]


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Assign flat arrays."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array.reshape(tuple(variable.shape)))


def is_floating(variable: Any) -> bool:
    """Whether it has a mean."""
    return "float" in str(variable.dtype)
