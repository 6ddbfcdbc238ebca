"""Join lanes that share an exchange with the small tensors that travel beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from hvd_compress import exchange
from hvd_compress.engine.lane import Lane
from hvd_compress.engine.pack import Pack

__all__ = ["Bucket"]

Array = npt.NDArray[Any]


class Bucket(exchange.Bucket[Lane]):
    """An `exchange.Bucket` that also takes the gradients of small tensors.

    Args:
        lanes: of the compressed tensors by name.
        pack: of the small ones, if there are any.
    """

    def __init__(self, lanes: Mapping[str, Lane], pack: Pack | None = None) -> None:
        self.lanes = dict(lanes)
        self.pack = pack
        super().__init__({**lanes, **({} if pack is None else {pack.name: pack})})
        numel = sum(t.plan.numel for t in self.transfers.values()) or 1
        self._shares = [(t, t.plan.numel / numel) for t in self.transfers.values()]
        self._seconds: dict[str, float] = {}
        """Of all tensors together, by field of their counters."""

    @property
    def tensors(self) -> list[str]:
        """The names of all tensors, in the order in which their gradients are expected."""
        return [*self.lanes, *([] if self.pack is None else self.pack.members)]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of its tensors."""
        if self.pack is None or name in self.lanes:
            return self.lanes[name].plan.shape
        return self.pack.shapes[name]

    def give(self, name: str, flat: Array | None) -> bool:
        """Encode a flat gradient, or leave the tensor out with None; returns whether the bucket is complete.

        Small tensors are copied.
        """
        if self.pack is None or name in self.lanes:
            return self.skip(name) if flat is None else self.encode(name, flat)
        if self.pack.put(name, flat):
            return self.encode(self.pack.name, self.pack.buffer)
        return False

    def waits(self, name: str) -> bool:
        return (self.pack is not None and name in self.pack.shapes) or super().waits(name)

    def give_together(self, addresses: Mapping[str, int], flats: Mapping[str, Array]) -> bool:
        """Give gradients of tensors that wait, by address (see `encode_at`) or flat; returns what `give` does."""
        small = [self.give(name, flat) for name, flat in flats.items()]
        return (self.encode_at(addresses) if addresses else False) or any(small)

    def count(self, field: str, seconds: float) -> None:
        """Add to a field of all tensors' counters, to each in proportion to its size."""
        self._seconds[field] = self._seconds.get(field, 0.0) + seconds

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""
        super().settle_counts()
        seconds_of, self._seconds = self._seconds, {}
        for field, seconds in seconds_of.items():
            for transfer, share in self._shares:
                setattr(transfer.counters, field, getattr(transfer.counters, field) + seconds * share)
