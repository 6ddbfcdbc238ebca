"""Schedule DiLoCo: after which steps a fragment of the parameters is sent, and after which its average arrives.

Source: Douillard et al., Streaming DiLoCo (arXiv 2501.18512, 2025), section 2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from hvd_compress.compressors.settings import check_int

__all__ = ["DiLoCoSchedule", "Turn"]


class Turn(NamedTuple):
    """Says what happens after a step, in this order.

    Args:
        sends: the fragment whose change is sent; None if none is.
        arrives: the fragment whose average arrives; None if none does.
    """

    sends: int | None = None
    arrives: int | None = None


@dataclass(frozen=True)
class DiLoCoSchedule:
    """Synchronizes each fragment of the parameters every `sync_every` steps, one after the other at equal distances.

    Fragment i arrives after step (i + 1) · sync_every / fragments, and again every `sync_every` steps; it was sent
    `delay` steps before. One fragment is under way at a time.

    Args:
        sync_every: H, steps from one synchronization of a fragment to its next one, a multiple of `fragments`.
        fragments: how many there are.
        delay: steps from sending to arrival, less than sync_every / fragments; with 0 the step waits.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress.schedules import DiLoCoSchedule
        >>> schedule = DiLoCoSchedule(sync_every=4, fragments=2, delay=1)
        >>> [schedule.turn(step) for step in (1, 2, 3)]
        [Turn(sends=0, arrives=None), Turn(sends=None, arrives=0), Turn(sends=1, arrives=None)]
    """

    sync_every: int = 30
    fragments: int = 1
    delay: int = 0

    _MOST: ClassVar[int] = 2**31 - 1

    def __post_init__(self) -> None:
        check_int(self, "fragments", self.fragments, 1, self._MOST)
        check_int(self, "sync_every", self.sync_every, 1, self._MOST)
        if self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every={self.sync_every} with {self.fragments} fragments: they are synchronized at equal "
                f"distances, so sync_every must be a multiple of their number, such as {self._next_multiple()}"
            )
        check_int(self, "delay", self.delay, 0, self._MOST)
        if self.delay >= self.distance:
            raise ValueError(
                f"delay={self.delay} with sync_every={self.sync_every} and fragments={self.fragments}: a fragment must "
                f"arrive before the next one is sent, so delay must be less than sync_every / fragments = "
                f"{self.distance}"
            )

    @property
    def distance(self) -> int:
        """Steps from one arrival to the next, whichever fragments arrive."""
        return self.sync_every // self.fragments

    def turn(self, step: int) -> Turn:
        """Return what is due after a step, counted from 1."""
        return Turn(self._fragment_at(step + self.delay), self._fragment_at(step))

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return asdict(self)

    def _fragment_at(self, step: int) -> int | None:
        return None if step % self.distance else (step // self.distance - 1) % self.fragments

    def _next_multiple(self) -> int:
        return -(-self.sync_every // self.fragments) * self.fragments
