"""Add up what the stages of a bucket cost, and divide it among its tensors when somebody asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_compress.exchange.account import Account

if TYPE_CHECKING:
    from hvd_compress.exchange.message import Message

__all__ = ["BucketTally"]

_BYTES = ("bytes_sent", "bytes_received", "bytes_sent_inside")
Numbers = npt.NDArray[Any]


class BucketTally:
    """Counts for all tensors of a bucket at once: a step with a thousand of them has no time for each.

    Args:
        accounts: of the tensors, whose counters `settle` brings up to date.
    """

    def __init__(self, accounts: Sequence[Account]) -> None:
        self._accounts = accounts
        numel = sum(account.plan.numel for account in accounts) or 1
        self._shares = [account.plan.numel / numel for account in accounts]
        self._begin()

    def _begin(self) -> None:
        self._steps = np.zeros(len(self._accounts), np.int64)
        self._bytes = {field: np.zeros(len(self._accounts)) for field in _BYTES}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """What all tensors took together, by field; each bears a share in proportion to its size."""

    def count(self, field: str, message: Message, sizes: Numbers) -> None:
        """Count the bytes of a message, given by part, that go between this rank and others."""
        self._bytes[field] += message.slots_crossing if message.fixed_size else message.bytes_crossing(sizes)

    def add_bytes(self, field: str, tensors: Numbers, nbytes: Numbers) -> None:
        """Add bytes of tensors, which are given by their numbers."""
        self._bytes[field] += np.bincount(tensors, nbytes, len(self._accounts))

    def end_step(self, numbers: Iterable[int]) -> None:
        """Count a step of these tensors."""
        self._steps[list(numbers)] += 1

    def settle(self) -> None:
        """Bring the counters of all tensors up to date."""
        steps, nbytes, seconds = self._steps, self._bytes, self.seconds
        self._begin()
        for i, account in enumerate(self._accounts):
            counters = account.counters
            counters.steps += int(steps[i])
            counters.dense_bytes += int(steps[i]) * account.dense_bytes
            for field, of_tensors in nbytes.items():
                setattr(counters, field, getattr(counters, field) + float(of_tensors[i]))
            for field, of_all in seconds.items():
                setattr(counters, field, getattr(counters, field) + of_all * self._shares[i])
