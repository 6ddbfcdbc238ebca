"""Measure how fast this machine encodes and decodes now: seconds as lines of the number of elements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import FP16, Compressor, Key, NoCompression
from hvd_compress.cost.line import Line
from hvd_compress.kernels import cast

__all__ = ["Speed", "copy_speed", "measure_speed", "speed_of"]

Array = npt.NDArray[Any]

_SMALL, _LARGE = 2**14, 2**21  # the larger one and its residual and result exceed most caches, as gradients do
# the median of the means of some blocks: each is longer than a time slice of the system, since ranks that share cores
# share them in training too, and other programs come and go
_BLOCKS, _BLOCK_SECONDS, _MOST_CALLS = 5, 4e-3, 100
_COLUMNS, _SHORT_COLUMNS = 2048, 512
_SPREAD = 0.8  # deviation of the logarithm of rows' magnitudes, as in fully connected layers that learn MNIST
_NOTHING = Line()
_PAGE = 4096
_MAPPED = 2**25  # from so many bytes on, the C library gives memory back at once and asks for it anew each time


@dataclass(frozen=True)
class Speed:
    """Gives the seconds of a compressor's kernels by the number of elements, on one thread.

    Args:
        encode: with error feedback where the compressor has it.
        decode: into the result.
        add: decode, and add to a sum.
        bytes_per_element: of a large payload; the slots of payloads of changing size do not tell it.
        per_group: seconds that each group of elements adds to encoding.
        per_new_byte: seconds that each byte of a large result adds if it is not written over an older one.
    """

    encode: Line = _NOTHING
    decode: Line = _NOTHING
    add: Line = _NOTHING
    bytes_per_element: float = 4.0
    per_group: float = 0.0
    per_new_byte: float = 0.0

    def of_new_memory(self, nbytes: float) -> float:
        """Return the seconds that a new result of so many bytes costs besides."""
        return self.per_new_byte * nbytes if nbytes >= _MAPPED else 0.0

    def encoding(self, numel: float, groups: float) -> float:
        """Return the seconds to encode elements in groups."""
        return self.encode(numel) + self.per_group * groups

    def of_calls(self, calls: float) -> Speed:
        """Return the speed where so many calls of a kernel share the elements."""
        encode, decode, add = (Line(line.fixed * calls, line.per_unit) for line in (self.encode, self.decode, self.add))
        return replace(self, encode=encode, decode=decode, add=add)

    def numbers(self) -> list[float]:
        """Return all numbers in a row, to be compared between ranks; `from_numbers` is the inverse."""
        lines = (self.encode, self.decode, self.add)
        others = (self.bytes_per_element, self.per_group, self.per_new_byte)
        return [*(n for line in lines for n in (line.fixed, line.per_unit)), *others]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Speed:
        """Make the speed of `numbers`."""
        a, b, c, d, e, f, *others = numbers
        return cls(Line(a, b), Line(c, d), Line(e, f), *others)


@cache
def speed_of(compressor: Compressor) -> Speed:
    """Measure a compressor's speed, once in a process."""
    return measure_speed(compressor)


@cache
def copy_speed() -> Line:
    """Measure the seconds to copy float32 elements, once in a process: no kernel can be faster."""
    return _line(lambda x: (lambda out: lambda: np.copyto(out, x))(np.zeros_like(x)))


def measure_speed(compressor: Compressor) -> Speed:
    """Time the kernels on normal deviates of two sizes; some 100 ms, but for the first call, which compiles.

    FP16 and NoCompression are measured as Horovod does them: casts into new tensors, and nothing at all.
    """
    if isinstance(compressor, NoCompression):
        return Speed()
    if isinstance(compressor, FP16):
        return _cast_speed()
    deviation = compressor.typical_deviation
    # the deviation is one for all rows: with equal rows it is known how many values lie beyond a multiple of it
    values = _deviates() if deviation is None else np.float32(deviation) * _deviates(0.0)
    cases = [_Case(compressor, values[:n], columns) for n, columns in ((_SMALL, _COLUMNS), (_LARGE, _COLUMNS),
                                                                        (_LARGE, _SHORT_COLUMNS))]  # fmt: skip
    for case in cases:
        case.times()  # compiles, and touches the memory
    small, large, short = (_typical(case.times) for case in cases)
    more = cases[2].groups - cases[1].groups
    # of a short and a long measurement, another program may have disturbed one: elements take at least half of the time
    most = 0.5 * min(float(small[0]) / cases[0].groups, float(large[0]) / cases[1].groups)
    per_group = min(max(float(short[0] - large[0]), 0.0) / more, most) if more else 0.0
    small[0] -= per_group * cases[0].groups
    large[0] -= per_group * cases[1].groups
    encode, decode, add = (_through(a, b) for a, b in zip(small, large, strict=True))
    return Speed(encode, decode, add, cases[1].nbytes / _LARGE, per_group)


class _Case:
    """Holds the buffers of one size."""

    def __init__(self, compressor: Compressor, gradient: Array, columns: int) -> None:
        self.compressor = compressor
        # a copy: Numba cannot compile every kernel for an array that must not be written to
        self.gradient = gradient.copy()
        self.group = compressor.group_numel((gradient.size // columns, columns))
        self.groups = -(-gradient.size // self.group)
        self.before = 0.5 * np.roll(gradient, 12345)
        self.residual = self.before.copy() if compressor.feedback else None
        self.payload = np.zeros(compressor.capacity(gradient.size, self.group), np.uint8)
        self.out = np.zeros_like(gradient)
        self.nbytes = 0

    def times(self) -> tuple[float, float, float]:
        if self.residual is not None:
            np.copyto(self.residual, self.before)  # encoding renews it
        return (
            _seconds(self._encode),
            _seconds(lambda: self.compressor.decode_into(self.payload[: self.nbytes], self.out)),
            _seconds(lambda: self.compressor.decode_into(self.payload[: self.nbytes], self.out, add=True)),
        )

    def _encode(self) -> None:
        self.nbytes = self.compressor.encode_into(self.gradient, self.residual, self.payload, self.group, Key())


def _cast_speed() -> Speed:
    def encode(x: Array) -> Callable[[], object]:
        # a copy: Numba would compile the kernel once more for an array that must not be written to
        bits, halves = x.copy().view(np.uint32), np.empty(x.size, np.uint16)
        return lambda: cast.to_fp16(bits, halves)

    def decode(x: Array, add: bool) -> Callable[[], object]:
        halves, out = np.zeros(x.size, np.uint16), np.zeros_like(x)
        return lambda: cast.from_fp16(halves, np.float32(1), out, add)

    lines = (_line(encode), _line(lambda x: decode(x, False)), _line(lambda x: decode(x, True)))
    return Speed(*lines, bytes_per_element=2.0, per_new_byte=_seconds_per_new_byte())


def _seconds_per_new_byte() -> float:
    def touch() -> None:
        # not np.zeros, which asks for pages of another size than frameworks do
        np.frombuffer(bytearray(_MAPPED), np.uint8)[::_PAGE] = 1

    touch()
    return _typical_seconds(touch) / _MAPPED


def _line(call_for: Callable[[Array], Callable[[], object]]) -> Line:
    taken = []
    for numel in (_SMALL, _LARGE):
        call = call_for(_deviates()[:numel])
        call()
        taken.append(_typical_seconds(call))
    return _through(*taken)


def _through(small: float, large: float) -> Line:
    per_element = max(float(large - small), 0.0) / (_LARGE - _SMALL)
    return Line(max(float(small - per_element * _SMALL), 0.0), per_element)


def _typical(times: Callable[[], tuple[float, ...]]) -> npt.NDArray[np.float64]:
    """Call what returns the seconds of its parts, again and again; returns the typical seconds of each part."""
    blocks = []
    for _ in range(_BLOCKS):
        total, calls = np.array(times()), 1
        while calls < _MOST_CALLS and total.sum() < _BLOCK_SECONDS:
            total += times()
            calls += 1
        blocks.append(total / calls)
    typical: npt.NDArray[np.float64] = np.median(blocks, axis=0)
    return typical


def _typical_seconds(call: Callable[[], object]) -> float:
    return float(_typical(lambda: (_seconds(call),))[0])


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
