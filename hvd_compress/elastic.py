"""Elastic runs, whose ranks come and go: when they may compare, and what is refused there."""

from __future__ import annotations

import os
from typing import Any

from hvd_compress.errors import UnsupportedError

__all__ = [
    "NO_STATE",
    "are_together",
    "is_elastic",
    "note_meeting",
    "note_parting",
    "refuse_elastic",
    "refuse_elastic_averaging",
]

NO_STATE = "no state of elastic runs hands over to other ranks what it keeps"
"""A reason to refuse them: of edges without `hvd.elastic.TorchState`."""

_together = False


def is_elastic() -> bool:
    """Whether ranks may join and leave while this run goes on."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def are_together() -> bool:
    """Whether all ranks are at the same point of the program, so that collectives of ours meet.

    In an elastic run they are not until their state has been synced: who joins wraps its optimizer while others train.
    """
    return _together or not is_elastic()


def note_meeting() -> None:
    """All ranks have come to the sync of their state."""
    global _together
    _together = True


def note_parting() -> None:
    """Ranks have come or gone since they met."""
    global _together
    _together = False


def refuse_elastic(what: Any) -> None:
    """Raise UnsupportedError if this is an elastic run, in which `what` would lose what it keeps between steps.

    Args:
        what: a setting of the user's, as its `repr` shows it.
    """
    if is_elastic():
        raise UnsupportedError(
            f"{what!r} in an elastic run: what ranks keep between steps would be lost with those that leave, and "
            "missing on those that join. Use hvd.DistributedOptimizer or hvd.DistributedGradientTape with a state of "
            "hvd.elastic, which carries over what compressors keep, or compression=hvd.Compression.none or fp16 with "
            "the exchange that is the default, which keep nothing. Or start with a fixed number of ranks and use "
            "hvd_compress.feedback.redistribute to change it between runs"
        )


def refuse_elastic_averaging(what: str, reason: str) -> None:
    """Raise UnsupportedError if this is an elastic run, in which ranks cannot average parameters in this way.

    Args:
        what: an optimizer or a callback, with the setting that is in the way.
        reason: why it does not come through a change of ranks.
    """
    if is_elastic():
        raise UnsupportedError(
            f"{what} in an elastic run: {reason}. On PyTorch, hvd.DiLoCo, hvd.DASO and "
            "hvd.EventGraDOptimizer of hvd_compress.torch with hvd.elastic.TorchState come through such a change; else "
            "start with a fixed number of ranks"
        )
