"""Callbacks for `fit` that Horovod does not have: what compression does, when it begins, and its state in files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from hvd_compress._keras.callbacks import ALL_RANKS, EdgeCallback
from hvd_compress._keras.warmup import compression_at, later_of, same, warmup_stages
from hvd_compress.engine import empty_state
from hvd_compress.errors import StateError
from hvd_compress.feedback import read_state, redistribute, write_state
from hvd_compress.policy import meant

__all__ = ["CompressionCheckpointCallback", "CompressionStatsCallback", "CompressionWarmupCallback"]


class CompressionStatsCallback(EdgeCallback):
    """Puts what compression did in an epoch into `logs`; put it before callbacks that show or write them.

    Keys, each of this rank: `compression_ratio` (bytes of a dense ring allreduce / bytes sent), `bytes_sent`, and
    `residual_norm` (Euclidean norm of the residuals, that is, what compression left out, at the end of the epoch). The
    root of a parameter server sends more than the others; a `MetricAverageCallback` behind this one averages all keys
    over the ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = {"bytes_sent": 0.0, "dense_bytes": 0.0}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the counters."""
        self._before = {**self._before, **self.optimizer().compression_stats()["total"]}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the epoch's share into the logs."""
        total = self.optimizer().compression_stats()["total"]
        if logs is None or not total:
            return
        sent = total["bytes_sent"] - self._before["bytes_sent"]
        dense = total["dense_bytes"] - self._before["dense_bytes"]
        logs["compression_ratio"] = dense / sent if sent else 1.0
        logs["bytes_sent"] = float(sent)
        logs["residual_norm"] = total["residual_norm"]


class CompressionWarmupCallback(EdgeCallback):
    """Trains uncompressed first, then sends less and less, until the optimizer's own compressor takes over.

    Error feedback delays gradients, which hurts most while they still change fast. Sources: Lin et al., Deep Gradient
    Compression (ICLR 2018), section 3.3: top-k keeps 25 % of the values in the first epoch of the warm-up, then 6.25 %,
    and so on; here adaptive's pi grows in the same way, and compressors without such a number start after the dense
    epochs, as in Tang et al., 1-bit Adam (ICML 2021), whose variance this does not freeze.

    Args:
        warmup_epochs: number of epochs in which top-k and adaptive send less and less.
        dense_epochs: number of epochs without compression before that.
        stages: {first epoch: compression} instead of both; must have an entry for epoch 0.

    Raises:
        ValueError: a number below 0, or stages that do not begin with epoch 0.
    """

    def __init__(self, warmup_epochs: int = 4, dense_epochs: int = 1, stages: dict[int, Any] | None = None) -> None:
        super().__init__()
        if warmup_epochs < 0 or dense_epochs < 0:
            raise ValueError(f"warmup_epochs={warmup_epochs}, dense_epochs={dense_epochs}: must be 0 or more")
        if stages is not None and 0 not in stages:
            raise ValueError(f"stages={stages!r}: must say what epoch 0 uses")
        self.warmup_epochs = warmup_epochs
        self.dense_epochs = dense_epochs
        self.stages = None if stages is None else {epoch: meant(c) for epoch, c in stages.items()}
        self._gives_stages = stages is not None

    def on_train_begin(self, logs: Any = None) -> None:
        """Lay out the stages."""
        if not self._gives_stages:
            self.stages = warmup_stages(self.optimizer()._hvd.asked_for, self.dense_epochs, self.warmup_epochs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Change the compression, if it is time."""
        distribution = self.optimizer()._hvd
        wanted = compression_at(self.stages or {}, epoch)
        if not self._gives_stages and distribution.has_begun:
            # a second fit counts its epochs from 0 again, but a warm-up happens once: dense again would lose residuals
            wanted = later_of(self.stages or {}, wanted, distribution.compressed_as)
        if same(wanted, distribution.settings["compression"]):
            return
        distribution.replace_compression(wanted)
        # the sizes of payloads are part of the traced step
        self.model.make_train_function(force=True)


class CompressionCheckpointCallback(EdgeCallback):
    """Saves each rank's residuals (what compression left out) beside the model's checkpoints, and loads them on resume.

    At the end of each epoch every rank writes a file of its own. When training begins, all ranks load their files if
    all of them have one that belongs to the optimizer's present number of iterations; else no rank does, and there is a
    warning. With another number of ranks the files of all former ranks are read and the residuals divided, so that
    their sum is kept. A file that is damaged or missing counts as one that does not belong; files of another model end
    `fit` with StateError. Put it after the callbacks that restore and broadcast the model.

    Args:
        directory: for the files; if the number of ranks may change, on a file system that all ranks see.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__()
        self.directory = Path(directory)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write this rank's state."""
        optimizer = self.optimizer()
        state = {**optimizer.compression_state_dict(), "iterations": int(optimizer.iterations)}
        write_state(self.directory / f"compression-{self.edge.rank()}.npz", state)

    def on_train_begin(self, logs: Any = None) -> None:
        """Take up the state, on all ranks or on none."""
        optimizer = self.optimizer()
        try:
            state, problem = self._read(int(optimizer.iterations))
        except (OSError, StateError) as error:
            # of this rank's file alone: the others must hear of it
            state, problem = None, str(error)
        ready = self.edge.average([float(state is not None)], ["ranks with a compressor state"])[0]
        if ready > ALL_RANKS and state is not None:
            optimizer.load_compression_state_dict(state)
        elif problem or ready > 0:
            warnings.warn(
                f"compressor state in {self.directory} is left out on all ranks, which drops what was still owed: "
                f"{problem or 'other ranks cannot use theirs'}",
                stacklevel=2,
            )

    def _read(self, iterations: int) -> tuple[dict[str, Any] | None, str]:
        """The state for this rank, or None with the reason; there is none if nothing was ever saved."""
        files = sorted(self.directory.glob("compression-*.npz"))
        if not files:
            return None, ""
        process_set = self.optimizer()._hvd.settings["process_set"]
        ranks, position = self.edge.ranks_of(process_set), self.edge.position_in(process_set)
        own = self.directory / f"compression-{self.edge.rank()}.npz"
        state = read_state(own if own in files else files[0])
        belongs = state.get("iterations") == iterations
        if belongs and own in files and (state["size"], state["rank"]) == (ranks, position):
            return state, ""
        if not process_set.included():
            # it exchanges nothing, and what all owe is not its own
            return empty_state(), ""
        # of another number of ranks; those that took no part have saved states of size 1
        states = [s for s in map(read_state, files) if s.get("iterations") == iterations]
        if not states:
            return None, f"it was saved after {state.get('iterations')} iterations, the optimizer has done {iterations}"
        former = max(s["size"] for s in states)
        averages = self.optimizer()._hvd.settings["op"] == self.edge.average_op
        return redistribute([s for s in states if s["size"] == former], ranks, average=averages)[position], ""
