"""`DASO`: gradients averaged inside of nodes in each step, parameters between nodes now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress._torch.parameters import (
    Buffers,
    Copies,
    NamedBuffers,
    Parameters,
    as_tensors,
    named_or_numbered,
    trained,
)
from hvd_compress.averaging import Groups
from hvd_compress.compressors import BF16, NoCompression
from hvd_compress.daso import DasoMember, DasoSettings, number_of
from hvd_compress.elastic import is_elastic
from hvd_compress.schedules import DasoSchedule, Moment
from hvd_compress.torch._averaging.carrying import Averaging, refuse_before_sync
from hvd_compress.torch._averaging.in_nodes import refuse_complex, refuse_elastic_nodes, update_in_node, wrapped_in_node
from hvd_compress.torch._gradients.owners import check_owner
from hvd_compress.torch._ranks import NODES

__all__ = ["DASO", "daso_process_sets"]


class _Overrides:
    """Methods laid over those of `DistributedOptimizer` of one node."""

    # of that class
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]

    _daso: _Daso
    _averaging: Averaging | None = None
    """In an elastic run."""
    # a GradScaler would not call `step` at all where a gradient is not finite, and nodes would count differently
    _step_supports_amp_scaling = True

    def _owned(self) -> set[int]:
        # also where a node is one rank, which exchanges no gradients
        return self._daso.parameters.ids()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients in the node, update, and do what is due between nodes."""
        refuse_before_sync(self._averaging)
        self._daso.check(self.param_groups)
        loss = update_in_node(self, closure)
        self._daso.after_update()
        return loss

    def epoch_end(self, loss: Any = None) -> None:
        """End an epoch: all ranks get the same parameters, and the schedule looks at the loss; a collective call.

        Named buffers, and with `average_state` the state of the optimizer, become their mean over the ranks.

        Args:
            loss: of this rank in the epoch, a number or a tensor or an array of one element; ranks take the mean. None
                leaves B and S as they are.

        Raises:
            TypeError: the loss is no number.
            MismatchError: some ranks give a loss, others None; or some have made more steps. Raised on all ranks.
        """
        refuse_before_sync(self._averaging)
        self._daso.check(self.param_groups)
        self._daso.end_epoch(number_of(loss), self.state)

    def daso_stats(self) -> dict[str, Any]:
        """What this rank has done so far.

        Returns:
            nodes, ranks_of_node; phase, epoch, global_skips (B) and batches_to_wait (S) at present; batches;
            synchronizations: blocking, sent, merged; parameter_bytes; bytes_between_nodes and bytes_inside_nodes that
            this rank has sent for synchronizations, an allreduce counted as a ring; seconds_between_nodes and
            seconds_inside_nodes that it has waited for them; gradient_bytes, sent inside of the node for gradients;
            epochs: a list of {epoch, phase, global_skips, batches_to_wait, loss}, for plots. In elastic runs also
            "lost_ranks" and "lost_norm", as `DistributedOptimizer.compression_stats` has them.
        """
        lost = {} if self._averaging is None else self._averaging.stats()
        return {**self._daso.member.stats(), "gradient_bytes": self._daso.gradient_bytes, **lost}

    def daso_state_dict(self) -> dict[str, Any]:
        """The schedule, the residuals, and what is under way; save them on each rank, all after the same step.

        This call waits for what is under way, which is merged when it is due.

        Returns:
            A dict of tensors and plain values that `torch.save` takes.
        """
        return as_tensors(self._daso.member.state_dict())

    def load_daso_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `daso_state_dict` returned on this rank; training goes on as if it had not stopped.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        refuse_before_sync(self._averaging)
        self._daso.member.load_state_dict(state)


class _Daso:
    """What a wrapped optimizer has of DASO.

    Args:
        parameters: by name.
        buffers: averaged at the end of an epoch.
        settings: the same on all ranks.
        groups: where this rank stands.
        ranks: how many its node has.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        buffers: Buffers,
        settings: DasoSettings,
        groups: Groups,
        ranks: int,
    ) -> None:
        self.parameters = Parameters(parameters, "DASO")
        self.buffers = buffers
        self._by_name = parameters
        nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
        self._gradient_bytes = round(2 * (ranks - 1) / ranks * nbytes)
        self.gradient_bytes = 0
        self.begin(settings, groups)

    def begin(self, settings: DasoSettings, groups: Groups) -> None:
        """Begin among these ranks, as if no step had been made; a collective call."""
        self.member = DasoMember(self.parameters.tensors, settings, groups)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if parameters have changed so that nodes cannot average them; all ranks are told."""
        if problem := self.parameters.problem(groups):
            self.refuse(problem)
            raise ValueError(problem)

    def refuse(self, problem: str) -> None:
        """Let all ranks know where they meet next that this one cannot go on; the caller raises what it knows."""
        self.member.refuse(problem)

    @torch.no_grad()
    def after_update(self) -> None:
        """Count a batch and do what is due."""
        self.gradient_bytes += self._gradient_bytes
        moment = self.member.batch()
        if moment != Moment():
            arrays = self.parameters.arrays()
            if self.member.act(moment, arrays):
                self.parameters.write(arrays)

    @torch.no_grad()
    def end_epoch(self, loss: float | None, state: Any) -> None:
        """Make ranks equal, and count an epoch."""
        arrays = self.parameters.arrays()
        if self.member.end_epoch(arrays, loss):
            self.parameters.write(arrays)
        of_state = Copies(self._state_of(state) if self.member.settings.average_state else {})
        self.member.average({**self.buffers.arrays(), **of_state.arrays})
        self.buffers.take()
        of_state.take()

    def _state_of(self, state: Any) -> dict[str, torch.Tensor]:
        """What the optimizer keeps for each element, such as momentum; its counts of steps are equal anyway.

        Where a parameter has had no gradient on this rank, and may have had one on another, nothing is kept yet: zeros
        stand for it.
        """

        def kept(p: torch.Tensor) -> dict[str, torch.Tensor]:
            tensors = {key: v for key, v in state.get(p, {}).items() if isinstance(v, torch.Tensor)}
            return {key: v for key, v in tensors.items() if v.is_floating_point() and v.dim() and v.shape == p.shape}

        found = {name: kept(p) for name, p in self._by_name.items()}
        keys = sorted({key for of_p in found.values() for key in of_p})
        return {
            f"{key} of {name}": found[name][key] if key in found[name] else torch.zeros_like(p)
            for name, p in self._by_name.items()
            for key in keys
            if p.dim() > 0
        }


class _DasoAveraging(Averaging):
    """See there.

    Each rank is a node. What is owed is part of the mean that ranks make when others have come or gone.

    Args:
        daso: of the optimizer.
    """

    kind = "DASO"
    moves_frozen = True

    def __init__(self, daso: _Daso) -> None:
        self._daso = daso
        self.parameters, self.buffers = daso.parameters, daso.buffers

    def save(self) -> Any:
        return self._daso.member, self._daso.member.keep()

    def restore(self, saved: Any) -> None:
        # a sync that has failed may have made another member
        if saved is not None:
            self._daso.member, kept = saved
            self._daso.member.go_back(kept)

    @property
    def steps(self) -> int:
        return self._daso.member.batches

    def owed(self) -> dict[str, Any]:
        return self._daso.member.owed()

    @torch.no_grad()
    def land(self, state: Any) -> None:
        arrays = self.parameters.arrays()
        self._daso.member.land(arrays)
        self.parameters.write(arrays)

    def pay(self, arrays: Sequence[Any], count: int) -> None:
        self._daso.member.pay(arrays, count)

    def agreed(self) -> Any:
        return self._daso.member.agreed()

    def begin_again(self, label: str, agreed: Any, is_kept: bool) -> None:
        before = self._daso.member
        self._daso.begin(before.settings, NODES.groups(NODES.sets(1), name=label))
        if agreed is not None:
            self._daso.member.go_on_from(agreed, before if is_kept else None)


def DASO(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    total_epochs: int | None = None,
    warmup_epochs: int = 0,
    cooldown_epochs: int = 0,
    global_skips: int = 4,
    batches_to_wait: int = 1,
    patience: int | None = 2,
    stability: float = 0.05,
    steps_per_epoch: int | None = None,
    form: str = "sharded",
    merge: str | float = "paper",
    compression: Any = NoCompression(),
    blocking_compression: Any = BF16(),
    average_state: bool = False,
    named_buffers: NamedBuffers = None,
    ranks_per_node: int | None = None,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
) -> Any:
    """Wrap an optimizer for distributed asynchronous and selective optimization over several nodes.

    Gradients are averaged inside the node during the backward pass, and each `step()` updates with them. Between nodes
    parameters are averaged: after every step in warm-up and cool-down, else every B steps. Then the average arrives S
    steps later and is merged by equation 1 of Coquelin et al., DASO (2021). Call `epoch_end(loss)` after each epoch;
    then all ranks have equal parameters. Start all ranks from equal parameters (`hvd.broadcast_parameters`), and
    Horovod with `hvd.init(process_sets=hvd.daso_process_sets())`. With one node it is plain Horovod; with one rank on
    each node, gradients are not exchanged at all. Differences from the authors' code: see `DasoSchedule`; gradients are
    averaged in every step; what is sent is a snapshot; messages of 16 bits hold changes, not parameters, and what they
    leave out goes with the next change. All ranks must call this.

    Use a GradScaler as usual; a step that it skips on one node counts as a batch.

    Args:
        optimizer: to wrap; its state (momentum) stays on its rank.
        named_parameters: such as `model.named_parameters()`.
        total_epochs: of the training; needed for a cool-down.
        warmup_epochs: at the beginning, in which nodes average after every step and wait for it.
        cooldown_epochs: the same at the end.
        global_skips: B, steps from one averaging of nodes to the next.
        batches_to_wait: S, steps until what was sent arrives, at most B; with 0 the step waits, and
            parameters become the mean.
        patience: epochs in a row without progress after which B and S are halved; None keeps them.
        stability: the share of the best loss by which a loss must be lower to count as progress.
        steps_per_epoch: if it is known, the last step of an epoch makes ranks equal, and nothing is sent that could not
            arrive before.
        form: "sharded", each rank of a node averages its share of the parameters with other nodes, all at the same
            time; "rotate", one rank of each node averages all, in turns, as in the paper.
        merge: "paper", (2S x + sum over nodes) / (2S + nodes); "delta", the mean plus this node's own change while it
            waited; or the weight of the mean, in (0, 1].
        compression: for the change since the last averaging, between warm-up and cool-down; a compressor of
            hvd_compress or a `Policy`. Refused are FP16, whose rounding would lose small changes for ever, PowerSGD,
            and biased compressors without error feedback, such as `Percentile(90)`, since what they leave out would be
            lost. The merge then keeps the same share of the node's own change while it waited, but nothing of how the
            node differed before, which is in the residual. Takes three more copies of the parameters.
        blocking_compression: the same for warm-up and cool-down.
        average_state: average the optimizer's state over the ranks at the end of each epoch.
        named_buffers: buffers that are averaged over the ranks at the end of each epoch: the model, whose buffers are
            looked up then, or (name, tensor) pairs such as `model.named_buffers()`.
        ranks_per_node: counted from rank 0 on; by default nodes are the hosts that Horovod reports. They need not have
            equally many ranks: every rank counts the same. In elastic runs it is 1: each rank is a node.
        backward_passes_per_step: backward passes that are summed up before a step.
        sparse_as_dense: make sparse gradients dense before they are averaged.

    Raises:
        ValueError: a setting out of its range, or parameters without or with equal names.
        TypeError: an argument of another type than stated.
        UnsupportedError: a process set is missing; FP16; an optimizer that is distributed already; in an elastic run,
            nodes of several ranks.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        hvd.init(process_sets=hvd.daso_process_sets())
        opt = hvd.DASO(opt, model.named_parameters(), total_epochs=30, warmup_epochs=3, cooldown_epochs=3)
        for epoch in range(30):
            ...  # train as always
            opt.epoch_end(loss)
    """
    check_owner("DASO", optimizer)
    schedule = DasoSchedule(
        global_skips,
        batches_to_wait,
        total_epochs,
        warmup_epochs,
        cooldown_epochs,
        patience,
        stability,
        steps_per_epoch,
    )
    settings = DasoSettings(schedule, form, merge, compression, blocking_compression, average_state)
    named = named_or_numbered(optimizer, named_parameters)
    buffers = Buffers(named_buffers)
    parameters = trained(optimizer, named)
    refuse_complex("DASO", parameters)
    refuse_elastic_nodes("DASO", ranks_per_node)
    sets = NODES.sets(ranks_per_node, beside=list(parameters))
    # in elastic runs it is made for the ranks of each sync: who joins wraps its optimizer while the others train
    groups = Groups.alone("hvd_compress.daso") if is_elastic() else NODES.groups(sets)
    daso = _Daso(parameters, buffers, settings, groups, sets.within.size())
    wrapped = wrapped_in_node(
        "DASO", optimizer, named, parameters, _Overrides, sets.within, daso.refuse,
        backward_passes_per_step=backward_passes_per_step, sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    wrapped._daso = daso
    wrapped._averaging = _DasoAveraging(daso) if is_elastic() else None
    return wrapped


def daso_process_sets(ranks_per_node: int | None = None, size: int | None = None) -> list[hvd.ProcessSet]:
    """The process sets that `DASO` needs, for `hvd.init(process_sets=...)`.

    Args:
        ranks_per_node: as given to `DASO`; by default what the launcher says of this host.
        size: number of ranks; by default what the launcher says.

    Raises:
        UnsupportedError: the launcher does not say it.
        ValueError: the number of ranks is not a multiple of `ranks_per_node`. Where hosts differ, use
            `hvd.init(process_sets="dynamic")`.
    """
    return NODES.process_sets(ranks_per_node, size)
