"""Awkward arrays: every dtype, shape and content that a gradient can have."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# of each dtype: a denormal (as float32 where the dtype has a wider range) and a huge finite value
_SMALL = {"float32": 1e-40, "float64": 1e-40, "float16": 6e-8, "bfloat16": 1e-40}
_HUGE = {"float32": 3e38, "float64": 3e38, "float16": 65504.0, "bfloat16": 3e38}


def _normal(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(n)


def _zeros(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return np.zeros(n)


def _equal(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return np.full(n, 0.75)


def _negative(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return -np.abs(rng.standard_normal(n)) - 0.125


def _denormal(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-9, 10, n) * _SMALL[name]


def _signed_zeros(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(n) % 3 == 0, -0.0, np.where(np.arange(n) % 3 == 1, 0.0, -0.5))


def _one_huge(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(n)
    if n:
        x[n // 2] = -_HUGE[name]
    return x


def _ties(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-2, 3, n) * 0.5


def _sparse(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
    """Mostly zeros, and two values, as the sum of few sparse payloads."""
    return np.where(rng.random(n) < 0.005, 0.75, 0.0) - np.where(rng.random(n) < 0.005, 0.25, 0.0)


def _one(value: float) -> Callable[[int, str, np.random.Generator], np.ndarray]:
    def make(n: int, name: str, rng: np.random.Generator) -> np.ndarray:
        x = rng.standard_normal(n)
        if n:
            x[2 * n // 3] = value
        return x

    return make


FINITE = {
    "normal": _normal,
    "all-zero": _zeros,
    "all-equal": _equal,
    "all-negative": _negative,
    "denormal": _denormal,
    "signed-zeros": _signed_zeros,
    "one-huge": _one_huge,
    "ties": _ties,
    "sparse": _sparse,
}
NONFINITE = {"inf": _one(np.inf), "minus-inf": _one(-np.inf), "nan": _one(np.nan)}
CONTENTS = FINITE | NONFINITE


def _strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.T).T


def _reversed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[::-1])[::-1]


def _plain(x: np.ndarray) -> np.ndarray:
    return x


SHAPES = {
    "0-d": ((), _plain),
    "empty": ((0,), _plain),
    "empty-2-d": ((3, 0, 5), _plain),
    "1": ((1,), _plain),
    "7": ((7,), _plain),
    "8": ((8,), _plain),
    "9": ((9,), _plain),
    "1x1x1": ((1, 1, 1), _plain),
    "prime": ((1009,), _plain),
    "prime-rows": ((13, 1031), _plain),
    "tall": ((4099, 3), _plain),
    "conv": ((6, 5, 3, 3), _plain),
    "strided": ((5, 401), _strided),
    "transposed": ((31, 129), _transposed),
    "reversed": ((2003,), _reversed),
}
THREE_MILLION = (1000, 3000)


def make(content: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """An array of this content, shape and dtype; the same for the same arguments."""
    n = int(np.prod(shape, dtype=np.int64))
    flat = CONTENTS[content](n, dtype, np.random.default_rng([seed, n]))
    return flat.astype(DTYPES[dtype]).reshape(shape)
