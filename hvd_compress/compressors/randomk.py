"""Keep random entries, the same ones on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors.base import NOT_FINITE, Array, Body, Bytes, Compressor, add_gradient, top_count
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import check_feedback, check_int, check_real
from hvd_compress.compressors.tables import DeviceKernels

__all__ = ["RandomK"]

_ROUNDS = 6
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends the values of random entries without their indices, since all ranks draw the same entries in each step.

    The sum has no other entries either: what the owner of a sum sends on is exact, and does not grow with the number of
    ranks. What was not chosen is kept and added to the next gradient. Payload: 8 bytes, and 4 for each value. Source:
    Stich et al. 2018, section 2.1, rand-k with memory. In the paper each rank draws its own entries; here all draw the
    same ones, as in GRACE (Xu et al. 2021), from a counter of seed, tensor, part and step.

    Args:
        ratio: share of the elements to send, in (0, 1]; at least one is sent.
        seed: of the draws.
        error_feedback: keep what was not sent and add it to the next gradient ("float8" keeps it in 8 bits); else it is
            lost.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import RandomK
        >>> compressor = RandomK(ratio=0.5)
        >>> compressor.decode(compressor.encode(np.array([1.0, 2.0, 3.0, 4.0], np.float32)))
        array([0., 0., 3., 4.], dtype=float32)
    """

    ratio: float = 0.01
    seed: int = 0
    error_feedback: bool | str = True

    id: ClassVar[str] = "randomk"
    sends_entries: ClassVar[bool] = True
    codec: ClassVar[int] = 20

    def __post_init__(self) -> None:
        check_real(self, "ratio", self.ratio, above=0.0, most=1.0)
        check_int(self, "seed", self.seed, 0, 2**64 - 1)
        check_feedback(self, self.error_feedback)

    def keeping(self, share: float) -> RandomK:
        return replace(self, ratio=max(self.ratio, min(1.0, share)))

    def kept_share(self, numel: int) -> float:
        return top_count(numel, self.ratio) / max(numel, 1)

    def body_bytes(self, numel: int, group: int) -> int:
        return 8 + 4 * top_count(numel, self.ratio)

    def drawing_key(self, key: Key) -> Key:
        """Return a key without rank and hop: all ranks draw the same entries, and sums have values where gradients had
        them.
        """
        return replace(key, rank=0, hop=0)

    def limit_of(self, numel: int, group: int) -> int:
        return top_count(numel, self.ratio)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self.codec) if group == 1 else None

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        if not add_gradient(x, gradient):
            return NOT_FINITE
        words = self.drawing_key(key).words()
        chosen = drawn(words, x.size, top_count(x.size, self.ratio))
        sections: Any = wire.Sections(body)
        sections.blank(2, np.uint32)[:] = words
        values = sections.blank(chosen.size, np.float32)
        values[:] = x[chosen]
        if gradient.size:
            x[chosen] -= values
        return Body(sections.used, entries=chosen.size, parameter=_sizes(x.size, chosen.size))

    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        if not 1 <= header.entries <= out.size or header.parameter != _sizes(out.size, header.entries):
            return False
        taken: Any = body
        low, high = taken.take(2, np.uint32)
        values = taken.take(header.entries, np.float32) * scale
        if not add:
            out[:] = 0
        out[drawn((low, high), out.size, header.entries)] += values
        return True


@cache
def _device_kernels(codec: int) -> DeviceKernels:
    from hvd_compress.kernels.cuda import randomk

    return DeviceKernels(partial(randomk.encode, codec=codec), randomk.verify, randomk.decode)


def _sizes(numel: int, entries: int) -> int:
    """Mix both numbers: the body alone fits any number of elements, and padding one entry more."""
    return (numel * 0x9E3779B1 + entries) % 2**32


def drawn(words: tuple[np.uint32, np.uint32], numel: int, count: int) -> npt.NDArray[np.int64]:
    """Return `count` different numbers below `numel` in ascending order, chosen by two words of a key.

    They are the first numbers of a permutation. A Feistel network on as few bits as possible makes it, and is applied
    again to results that are too large (Black and Rogaway 2002). Integers only, so it is the same on every machine.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.compressors.randomk import drawn
        >>> drawn((np.uint32(1), np.uint32(2)), 10, 10)
        array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if count == numel:
        return np.arange(numel)
    half = np.uint64(max(1, ((numel - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    found = np.arange(count, dtype=np.uint64)
    outside = np.ones(count, bool)
    while outside.any():
        found[outside] = _permuted(found[outside], words, half, mask)
        outside = found >= np.uint64(numel)
    return np.sort(found).astype(np.int64)


def _permuted(
    numbers: npt.NDArray[np.uint64], words: tuple[np.uint32, np.uint32], half: np.uint64, mask: np.uint64
) -> npt.NDArray[np.uint64]:
    left, right = numbers >> half, numbers & mask
    with np.errstate(over="ignore"):
        for number in range(_ROUNDS):
            mixed = (right + np.uint64(words[number % 2]) + (np.uint64(number) << np.uint64(32))) * _ODD
            mixed = (mixed ^ (mixed >> _SHIFT)) * _ODD
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right
