"""Count what has become of the gradients of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ServerTally", "WorkerTally"]


@dataclass
class _OfWorker:
    staleness: Counter[int] = field(default_factory=Counter)
    """How many of the applied gradients had which staleness."""
    too_stale: int = 0
    not_finite: int = 0
    given_up: int = 0
    returned: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0


class ServerTally:
    """Counts what the server does.

    Args:
        ranks: of the workers.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self.workers = [_OfWorker() for _ in ranks]

    def report(self, version: int, clocks: Sequence[int]) -> dict[str, Any]:
        """See `server_stats` of the optimizers."""
        return {
            "is_server": True,
            "updates": version,
            "staleness": _described(w.staleness for w in self.workers),
            "workers": {
                rank: {
                    "clock": clock,
                    "applied": w.staleness.total(),
                    "too_stale": w.too_stale,
                    "not_finite": w.not_finite,
                    "given_up": w.given_up,
                    "returned": w.returned,
                    "bytes_received": w.bytes_received,
                    "bytes_sent": w.bytes_sent,
                    "staleness": _described([w.staleness]),
                }
                for rank, clock, w in zip(self._ranks, clocks, self.workers, strict=True)
            },
            "bytes_received": sum(w.bytes_received for w in self.workers),
            "bytes_sent": sum(w.bytes_sent for w in self.workers),
        }


@dataclass
class WorkerTally:
    """Counts what a worker does; `dense` bytes are those of the same messages without compression."""

    steps: int = 0
    too_stale: int = 0
    not_finite: int = 0
    waited_steps: int = 0
    waited_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes_sent: int = 0
    dense_bytes_received: int = 0

    def report(self) -> dict[str, Any]:
        """See `server_stats` of the optimizers."""
        return {"is_server": False, **vars(self)}


def _described(counters: Iterable[Counter[int]]) -> dict[str, Any]:
    joined: Counter[int] = Counter()
    for counter in counters:
        joined.update(counter)
    count = joined.total()
    return {
        "mean": sum(staleness * n for staleness, n in joined.items()) / count if count else 0.0,
        "max": max(joined, default=0),
        "histogram": dict(sorted(joined.items())),
    }
