"""Ranks that meet now and then: they compare what they are about to do, and average what is not exchanged otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hvd_compress.averaging.flat_tensors import Array
from hvd_compress.averaging.groups import Groups, means
from hvd_compress.errors import MismatchError

__all__ = ["Meeting"]


class Meeting:
    """Compares what all ranks do at a moment, so that ranks that made more steps than others are told.

    Args:
        groups: where this rank stands.
        moment: what the moment is called in errors.
    """

    def __init__(self, groups: Groups, moment: str) -> None:
        self._groups = groups
        self._moment = moment
        self._end_agreement: Callable[[], None] | None = None
        """Of the step in which what is under way was sent."""

    def begin(self, what: str, facts: Mapping[str, Any]) -> None:
        """Begin to compare; it comes before all else of that moment, under the same name wherever a rank may be.

        Args:
            what: this rank is about to do, after how many steps.
            facts: what has to be equal on all ranks.

        Raises:
            MismatchError: the ranks disagreed on the moment before.
        """
        everyone = self._groups.everyone
        if everyone is not None:
            self.settle()
            self._end_agreement = everyone.begin_agreement({self._moment: what, **facts})

    def settle(self) -> None:
        """Hear what the comparison has found.

        Raises:
            MismatchError: the ranks disagree; raised on all of them.
        """
        end, self._end_agreement = self._end_agreement, None
        if end is not None:
            end()

    def abandon(self) -> None:
        """Forget a comparison that will never be complete."""
        self._end_agreement = None

    def refuse(self, what: str, facts: Mapping[str, Any]) -> None:
        """Tell all ranks where they meet next that this one cannot go on; the caller raises what it knows."""
        with suppress(MismatchError):
            self.begin(what, facts)
            self.settle()

    def average(self, arrays: Mapping[str, Array], moment: str) -> None:
        """Make arrays their mean over all ranks, in place; a collective call.

        Raises:
            MismatchError: the ranks have others.
        """
        if self._groups.everyone is None:
            return
        described = [[name, list(x.shape), str(x.dtype)] for name, x in arrays.items()]
        self._groups.everyone.agree({f"averaged {moment}": described})
        averaged = means(self._groups.everyone, list(arrays.values()), self._groups.name)
        for x, mean in zip(arrays.values(), averaged, strict=True):
            x[...] = mean.reshape(x.shape)
