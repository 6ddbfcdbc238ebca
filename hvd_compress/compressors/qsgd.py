"""Quantize at random, without bias: QSGD (Alistarh et al. 2017; Sievert 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.coding import elias
from hvd_compress.compressors.base import NOT_FINITE, Array, Body, Bytes, Compressor, count_groups
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import check_choice, check_int
from hvd_compress.errors import WireError
from hvd_compress.kernels import qsgd as kernels
from hvd_compress.kernels import signs

__all__ = ["QSGD"]

_MOST_BUCKET = 32768  # what 15 bits of index reach
_MOST_BUCKET_OF_ONE_BIT = 2**30  # coded gaps reach any distance; a bucket for all of any tensor


@dataclass(frozen=True)
class QSGD(Compressor):
    """Rounds each value at random to one of the levels norm * l / s, l = -s … s, so that its expectation is kept.

    With b bits a code holds the sign and a level up to s = 2**(b-1) - 1; a bucket's norm costs 4 bytes. With 1 bit,
    s = 1 and only the non-zero levels are sent, as index and sign of 16 bits: less than 1 bit per element is expected
    for the Euclidean norm and buckets of 512. With coding="elias", what is sent are gaps between non-zero levels, signs
    and levels, or all levels where few are zero, as Elias codes. The result is unbiased, hence no error feedback: its
    variance can exceed the square of the norm, and a residual would grow without bound. Source: Alistarh et al. 2017,
    section 3; Sievert 2017, section 3.1, is the case of 1 bit, coded, with one bucket for all. Differences: codes are
    sent as they are unless a coding is asked for; gaps run on over the bounds of buckets, and take the paper's omega
    (recursive) code only where they are so wide that it is shorter, else gamma code.

    Args:
        bits: 1 to 8.
        bucket_numel: elements that share a norm, a multiple of 8 up to 32768, with 1 bit and a coding up to 2**30.
        norm: "l2" (Alistarh) or "max" (less variance for the same bits, but few zeros).
        coding: None, or "elias" for losslessly coded levels: fewer bytes, but messages whose size varies from step to
            step.
        seed: of the random rounding; each tensor, step and rank draws its own numbers.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Key, QSGD
        >>> x = np.array([0.3, -0.4], np.float32)
        >>> compressor = QSGD(bits=4, bucket_numel=8)
        >>> draws = [compressor.decode(compressor.encode(x, key=Key(step=step))) for step in range(10000)]
        >>> bool(np.allclose(np.mean(draws, axis=0), x, atol=0.005))
        True
    """

    bits: int = 4
    bucket_numel: int = 512
    norm: str = "l2"
    coding: str | None = None
    seed: int = 0

    id: ClassVar[str] = "qsgd"
    codec: ClassVar[int] = 5
    coded_codec: ClassVar[int | None] = 133
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "bits", self.bits, 1, 8)
        check_int(self, "bucket_numel", self.bucket_numel, 8, _most_bucket(self.bits == 1 and self.coding is not None))
        if self.bucket_numel % 8:
            raise ValueError(f"QSGD(bucket_numel={self.bucket_numel!r}): bucket_numel must be a multiple of 8")
        check_choice(self, "norm", self.norm, ("l2", "max"))
        check_choice(self, "coding", self.coding, (None, "elias"))
        check_int(self, "seed", self.seed, 0, 2**63 - 1)

    @property
    def fixed_size(self) -> bool:
        """Whether the size follows from the shape: not with one bit or a coding, where it follows from the levels."""
        return self.bits > 1 and self.coding is None

    def contraction(self, numel: int) -> float:
        """Return 1 / (1 + variance), with the bound of Alistarh et al. 2017, lemma 3.1, on the variance."""
        levels = max(1, 2 ** (self.bits - 1) - 1)
        n = min(numel, self.bucket_numel) or 1
        # rounding between two levels has a variance of a quarter of their distance squared, at most
        variance = n / (4 * levels**2) if self.norm == "max" else min(n / levels**2, math.sqrt(n) / levels)
        return 1.0 / (1.0 + variance)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return self.bucket_numel

    def body_bytes(self, numel: int, group: int) -> int:
        buckets = count_groups(numel, group)
        if self.bits == 1:
            if self.coding is not None:
                return wire.padded(4 * buckets) + 8 * elias.ternary_words(numel)
            return wire.padded(2 * buckets) + 8 * buckets + 2 * numel
        return wire.padded(4 * buckets) + (numel + 7) // 8 * self.bits

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        buckets = count_groups(x.size, group)
        sections = wire.Sections(body)
        is_max = self.norm == "max"
        if self.bits == 1 and self.coding is not None:
            norms = sections.blank(buckets, np.float32)
            table = sections.used
            room = sections.take(elias.ternary_words(x.size), np.uint64)
            stream = elias.encode_ternary(x, group, self.norm, key.words(), norms, room)
            return NOT_FINITE if stream is None else Body(table + stream[0].nbytes, stream[2], 1 | stream[1] << 8)
        if self.bits == 1:
            counts = sections.blank(buckets, np.uint16)
            recon = sections.blank(2 * buckets, np.float32)
            table = sections.used
            entries = sections.take(x.size, np.uint16)
            count = signs.encode_ternary(x, group, is_max, *key.words(), counts, recon, entries)
            return NOT_FINITE if count < 0 else Body(table + 2 * count, count, self.bits)
        norms = sections.blank(buckets, np.float32)
        packed = sections.blank((x.size + 7) // 8 * self.bits, np.uint8)
        finite = kernels.encode(x, group, self.bits, is_max, *key.words(), norms, packed)
        return Body(sections.used, x.size, self.bits, finite)

    def shorten_body(self, body: Bytes, done: Body, numel: int, group: int) -> Body | None:
        if self.bits == 1:
            # its size has a low bound that holds for the coded form only, so it is encoded in that form
            return done._replace(used=body.size)
        buckets = count_groups(numel, group)
        sections = wire.Sections(body)
        sections.take(buckets, np.float32)
        norms = sections.used
        packed = sections.take((numel + 7) // 8 * self.bits, np.uint8)
        stream = elias.encode_levels(packed, self.bits, numel)
        if stream is None:
            return None
        words, form, nonzeros = stream
        body[norms : norms + words.nbytes].view(np.uint64)[:] = words
        return Body(norms + words.nbytes, nonzeros, self.bits | form << 8)

    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        buckets = count_groups(out.size, header.group)
        is_coded = header.codec == self.coded_codec
        bits, form = (header.parameter & 255, header.parameter >> 8) if is_coded else (header.parameter, 0)
        if not 1 <= bits <= 8 or header.group % 8 or header.group > _most_bucket(is_coded and bits == 1):
            raise WireError(f"payload of qsgd with {bits} bits and buckets of {header.group} elements")
        if is_coded:
            norms = body.take(buckets, np.float32)
            if not add:
                out[...] = 0
            elias.decode((body.rest(), form, header.entries), norms, header.group, bits, scale, out)
            return True
        if bits == 1:
            counts = body.take(buckets, np.uint16)
            recon = body.take(2 * buckets, np.float32)
            entries = body.take(header.entries, np.uint16)
            return bool(signs.decode(counts, recon, 2, entries, header.group, scale, out, add))
        norms = body.take(buckets, np.float32)
        packed = body.take((out.size + 7) // 8 * bits, np.uint8)
        kernels.decode(norms, packed, header.group, bits, scale, out, add)
        return True


def _most_bucket(one_bit_coded: bool) -> int:
    return _MOST_BUCKET_OF_ONE_BIT if one_bit_coded else _MOST_BUCKET
