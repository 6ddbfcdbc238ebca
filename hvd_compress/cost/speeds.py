"""How fast this machine encodes and decodes now: seconds as lines of the number of elements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import FP16, Compressor, Key, NoCompression, Threshold
from hvd_compress.cost.line import Line
from hvd_compress.kernels import cast

__all__ = ["Speed", "copy_speed", "measure_speed", "speed_of"]

Array = npt.NDArray[Any]

_SMALL, _LARGE = 2**14, 2**21  # the larger one and its residual and result exceed most caches, as gradients do
_REPEATS = 5
# of a normal distribution 1 in 64 lies beyond it
_TAIL = 2.42
_COLUMNS, _SHORT_COLUMNS = 2048, 512
_SPREAD = 0.8  # of the logarithm of a row's magnitude, as in fully connected layers that learn MNIST
_NOTHING = Line()


@dataclass(frozen=True)
class Speed:
    """Seconds of a compressor's kernels by the number of elements, on one thread.

    Args:
        encode: with error feedback where the compressor has it.
        decode: into the result.
        add: decode, and add to a sum.
        bytes_per_element: of a large payload; what the slots of payloads of changing size do not say.
        per_group: seconds that each group of elements adds to encoding.
    """

    encode: Line = _NOTHING
    decode: Line = _NOTHING
    add: Line = _NOTHING
    bytes_per_element: float = 4.0
    per_group: float = 0.0

    def encoding(self, numel: float, groups: float) -> float:
        """Seconds to encode elements in groups."""
        return self.encode(numel) + self.per_group * groups

    def of_calls(self, calls: float) -> Speed:
        """The speed where so many calls of a kernel share the elements."""
        encode, decode, add = (Line(line.fixed * calls, line.per_unit) for line in (self.encode, self.decode, self.add))
        return replace(self, encode=encode, decode=decode, add=add)

    def numbers(self) -> list[float]:
        """All numbers in a row, to be compared between ranks; `from_numbers` is the inverse."""
        lines = (self.encode, self.decode, self.add)
        return [*(n for line in lines for n in (line.fixed, line.per_unit)), self.bytes_per_element, self.per_group]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Speed:
        """The speed of `numbers`."""
        a, b, c, d, e, f, size, group = numbers
        return cls(Line(a, b), Line(c, d), Line(e, f), size, group)


@cache
def speed_of(compressor: Compressor) -> Speed:
    """`measure_speed`, once in a process."""
    return measure_speed(compressor)


@cache
def copy_speed() -> Line:
    """Seconds to copy float32 elements, once measured in a process: what no kernel can be faster than."""
    return _line(lambda x: (lambda out: lambda: np.copyto(out, x))(np.zeros_like(x)))


def measure_speed(compressor: Compressor) -> Speed:
    """Time the kernels on normal deviates of two sizes; below 100 ms, but for the first call, which compiles.

    FP16 and NoCompression are those of Horovod: casts alone, and nothing.
    """
    if isinstance(compressor, NoCompression):
        return Speed()
    if isinstance(compressor, FP16):
        return _cast_speed()
    # a threshold is one for all rows: on equal rows it is known how many values lie beyond it
    values = compressor.tau / _TAIL * _deviates(0.0) if isinstance(compressor, Threshold) else _deviates()
    cases = [_Case(compressor, values[:n], columns) for n, columns in ((_SMALL, _COLUMNS), (_LARGE, _COLUMNS),
                                                                        (_LARGE, _SHORT_COLUMNS))]  # fmt: skip
    for case in cases:
        case.times()  # compiles, and touches the memory
    small, large, short = (np.min([case.times() for _ in range(_REPEATS)], axis=0) for case in cases)
    more = cases[2].groups - cases[1].groups
    per_group = max(float(short[0] - large[0]), 0.0) / more if more else 0.0
    small[0] -= per_group * cases[0].groups
    large[0] -= per_group * cases[1].groups
    encode, decode, add = (_through(a, b) for a, b in zip(small, large, strict=True))
    return Speed(encode, decode, add, cases[1].nbytes / _LARGE, per_group)


class _Case:
    """The buffers of one size."""

    def __init__(self, compressor: Compressor, gradient: Array, columns: int) -> None:
        self.compressor = compressor
        self.gradient = gradient
        self.group = compressor.group_numel((gradient.size // columns, columns))
        self.groups = -(-gradient.size // self.group)
        self.x = np.empty_like(gradient)
        self.residual = 0.5 * np.roll(gradient, 12345) if compressor.feedback else None
        self.payload = np.zeros(compressor.capacity(gradient.size, self.group), np.uint8)
        self.out = np.zeros_like(gradient)
        self.nbytes = 0

    def times(self) -> tuple[float, float, float]:
        np.copyto(self.x, self.gradient)  # encoding spoils it
        return (
            _seconds(self._encode),
            _seconds(lambda: self.compressor.decode_into(self.payload[: self.nbytes], self.out)),
            _seconds(lambda: self.compressor.decode_into(self.payload[: self.nbytes], self.out, add=True)),
        )

    def _encode(self) -> None:
        self.nbytes = self.compressor.encode_into(self.x, self.residual, self.payload, self.group, Key())


def _cast_speed() -> Speed:
    def encode(x: Array) -> Callable[[], object]:
        # a copy: Numba would compile the kernel once more for an array that must not be written to
        bits, halves = x.copy().view(np.uint32), np.empty(x.size, np.uint16)
        return lambda: cast.to_fp16(bits, halves)

    def decode(x: Array, add: bool) -> Callable[[], object]:
        halves, out = np.zeros(x.size, np.uint16), np.zeros_like(x)
        return lambda: cast.from_fp16(halves, np.float32(1), out, add)

    return Speed(_line(encode), _line(lambda x: decode(x, False)), _line(lambda x: decode(x, True)), 2.0)


def _line(call_for: Callable[[Array], Callable[[], object]]) -> Line:
    best = []
    for numel in (_SMALL, _LARGE):
        call = call_for(_deviates()[:numel])
        call()
        best.append(min(_seconds(call) for _ in range(_REPEATS)))
    return _through(*best)


def _through(small: float, large: float) -> Line:
    per_element = max(float(large - small), 0.0) / (_LARGE - _SMALL)
    return Line(max(float(small - per_element * _SMALL), 0.0), per_element)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@cache
def _deviates(spread: float = _SPREAD) -> Array:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(_LARGE, dtype=np.float32)
    # rows of gradients differ in magnitude, which makes some selections harder
    values.reshape(-1, _COLUMNS)[...] *= np.exp(spread * rng.standard_normal((_LARGE // _COLUMNS, 1), np.float32))
    values.setflags(write=False)
    return values
