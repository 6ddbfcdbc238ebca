"""What a rank of the matrix runs: `python -m tests.faults.rank WHAT FOLDER HOW WHEN VICTIM`.

It trains a small network with WHAT. The rank VICTIM goes wrong in the way HOW at the moment WHEN.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.matrix import HOWS
from tests.parallel.rank import Report

STEPS, FAULTY_STEP = 8, 3
STOPPED_SECONDS = 20
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


class UserError(Exception):
    """What a user's code may raise."""


class Faults:
    """Goes wrong when the moment has come.

    Args:
        report: of this rank.
        how: "kill", "raise" or "stop".
        when: the moment; empty on ranks that do not go wrong.
    """

    def __init__(self, report: Report, how: str, when: str) -> None:
        self._report, self._how, self._when = report, how, when

    def at(self, moment: str) -> None:
        """Go wrong if this is the moment, once."""
        if not moment or moment != self._when:
            return
        self._when = ""
        self._report(wrong=time.time())
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._how == "raise":
            raise UserError("the user's own mistake")
        else:
            wake = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def _sgd(faults: Faults) -> Any:
    import torch

    class SGD(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            SGD.steps += 1
            faults.at("in step" if SGD.steps == FAULTY_STEP else "")
            return super().step(closure)

    return SGD


class Training:
    """A network and what it is trained with.

    Args:
        what: a key of `matrix.WHATS`, or "horovod", "ddp alone".
        faults: of this rank.
    """

    def __init__(self, what: str, faults: Faults) -> None:
        self.what, self.faults = what, faults
        self.optimizer: Any = None

    def start(self) -> None:
        """Import what this needs, start the ranks, wrap."""
        import torch

        self.faults.at("import")
        torch.set_num_threads(1)
        if self.what.startswith("ddp"):
            import torch.distributed as dist

            self.faults.at("init")
            dist.init_process_group("gloo")
            self.barrier: Callable[[], Any] = dist.barrier
        else:
            self.hvd = importlib.import_module("horovod.torch" if self.what == "horovod" else "hvd_compress.torch")
            self.faults.at("init")
            nodes = self.hvd.daso_process_sets(ranks_per_node=1) if self.what == "daso" else None
            self.hvd.init(process_sets=nodes)
            self.barrier = self.hvd.barrier
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(3)))
        self.faults.at("wrap")
        self.wrap()
        self._watch_backward()

    def wrap(self) -> None:
        """Wrap the model's optimizer, or the model."""
        sgd = _sgd(self.faults)(self.model.parameters(), lr=1e-3)
        named = list(self.model.named_parameters())
        if self.what.startswith("ddp"):
            self._wrap_model(sgd)
            return
        self.hvd.broadcast_parameters(self.model.state_dict(), 0)
        if self.what == "horovod":
            self.optimizer = self.hvd.DistributedOptimizer(sgd, named)
        elif self.what in ("eventgrad", "one-sided"):
            transport = "one_sided" if self.what == "one-sided" else "alltoall"
            self.optimizer = self.hvd.EventGraDOptimizer(sgd, named, transport=transport)
        elif self.what == "daso":
            self.optimizer = self.hvd.DASO(sgd, named, ranks_per_node=1)
        elif self.what == "diloco":
            self.optimizer = self.hvd.DiLoCo(sgd, named, sync_every=3, delay=1)
        elif self.what == "async":
            self.optimizer = self.hvd.AsyncParameterServerOptimizer(sgd, named)
        else:
            from hvd_compress import Adaptive, Auto, OneBit

            compression = {"onebit": OneBit(), "adaptive": Adaptive(pi=16), "auto": Auto()}[self.what]
            settings = {} if self.what == "auto" else {"min_numel": 0}
            self.optimizer = self.hvd.DistributedOptimizer(sgd, named, compression, **settings)

    def _wrap_model(self, sgd: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.model, self.optimizer = DistributedDataParallel(self.model), sgd
        if self.what == "ddp":
            from hvd_compress import OneBit, ddp

            ddp.register_comm_hook(self.model, OneBit(), min_numel=0)

    def _watch_backward(self) -> None:
        layers = self.model.module if self.what.startswith("ddp") else self.model
        layers[1].weight.register_hook(lambda _: self.faults.at(self._in_backward))
        self._in_backward = ""

    def run(self, steps: int) -> None:
        """Make so many steps, and save in the middle."""
        if self.what == "async" and self.optimizer.is_server:
            self.optimizer.serve()
            return
        for step in range(steps):
            self.faults.at("last step" if step == steps - 1 else "")
            self._in_backward = {0: "first backward", FAULTY_STEP: "mid-backward"}.get(step, "")
            self.step()
            if step == FAULTY_STEP + 1:
                self.save()

    def step(self) -> None:
        """Make one step."""
        import torch

        self.optimizer.zero_grad()
        self.model(torch.ones(4, 200)).sum().backward()
        self.faults.at("before step" if self._in_backward == "mid-backward" else "")
        self.optimizer.step()

    def save(self) -> None:
        """Write parameters and what is owed, as users do between steps."""
        import torch

        state = {"model": self.model.state_dict()}
        if hasattr(self.optimizer, "compression_state_dict"):
            state["compression"] = self.optimizer.compression_state_dict()
        self.faults.at("save")
        torch.save(state, Path(os.environ["TMPDIR"]) / f"saved-{os.getpid()}.pt")

    def end(self) -> None:
        """Come to the end together."""
        import torch

        if self.what in ("eventgrad", "one-sided", "diloco"):
            self.optimizer.average_parameters()
        elif self.what == "daso":
            self.optimizer.epoch_end(torch.tensor(1.0))
        elif self.what == "async":
            self.optimizer.close()
        self.barrier()

    def checksum(self) -> int:
        """Of the parameters."""
        return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters()))


def main() -> None:
    """Train, and go wrong."""
    what, folder, how, when, victim = sys.argv[1:]
    rank = next(int(os.environ[name]) for name in _RANK if name in os.environ)
    is_victim = rank == int(victim)
    with contextlib.closing(Report(Path(folder), rank)) as report:
        report(started=True)
        faults = Faults(report, how, when if is_victim and how in HOWS else "")
        odd = how if is_victim else ""
        training = Training({"other optimizer": when, "horovod beside": "horovod"}.get(odd, what), faults)
        try:
            if odd and how not in HOWS:
                report(wrong=time.time())
            training.start()
            training.run(STEPS + (odd == "one step more"))
            training.end()
        except Exception as error:
            report(error=f"{type(error).__name__}: {error}", at=time.time())
            raise
        report(checksum=training.checksum())
        report(end=True)


if __name__ == "__main__":
    main()
