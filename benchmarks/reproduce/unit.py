"""Describe a unit of work, one start of real ranks, and the key that its record is found by."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Unit", "key_of"]

Settings = Mapping[str, Any]
_KEY_DIGITS = 12


@dataclass(frozen=True)
class Unit:
    """Describes one start of ranks.

    Args:
        experiment: that it belongs to.
        version: of what the experiment does with settings; raised when the same settings give other results.
        label: the method, as tables name it.
        settings: all that decides the result, JSON-able: method, seed, sizes, and the rate of links.
        ranks: number of them; of hosts, where links have a rate.
        marks: parts that the ranks report as done, for the progress bar.
    """

    experiment: str
    version: int
    label: str
    settings: Settings
    ranks: int
    marks: int

    @property
    def key(self) -> str:
        """What tells this unit from all others."""
        return key_of(self.experiment, self.version, {"label": self.label, "ranks": self.ranks, **self.settings})

    @property
    def name(self) -> str:
        """The name of its record's file."""
        return f"{self.experiment}-{re.sub(r'[^a-z0-9]+', '-', self.label.lower()).strip('-')}-{self.key}"

    @property
    def rate(self) -> str | None:
        """The rate of the links between virtual hosts; None for ranks on this machine alone."""
        return self.settings.get("rate")

    def with_rate(self, rate: str) -> Unit:
        """Return the same unit on links of another rate."""
        return replace(self, settings={**self.settings, "rate": rate})


def key_of(experiment: str, version: int, settings: Settings) -> str:
    """Make a short hash of settings that does not depend on their order.

    Example:
        >>> key_of("qsgd", 1, {"bits": 4, "seed": 0}) == key_of("qsgd", 1, {"seed": 0, "bits": 4})
        True
        >>> key_of("qsgd", 1, {"bits": 4}) == key_of("qsgd", 2, {"bits": 4})
        False
    """
    text = json.dumps([experiment, version, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]
