"""Counts the Python functions that code enters: what it costs beside its kernels, without a clock."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = "hvd_compress"


def count_calls(work: Callable[[], Any]) -> Counter[str]:
    """How often each function was entered on this thread: from the first one of the package on, until `work` returns.

    Functions of Horovod, torch and NumPy that are written in Python count too; those in C do not.
    """
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "?")
        if calls or module.partition(".")[0] == PACKAGE:
            calls[f"{module}.{frame.f_code.co_qualname}"] += 1

    # what others have left would be told of its end in between, by functions of Python
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
