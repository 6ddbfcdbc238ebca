"""`AsyncParameterServerOptimizer`: one rank updates with gradients of the others, which do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress._torch.parameters import Parameters, as_tensors, trained
from hvd_compress.async_server import AsyncServerSettings, ServerMember
from hvd_compress.compressors import NoCompression
from hvd_compress.errors import UnsupportedError
from hvd_compress.mpi import communicator, join_server
from hvd_compress.torch._gradients.owners import check_sole_step, refuse_retired, take_over
from hvd_compress.torch._horovod import laid_over, step_below
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["AsyncParameterServerOptimizer"]

Array = np.ndarray[Any, Any]


class _NoServer:
    """What a copy of a wrapped optimizer has in the place of its server."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "a copy of an asynchronous optimizer has no server: copy the model, and wrap an optimizer of the copy"
        )


class _Values:
    """See `async_server.Values`."""

    has_update = True

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = Parameters(parameters, "the asynchronous optimizer")
        self.is_updating = False
        """Whether a `step` of the optimizer is one of the server."""
        self.optimizer: Any = None

    def arrays(self) -> Sequence[Array]:
        """See `Values`."""
        return self.parameters.arrays()

    @torch.no_grad()
    def take(self, arrays: Sequence[Array]) -> None:
        """See `Values`."""
        self.parameters.write(arrays)

    @torch.no_grad()
    def update(self, gradients: Sequence[Array | None]) -> None:
        """See `Values`."""
        self.parameters.set_gradients(gradients)
        self.is_updating = True
        try:
            # not the method below: a learning-rate scheduler lays its own over it, which counts steps
            self.optimizer.step()
        finally:
            self.is_updating = False


class _Overrides:
    """Methods laid over those of the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]  # of the optimizer's class
    _server: ServerMember | _NoServer = _NoServer()
    _values: _Values | _NoServer = _NoServer()
    _retired = False
    """Whether another optimizer has taken over the parameters."""

    def _owned(self) -> set[int]:
        return {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}

    def retire(self) -> None:
        """Another optimizer takes over the parameters: refuse to go on."""
        self._retired = True

    @property
    def is_server(self) -> bool:
        """Whether this rank serves; the others train."""
        return self._server.is_server

    @property
    def is_over(self) -> bool:
        """On a worker: whether the others have finished while it was silent, so that its gradients count no more."""
        return self._server.is_over

    def serve(self, on_update: Callable[[int], object] | None = None) -> None:
        """On the server: update with each gradient as it comes, until all workers have called `close()`.

        Workers that have been silent for `patience` seconds are not waited for. Learning rates are those of the
        server's optimizer; change them in `on_update`.

        Args:
            on_update: called with the number of updates after each of them.

        Raises:
            UnsupportedError: this rank is a worker.
        """
        self._server.serve(on_update)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """On a worker: send its gradients, once the last ones are answered; parameters may be newer afterwards.

        Nothing is updated here. Gradients that are not finite are not applied, and residuals stay as they are.

        Raises:
            UnsupportedError: this rank is the server.
            HvdCompressError: the server has failed.
        """
        if self._values.is_updating:
            return step_below(self)
        if self._retired:
            refuse_retired()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._values.parameters.check(self.param_groups)
        self._server.step(self._values.parameters.gradients)
        return loss

    def server_stats(self) -> dict[str, Any]:
        """What has become of the gradients so far.

        Returns:
            On the server {"is_server": True, "updates", "bytes_received", "bytes_sent", "staleness", "workers": {rank:
            counters}}. "staleness" counts the updates that were made between the parameters of a gradient and its
            arrival, of those that were applied: mean, max and histogram, {staleness: gradients}. Counters of a worker
            are clock (gradients that it has sent, or had to catch up on), applied, too_stale, not_finite, given_up and
            returned (how often it was silent for too long, and came back), bytes and staleness. On a worker
            {"is_server": False} with steps, too_stale, not_finite, waited_steps, waited_seconds, bytes sent and
            received, and what these would have been without compression.
        """
        return self._server.stats()

    def compression_state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, to be saved on each rank; the server's `state_dict()` has the optimizer's own
        state.

        Returns:
            A dict of tensors and plain values that `torch.save` takes. A gradient under way counts as applied.
        """
        return as_tensors(self._server.state_dict())

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `compression_state_dict` returned on this rank.

        Raises:
            StateError: not such a state, or of another rank or other parameters.
        """
        self._server.load_state_dict(state)

    def close(self) -> None:
        """Say that this rank has finished; on the server, wait until all have said so. Done at exit at the latest."""
        self._server.close()


def AsyncParameterServerOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    staleness: int = 4,
    compression: Any = NoCompression(),
    answer: Any = NoCompression(),
    patience: float = 60.0,
    server: int = 0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Wrap an optimizer so that one rank, the server, updates with the gradients of all others as they come.

    The other ranks are workers, and do not wait for each other: a worker's `step()` sends its gradients, and the next
    ones are computed with the parameters that it has. It waits only for the answer to the last gradients, which the
    server holds back while the worker is more than `staleness` gradients ahead of the slowest. Each worker's gradients
    make an update of their own, so that the learning rate applies once for every worker. Source: Sievert (2017),
    section 3.2.2; the bound is that of Ho et al., stale synchronous parallel (NeurIPS 2013). It needs mpi4py and a run
    under MPI. All ranks of the process set must call this, which gives them the server's parameters; load checkpoints
    before.

    A worker that stops for more than `patience` seconds does not stop the others, and takes part again when it goes on;
    a worker that dies ends the job, as is usual with MPI. Buffers, such as those of batch norm, stay local to each
    worker. The server keeps memory for the longest gradient and answer of each worker, and, where answers are
    compressed, a copy of the parameters for each worker.

    Args:
        optimizer: to wrap; only the one on the server updates and has a state.
        named_parameters: such as `model.named_parameters()`.
        staleness: how many gradients a worker may be ahead of the slowest. 0: all wait for all in each step; 1: the
            same, but they compute the next gradient meanwhile.
        compression: a compressor or a `Policy` for gradients, with its error feedback.
        answer: the same for parameters: the server then sends differences to what the worker has, so that nothing is
            lost.
        patience: seconds of silence after which a worker that others wait for does not count.
        server: rank in the process set that serves.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range, or parameters without or with equal names; a rank outside of the set.
        TypeError: an argument of another type than stated.
        UnsupportedError: LBFGS; no MPI, or one rank alone.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.AsyncParameterServerOptimizer(opt, model.named_parameters(), staleness=4, compression=TopK(0.01))
        if opt.is_server:
            opt.serve()
        else:
            ...  # train as always
        opt.close()
    """
    check_sole_step("AsyncParameterServerOptimizer", optimizer)
    if not process_set.included():
        raise ValueError("this rank is not in process_set: wrap its optimizer on those ranks only")
    settings = AsyncServerSettings(staleness, compression, answer, patience, server)
    named = trained(optimizer, named_parameters)
    values = _Values(named)
    wrapped = laid_over(optimizer, _Overrides)
    wrapped._values, values.optimizer = values, wrapped
    wrapped._server = _joined(values, settings, process_set)
    # a GradScaler would leave gradients as they are to a fused optimizer, which makes its step on the server
    wrapped._step_supports_amp_scaling = False
    take_over(wrapped, named.values(), "AsyncParameterServerOptimizer", optimizer)
    return wrapped


def _joined(values: _Values, settings: AsyncServerSettings, process_set: hvd.ProcessSet) -> ServerMember:
    ranks = TorchRanks(process_set)
    if ranks.size > 1:
        # ranks with another optimizer would never come to what is compared over MPI
        ranks.agree({"optimizer": "AsyncParameterServerOptimizer"}, beside=[t.name for t in values.parameters.tensors])
    mpi, comm = communicator(
        hvd, ranks, "AsyncParameterServerOptimizer", "messages that two ranks alone know of",
        "DistributedOptimizer",
    )  # fmt: skip
    return join_server(values.parameters.tensors, settings, values, mpi, comm)
