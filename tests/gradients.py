"""Gradients of the ranks of a step, the same each time."""

from __future__ import annotations

import numpy as np

SHAPE = (37, 101)


def arrays(ranks: int, step: int, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> list[np.ndarray]:
    return [np.random.default_rng([rank, step]).standard_normal(shape).astype(dtype) for rank in range(ranks)]
