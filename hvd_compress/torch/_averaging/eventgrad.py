"""`EventGraDOptimizer`: a torch optimizer whose parameters are averaged among neighbours when they changed enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress._torch.parameters import Buffers, NamedBuffers, trained
from hvd_compress._torch.scaling import told_by_scaler, unscale
from hvd_compress.compressors import NoCompression
from hvd_compress.elastic import is_elastic, refuse_elastic_averaging
from hvd_compress.errors import UnsupportedError
from hvd_compress.gossip import GossipSettings
from hvd_compress.schedules import ConstantThreshold, SlopeThreshold, Trigger
from hvd_compress.topology import Ring, Topology
from hvd_compress.torch._averaging.carrying import Averaging, refuse_before_sync
from hvd_compress.torch._averaging.gossip import Gossip
from hvd_compress.torch._gradients.owners import check_sole_step, refuse_retired, take_over
from hvd_compress.torch._horovod import laid_over, step_below

__all__ = ["DPSGDOptimizer", "EventGraDOptimizer"]


class _NoNeighbours:
    """What a copy of a wrapped optimizer has in the place of its neighbours."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "a copy of an EventGraD optimizer has no neighbours: copy the model, and wrap an optimizer of the copy"
        )


class _Overrides:
    """Methods laid over those of the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]  # of the optimizer's class
    _gossip: Gossip | _NoNeighbours = _NoNeighbours()
    # a GradScaler would not call `step` at all where a gradient is not finite, and ranks would count differently
    _step_supports_amp_scaling = True
    _averaging: Averaging | None = None
    """In an elastic run."""
    _retired = False
    """Whether another optimizer has taken over the parameters."""

    def _owned(self) -> set[int]:
        return {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}

    def retire(self) -> None:
        """Another optimizer takes over the parameters: refuse to go on."""
        self._retired = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the parameters with those of the neighbours, and update them with this rank's gradients.

        A closure is called once, before the averaging: gradients belong to the parameters as they were. Where a
        GradScaler has found a gradient that is not finite, this rank averages and does not update.
        """
        if self._retired:
            refuse_retired()
        refuse_before_sync(self._averaging)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gossip.check(self.param_groups)
        with told_by_scaler(self) as told:
            if told.get("grad_scale") is not None:
                unscale(self.param_groups, told["grad_scale"])
            self._gossip.mix()
            if not told.get("found_inf", False):
                step_below(self)
        self._gossip.after_update()
        return loss

    def average_parameters(self) -> None:
        """Make the parameters and named buffers of all ranks their mean, when all have come here; a collective call.

        A rank that comes first answers its neighbours until the last one has come, so ranks may have made different
        numbers of steps. Buffers that are not of a floating type stay those of each rank. Training may go on.
        """
        refuse_before_sync(self._averaging)
        self._gossip.check(self.param_groups)
        self._gossip.average()

    def consensus_distance(self) -> float:
        """How far the ranks are apart: the root of the mean over ranks of ‖x - mean of x‖²; a collective call.

        A rank that comes first answers its neighbours until the last one has come, as in `average_parameters`.
        """
        refuse_before_sync(self._averaging)
        return self._gossip.consensus_distance()

    def event_stats(self) -> dict[str, Any]:
        """Messages and bytes that this rank has sent so far.

        Returns:
            A dict. "total" has counters, and "tensors" has `{name: counters}`. A message is one tensor to one
            neighbour. Counters are messages, messages_always (if everything had been sent in every pass),
            messages_percent, and so for bytes. "total" has passes (steps, one more with `overlap`), and its bytes
            include what a message takes beside its payloads; tensors have the present threshold. With `traced` also
            "trace": norms, thresholds and sent, arrays of (passes, tensors). In elastic runs "lost_ranks" is how many
            ranks were lost.
        """
        lost = {} if self._averaging is None else self._averaging.stats()
        return {**self._gossip.member.stats(), **lost}

    def event_state_dict(self) -> dict[str, Any]:
        """Histories, thresholds and copies of this rank; save them on each rank, all after the same step.

        Returns:
            A dict of tensors and plain values that `torch.save` takes.
        """
        return self._gossip.state_dict()

    def load_event_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `event_state_dict` returned on this rank; training goes on as if it had not stopped.

        With the transport "one_sided", whose messages may be under way when a state is saved, this is a collective
        call, and the next step sends all tensors whole.

        Raises:
            StateError: not such a state, or of another rank, network or settings.
        """
        refuse_before_sync(self._averaging)
        self._gossip.load_state_dict(state)

    def close(self) -> None:
        """Give up the memory that the transport "one_sided" shares with the neighbours; a collective call."""
        self._gossip.member.close()


class _EventGraDAveraging(Averaging):
    """See there. Nothing is owed once all ranks have equal parameters: what was not sent is in their mean.

    Args:
        gossip: of the optimizer.
    """

    kind = "EventGraDOptimizer"

    def __init__(self, gossip: Gossip) -> None:
        self._gossip = gossip
        self.parameters, self.buffers = gossip.parameters, gossip.buffers

    def save(self) -> Any:
        return self._gossip.member, self._gossip.member.state_dict()

    def restore(self, saved: Any) -> None:
        # a sync that has failed may have made another member
        if saved is not None:
            self._gossip.member, state = saved
            self._gossip.member.restore(state)

    @property
    def steps(self) -> int:
        # ranks may make different numbers
        return 0

    def owed(self) -> dict[str, Any]:
        return {}

    def land(self, state: Any) -> None:
        """Do nothing: what neighbours have sent is used in the next step, and all ranks are equal before that."""

    def agreed(self) -> Any:
        return self._gossip.member.watched()

    def begin_again(self, label: str, agreed: Any, is_kept: bool) -> None:
        topology = self._gossip.settings.topology
        if hvd.size() > 1:
            try:
                topology.neighbours(hvd.size())
            except ValueError as error:
                raise UnsupportedError(
                    f"EventGraDOptimizer among {hvd.size()} ranks, in an elastic run: {error}. Give a topology for any "
                    "number of ranks, such as Ring(), or start with a fixed number of ranks"
                ) from error
        before = self._gossip.begin_again()
        if agreed is not None:
            self._gossip.member.go_on_from(before.watched() if is_kept else agreed, self.parameters.arrays())
            self._gossip.member.inherit(before)

    def stats(self) -> dict[str, Any]:
        return {} if self.lost is None else {"lost_ranks": self.lost.ranks}


def EventGraDOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    trigger: Trigger = SlopeThreshold(),
    topology: Topology = Ring(),
    transport: str = "auto",
    compression: Any = NoCompression(),
    mixing: str = "auto",
    consensus_rate: float | None = None,
    overlap: bool = False,
    named_buffers: NamedBuffers = None,
    traced: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Wrap an optimizer so that each rank trains on its own and averages its parameters with its neighbours'.

    Each `step()` sends the parameters that have changed enough, averages with what the neighbours sent last, and
    updates the average with this rank's gradient at its own parameters: equation 3 of Ghosh and Gupta, EventGraD (MLHPC
    2020). Start all ranks from equal parameters (`hvd.broadcast_parameters`), and end with `average_parameters()`.
    Differences from the authors' code: neighbours start from a rank's own values, not zeros; with two ranks, the other
    rank is one neighbour, not two; all ranks make the mean; parameters without gradient are neither sent nor averaged.
    All ranks of the process set must call this.

    With "alltoall" a step is a collective call: ranks may make different numbers of steps only where they call no other
    collectives in between, such as averages of losses. Use a GradScaler as usual; it may skip the update on one rank
    alone, and the step still counts.

    Args:
        optimizer: to wrap; its state (momentum) stays on its rank.
        named_parameters: such as `model.named_parameters()`.
        trigger: when a tensor is sent.
        topology: who are neighbours, with which weights.
        transport: "alltoall", one Horovod alltoall a step, in which only neighbours send anything and all wait for all;
            "one_sided", MPI's passive-target puts, where nobody waits; "auto" is "alltoall".
        compression: a compressor of hvd_compress or a `Policy` for what is sent. Then messages hold the difference to
            what was sent before, so that nothing is lost; the first message has all values.
        mixing: "stale" averages this rank's present values with the last ones of its neighbours, as the paper does; the
            mean over ranks then drifts by what was not sent, and with lossy compression ranks hardly move.
            "mean_preserving" adds differences between what this rank and its neighbours sent last. That keeps the mean
            (with "one_sided", except for what is under way), and needs a copy of the parameters (Koloskova et al.,
            CHOCO-SGD, ICML 2019, algorithm 2). "auto" is "mean_preserving" with lossy compression, else "stale".
        consensus_rate: how far a step goes towards the average, as a fraction. By default 1.0 for "stale". For
            "mean_preserving", which diverges if it is too large, the default is 0.3, or twice the share of values that
            top-k or adaptive send if that is less.
        overlap: send when `step()` ends, while the next gradient is computed. Same results, unless parameters are
            changed between steps.
        named_buffers: buffers that `average_parameters()` averages: the model, whose buffers are looked up then, or
            (name, tensor) pairs such as `model.named_buffers()`.
        traced: keep norms, thresholds and events of every step for `event_stats()`.
        process_set: the ranks that take part.

    Raises:
        ValueError: a setting out of its range, or parameters without or with equal names.
        TypeError: an argument of another type than stated.
        UnsupportedError: LBFGS; a combination of settings that cannot be honoured; "one_sided" without MPI; in an
            elastic run "one_sided", a process set, and, raised by `TorchState.sync`, a topology that has no weights for
            the number of ranks.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.EventGraDOptimizer(
            opt, model.named_parameters(), trigger=SlopeThreshold(horizon=1.0), named_buffers=model
        )
        ...  # train as always
        opt.average_parameters()
    """
    check_sole_step("EventGraDOptimizer", optimizer)
    settings = GossipSettings(trigger, topology, transport, compression, mixing, consensus_rate, overlap, traced)
    if settings.is_one_sided:
        refuse_elastic_averaging(
            'EventGraDOptimizer(transport="one_sided")',
            'Horovod runs these with Gloo only, and MPI does not outlive a rank. Use transport="alltoall"',
        )
    if process_set.process_set_id != 0:
        refuse_elastic_averaging(
            f"EventGraDOptimizer(process_set={process_set})",
            "Horovod forgets process sets when ranks come or go. Leave it out",
        )
    buffers = Buffers(named_buffers)
    parameters = trained(optimizer, named_parameters)
    gossip = Gossip(parameters, buffers, settings, process_set)
    wrapped = laid_over(optimizer, _Overrides)
    wrapped._gossip = gossip
    wrapped._averaging = _EventGraDAveraging(gossip) if is_elastic() else None
    take_over(wrapped, parameters.values(), "EventGraDOptimizer", optimizer)
    return wrapped


def DPSGDOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    **settings: Any,
) -> Any:
    """Wrap an optimizer for decentralized SGD: `EventGraDOptimizer` that sends everything in every step.

    Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? (NeurIPS 2017), algorithm 1.

    Args:
        optimizer: to wrap.
        named_parameters: such as `model.named_parameters()`.
        settings: those of `EventGraDOptimizer`, except `trigger`.
    """
    return EventGraDOptimizer(optimizer, named_parameters, trigger=ConstantThreshold(0.0), **settings)
