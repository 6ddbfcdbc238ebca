"""Say what `check` finds, one line of its output for each finding."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MISSING", "NOTE", "OK", "Finding", "last_line"]

OK, NOTE, MISSING = "ok", "note", "MISSING"


@dataclass(frozen=True)
class Finding:
    """Holds one line of the output.

    Args:
        what: was looked at.
        found: what is there.
        verdict: OK, NOTE (works, or is not needed) or MISSING.
        remedy: what to do, unless all is well.
    """

    what: str
    found: str
    verdict: str
    remedy: str = ""


def last_line(text: str) -> str:
    """Return the last line that says anything; empty if none does."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" -=")), "")
