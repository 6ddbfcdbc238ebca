"""Decide which way each tensor goes: compressed, packed beside compressed ones, or through Horovod's allreduce."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.engine.choice import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.exchange import Exchange, FewestBytes, checked, fitted, is_uncompressed, make_plan, suited
from hvd_compress.policy import Assigned, Policy

__all__ = ["Routing", "Tensor", "backward_buckets"]


class Tensor(NamedTuple):
    """Describes a tensor whose gradients will come: its name, the same on all ranks, and what its exchange depends on.

    `dtype` is a name, such as "bfloat16"; `itemsize` its bytes per element. `place` is the number of its device, the
    same on all ranks; tensors of different places share no bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 4
    place: int = 0


@dataclass(frozen=True)
class Routing:
    """Decides which way tensors go, equally on all ranks.

    Args:
        compressor: of all tensors, or of each by its name; None if all go dense.
        exchange: of compressed tensors.
        min_numel: tensors with fewer elements are not compressed.
        bucket_bytes: tensors go together up to so many bytes of float32; 0 leaves every tensor alone.
    """

    compressor: Compressor | Policy | Assigned | None
    exchange: Exchange = FewestBytes()  # noqa: RUF009 - it is frozen
    min_numel: int = DEFAULT_MIN_NUMEL
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def compressor_of(self, name: str) -> Compressor:
        """Return the compressor that the user, or `Auto`, has chosen for a tensor, whether it pays or not."""
        if self.compressor is None:
            return NoCompression()
        return self.compressor if isinstance(self.compressor, Compressor) else self.compressor.for_tensor(name)

    def exchange_of(self, name: str) -> Exchange:
        """Return the exchange that a compressed tensor wants; tensors of a bucket that differ use the routing's own."""
        chosen = self.compressor.exchanges if isinstance(self.compressor, Assigned) else {}
        return suited(chosen.get(name, self.exchange), [self.compressor_of(name)])

    def compresses(self, tensor: Tensor, ranks: int) -> bool:
        """Tell whether a tensor is compressed and exchanged, rather than summed by Horovod's allreduce.

        It is not where that would send as many bytes as an allreduce or more: with settings that keep nearly
        everything, or an allgather among many ranks.
        """
        if tensor.dtype.startswith("complex"):
            # signs, means and sizes are those of real numbers
            return False
        compressor = self.compressor_of(tensor.name)
        # no minimal size applies to values that are sent as they are
        least = 0 if is_uncompressed(compressor) else self.min_numel
        if compressor.reducible or math.prod(tensor.shape) < max(least, 1):
            return False
        exchange = self.exchange_of(tensor.name)
        if exchange.takes_all or is_uncompressed(compressor):
            return True
        # Horovod knows no bfloat16, which goes as float32
        itemsize = max(tensor.itemsize, 4) if tensor.dtype == "bfloat16" else tensor.itemsize
        return exchange.pays(make_plan(exchange, compressor, tensor.shape, ranks, itemsize), itemsize)

    def payloads_of(self, tensor: Tensor) -> Compressor:
        """Return the compressor that makes the payloads of a tensor that is exchanged.

        A tensor whose payloads would be larger than the tensor goes to a root uncompressed.
        """
        compressor = self.compressor_of(tensor.name)
        if self.exchange_of(tensor.name).takes_all and not is_uncompressed(compressor):
            numel = math.prod(tensor.shape)
            if compressor.capacity(numel, compressor.group_numel(tensor.shape)) >= tensor.itemsize * numel:
                compressor = checked(NoCompression())
        return fitted(compressor, tensor.dtype)

    def packs(self, tensor: Tensor) -> bool:
        """Tell whether a tensor may travel uncompressed beside compressed ones."""
        return bool(self.bucket_bytes) and 0 < math.prod(tensor.shape) < self.min_numel and tensor.dtype == "float32"

    def divided(self, tensors: Iterable[Tensor], ranks: int, groups: list[list[str]] | None = None) -> list[list[str]]:
        """Divide tensors into buckets, given by names; tensors in none go through Horovod's allreduce."""
        by_name = {tensor.name: tensor for tensor in tensors}
        compressed = {name for name, tensor in by_name.items() if self.compresses(tensor, ranks)}
        together = {n: t.shape for n, t in by_name.items() if n in compressed or self.packs(t)}
        buckets: list[list[str]] = []
        for place in sorted({by_name[name].place for name in together}):
            there = {name: shape for name, shape in together.items() if by_name[name].place == place}
            factored = {name for name in compressed & there.keys() if self.compressor_of(name).sums_factors}
            # factors have an exchange of their own, in which payloads find no place; small tensors go with these
            apart = {name: shape for name, shape in there.items() if name in factored}
            if factored != compressed & there.keys():
                buckets += self._joined(apart, factored, groups)
                there = {name: shape for name, shape in there.items() if name not in factored}
            buckets += self._joined(there, compressed, groups)
        return buckets

    def _joined(
        self, shapes: Mapping[str, tuple[int, ...]], compressed: Collection[str], groups: list[list[str]] | None
    ) -> list[list[str]]:
        """Divide tensors of one place into buckets, each with a compressed tensor."""
        buckets: list[list[str]] = []
        small: list[str] = []
        for names in backward_buckets(shapes, self.bucket_bytes, groups):
            # small tensors go with compressed ones: an exchange of their own would cost more than it saves
            if not any(name in compressed for name in names):
                small += names
            else:
                buckets.append(small + names)
                small = []
        if buckets:
            buckets[-1] += small
        return buckets


def backward_buckets(
    shapes: Mapping[str, tuple[int, ...]], bucket_bytes: int, groups: list[list[str]] | None = None
) -> list[list[str]]:
    """Divide tensors into buckets, in the reverse of their order, which is about that of the backward pass.

    Args:
        shapes: of all tensors by name, in the order of the forward pass.
        bucket_bytes: a bucket is full before it would pass this, counted as float32; 0 leaves every tensor alone.
        groups: of tensors that are to go together whatever their size.

    Example:
        >>> from hvd_compress.engine import backward_buckets
        >>> backward_buckets({"a": (100,), "b": (50,), "c": (40,)}, 4 * 100)
        [['c', 'b'], ['a']]
    """
    buckets = [[name for name in group if name in shapes] for group in groups or []]
    grouped = {name for bucket in buckets for name in bucket}
    filling: list[str] = []
    filled = 0
    for name in reversed(list(shapes)):
        if name in grouped:
            continue
        nbytes = 4 * math.prod(shapes[name])
        if filling and filled + nbytes > bucket_bytes:
            buckets.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += nbytes
    return [bucket for bucket in [*buckets, filling] if bucket]
