"""Whose a saved state is: of which format, rank and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_compress import saved
from hvd_compress.errors import StateError

__all__ = ["own_state"]


def own_state(
    kind: str, state: Any, version: int, rank: int, described: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """Return a state as a dict that has the keys, if this rank with these settings has made it.

    Args:
        kind: what it is a state of, for errors.
        state: anything.
        version: the format that is read.
        rank: this one.
        described: its settings.
        keys: that it must have beside those.

    Raises:
        StateError: not such a state, or of another rank or settings.
    """
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if isinstance(found, bool) or not isinstance(found, int) or found != version:
        raise StateError(f"not a {kind} state of format {version}: its format is {found!r}")
    given = saved.record(f"{kind} state", state, ["rank", "settings", *keys])
    if not saved.equal(given["rank"], rank):
        raise StateError(
            f"{kind} state of rank {given['rank']}, given to rank {rank}: load it on the rank that saved it"
        )
    of_state = saved.record(f"settings of a {kind} state", given["settings"])
    if different := sorted(key for key, value in described.items() if not saved.equal(of_state.get(key), value)):
        raise StateError(
            f"{kind} state of other settings: {', '.join(different)} differ. Load it with those that it was saved with"
        )
    return given
