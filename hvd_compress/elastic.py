"""Elastic runs, whose ranks come and go: what is refused there."""

from __future__ import annotations

import os
from typing import Any

from hvd_compress.errors import UnsupportedError

__all__ = ["is_elastic", "refuse_elastic"]


def is_elastic() -> bool:
    """Whether ranks may join and leave while this run goes on."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic(what: Any) -> None:
    """Raise UnsupportedError if this is an elastic run, in which `what` would lose what it keeps between steps.

    Args:
        what: a setting of the user's, as its `repr` shows it.
    """
    if is_elastic():
        raise UnsupportedError(
            f"{what!r} in an elastic run: exchanges are laid out for the ranks that there are, and what ranks keep "
            "between steps would be lost with those that leave, and missing on those that join. Use "
            "compression=hvd.Compression.none or fp16 with the exchange that is the default, or start with a fixed "
            "number of ranks and use hvd_compress.feedback.redistribute to change it between runs"
        )
