"""Keep records of units: one file of JSON each, written as a whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import machine, rounded

from .unit import Unit

__all__ = ["Record", "Store"]

Record = dict[str, Any]


class Store:
    """Keeps records in a folder.

    Args:
        folder: made when the first record is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, unit: Unit) -> Path:
        """Return where a unit's record is, or will be."""
        return self.folder / f"{unit.name}.json"

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units without a record of the same settings and version."""
        return [unit for unit in units if self.read(unit) is None]

    def read(self, unit: Unit) -> Record | None:
        """Return a unit's record, or None; a file that is damaged, or of another unit, is as good as none."""
        try:
            record = json.loads(self.path_of(unit).read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("key") == unit.key else None

    def write(self, unit: Unit, result: Mapping[str, Any], seconds: float, command: Sequence[str]) -> Path:
        """Keep what a unit has given, beside what it was, how it was started, where and when."""
        record = {
            "experiment": unit.experiment,
            "version": unit.version,
            "label": unit.label,
            "key": unit.key,
            "ranks": unit.ranks,
            "settings": dict(unit.settings),
            "command": list(command),
            "machine": machine(),
            "seconds": seconds,
            "result": dict(result),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path_of(unit)
        # renamed when complete: an interrupted run must not leave half a record
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(rounded(record), separators=(",", ":")) + "\n")
        partial.replace(path)
        return path

    def forget(self, unit: Unit) -> None:
        """Remove a unit's record."""
        self.path_of(unit).unlink(missing_ok=True)

    def records(self, experiment: str, version: int) -> list[Record]:
        """Return all records of an experiment, of any settings but this version, in a fixed order."""
        found = []
        for path in sorted(self.folder.glob(f"{experiment}-*.json")):
            record = json.loads(path.read_text())
            if record["version"] == version:
                found.append(record)
        return found
