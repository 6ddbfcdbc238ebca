"""Count what a rank has sent so far: messages and bytes, against sending everything in every pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import saved

__all__ = ["GossipTally"]


class GossipTally:
    """Counters of one rank.

    Args:
        names: of the tensors.
        raw_bytes: of the payload of each tensor as it is.
        overhead_bytes: of a message beside its payloads.
        receivers: of each message.
        traced: whether norms, thresholds and events of every pass are kept.
    """

    def __init__(
        self, names: Sequence[str], raw_bytes: Sequence[int], overhead_bytes: int, receivers: int, traced: bool
    ) -> None:
        self._names = list(names)
        self._raw_bytes = np.array(raw_bytes, np.int64)
        self._overhead = overhead_bytes
        self._receivers = receivers
        self.passes = 0
        self.messages = np.zeros(len(names), np.int64)
        """Of each tensor, one to each receiver."""
        self.tensor_bytes = np.zeros(len(names), np.int64)
        """Bytes of the payloads of each tensor, to all receivers."""
        self.total_bytes = 0
        self.trace: dict[str, list[Any]] | None = {"norms": [], "thresholds": [], "sent": []} if traced else None
        self._passes_before = self._always_before = 0
        """Passes among other ranks, and messages of a tensor had it been sent in all of them."""

    @property
    def _always(self) -> int:
        """Messages of a tensor, had it been sent in every pass."""
        return self._always_before + (self.passes - self._passes_before) * self._receivers

    def inherit(self, before: GossipTally) -> None:
        """Go on counting where the tally of this rank among other ranks has stopped."""
        self.load(before.state_dict())
        self._passes_before, self._always_before = before.passes, before._always
        if before.trace is not None:
            self.trace = before.trace

    def count_pass(
        self, norms: npt.NDArray[np.float64], thresholds: npt.NDArray[np.float64], sent: npt.NDArray[np.bool_]
    ) -> None:
        """Count a pass; messages are counted when they go."""
        self.passes += 1
        if self.trace is not None:
            for key, values in (("norms", norms), ("thresholds", thresholds), ("sent", sent)):
                self.trace[key].append(values.copy())

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, without the trace."""
        return {
            "passes": self.passes,
            "total_bytes": self.total_bytes,
            "messages": self.messages.copy(),
            "tensor_bytes": self.tensor_bytes.copy(),
        }

    def check(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Check a state of as many tensors and return what `load` takes over of it.

        Raises:
            StateError: it is another one, or damaged.
        """
        counts = {key: saved.integer(f"{key} of an event state", state[key]) for key in ("passes", "total_bytes")}
        arrays = {
            key: saved.integers(f"{key} of an event state", state[key], mine.shape)
            for key, mine in (("messages", self.messages), ("tensor_bytes", self.tensor_bytes))
        }
        return {**counts, **arrays}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned: counters are part of a state, all of them."""
        self.passes, self.total_bytes = checked["passes"], checked["total_bytes"]
        self.messages, self.tensor_bytes = checked["messages"], checked["tensor_bytes"]

    def report(self, thresholds: npt.NDArray[np.float64]) -> dict[str, Any]:
        """See `event_stats` of the optimizers."""
        always = self._always
        tensors = {
            name: {
                **_against(int(self.messages[i]), always, "messages"),
                **_against(int(self.tensor_bytes[i]), int(self._raw_bytes[i]) * always, "bytes"),
                "threshold": float(thresholds[i]),
            }
            for i, name in enumerate(self._names)
        }
        every_message = always * len(self._names)
        every_byte = always * (self._overhead + int(self._raw_bytes.sum()))
        total = {
            "passes": self.passes,
            **_against(int(self.messages.sum()), every_message, "messages"),
            **_against(self.total_bytes, every_byte, "bytes"),
        }
        traced = {} if self.trace is None else {"trace": {key: np.array(v) for key, v in self.trace.items()}}
        return {"total": total, "tensors": tensors, **traced}


def _against(sent: int, always: int, what: str) -> dict[str, float]:
    return {what: sent, f"{what}_always": always, f"{what}_percent": 100.0 * sent / always if always else 0.0}
