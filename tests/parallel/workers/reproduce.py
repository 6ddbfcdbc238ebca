"""A training that is interrupted goes on as if it had not been, with what it owes and what it has counted."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from tests.parallel.cases import Cases
from tests.parallel.workers.common import raises

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from reproduce import dryden
from reproduce.checkpoint import Checkpoint

cases = Cases()
SETTINGS = {"width": 40, "epochs": 3, "batch": 10, "train": 400, "test": 100, "seed": 0}


class _InterruptedError(Exception):
    pass


class Interrupted(Checkpoint):
    """Ends the training when an epoch is saved."""

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        super().save(epoch, state)
        if epoch == 1:
            raise _InterruptedError


@contextmanager
def folder() -> Iterator[Path]:
    """Of this rank alone, though ranks could share one."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "saved"


@cases.each({method: method for method in dryden.METHODS})
def an_interrupted_training_goes_on_exactly(method: str) -> None:
    settings = {**SETTINGS, "method": method}
    with folder() as one, folder() as other:
        expected = dryden.work(settings, Checkpoint(one, 0.0))
        raises(_InterruptedError, partial(dryden.work, settings, Interrupted(other, 0.0)))
        found = dryden.work(settings, Checkpoint(other, 0.0))
    del expected["seconds"], found["seconds"]
    assert found == expected
    assert len(found["test"]) == SETTINGS["epochs"]
    assert found["replicas_identical"] is (None if method == dryden.ALONE else True)


@cases.add
def ranks_go_on_from_the_last_epoch_that_all_have() -> None:
    with folder() as saved:
        checkpoint = Checkpoint(saved, 0.0)
        assert checkpoint.load() is None
        checkpoint.save(3, {"epoch": 3})
        kept = (saved / f"{hvd.rank()}-3.pt").read_bytes()
        checkpoint.save(4, {"epoch": 4})
        assert [file.name for file in saved.iterdir()] == [f"{hvd.rank()}-4.pt"]
        if hvd.rank() == 0:
            # ended before it had written the last one; the others, before they had removed the one before
            (saved / "0-4.pt").unlink()
        (saved / f"{hvd.rank()}-3.pt").write_bytes(kept)
        assert checkpoint.load() == {"epoch": 3}


@cases.add
def nothing_is_saved_before_it_is_time() -> None:
    with folder() as saved:
        Checkpoint(saved, 1000.0).save(0, {"x": torch.zeros(1)})
        assert not saved.exists()
