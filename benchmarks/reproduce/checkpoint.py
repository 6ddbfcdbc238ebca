"""Keep what a rank needs to go on after the last complete epoch of an interrupted unit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["Checkpoint"]

State = dict[str, Any]


class Checkpoint:
    """Keeps the files of one unit, one for each rank: residuals differ from rank to rank.

    Args:
        folder: of this unit alone; who started the ranks removes it when the unit is complete.
        every_seconds: at least so long between two of them: writing takes longer than a short epoch.
    """

    def __init__(self, folder: Path, every_seconds: float = 120.0) -> None:
        self._folder = folder
        self._every_seconds = every_seconds
        self._last = time.monotonic()

    def load(self) -> State | None:
        """Return what `save` was given last on all ranks; None where there is nothing."""
        mine = max((int(file.stem.partition("-")[2]) for file in self._files()), default=-1)
        # a rank that was ended before it had written has the file before: nobody removes that until all have written
        epoch = int(hvd.allreduce(torch.tensor([mine]), op=hvd.Min, name="reproduce.checkpoint.epoch"))
        return None if epoch < 0 else torch.load(self._path(epoch), weights_only=True)

    def save(self, epoch: int, state: State) -> None:
        """Keep the state after an epoch, if it is time; all ranks call this after each."""
        is_due = torch.tensor([int(time.monotonic() - self._last >= self._every_seconds)])
        if not bool(hvd.broadcast(is_due, 0, name="reproduce.checkpoint.due")):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        before = self._files()
        partial = self._folder / f"{hvd.rank()}.{os.getpid()}.partial"
        torch.save(state, partial)
        partial.replace(self._path(epoch))
        hvd.barrier()
        for file in before:
            if file != self._path(epoch):
                file.unlink()
        self._last = time.monotonic()

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{hvd.rank()}-{epoch}.pt"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"{hvd.rank()}-*.pt"))
