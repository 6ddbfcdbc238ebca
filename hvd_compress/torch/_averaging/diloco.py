"""`DiLoCo`: each rank trains on its own, and now and then an outer optimizer steps with what all have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress._torch.local_steps import LocalSteps, LocalStepsMethods
from hvd_compress._torch.outer import nesterov
from hvd_compress._torch.parameters import Buffers, NamedBuffers, named_or_numbered, trained
from hvd_compress.averaging import Groups
from hvd_compress.diloco import DiLoCoSettings
from hvd_compress.elastic import is_elastic, refuse_elastic_averaging
from hvd_compress.torch._averaging.carrying import Averaging, refuse_before_sync
from hvd_compress.torch._averaging.in_nodes import refuse_complex, refuse_elastic_nodes, update_in_node, wrapped_in_node
from hvd_compress.torch._gradients.owners import check_owner
from hvd_compress.torch._ranks import NODES

__all__ = ["DiLoCo"]


class _Overrides:
    """Methods laid over those of `DistributedOptimizer` of one node."""

    # of that class
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]

    _local_steps: LocalSteps
    _gradient_bytes_of_step: int
    _steps_taken: int
    _averaging: Averaging | None = None
    """In an elastic run."""
    # a GradScaler would not call `step` at all where a gradient is not finite, and ranks would count differently
    _step_supports_amp_scaling = True

    def _owned(self) -> set[int]:
        # also where a node is one rank, which exchanges no gradients
        return self._local_steps.parameters.ids()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with this rank's gradients, averaged in its node if that has several, and do what is due."""
        refuse_before_sync(self._averaging)
        self._local_steps.check(self.param_groups)
        self._local_steps.before_update()
        loss = update_in_node(self, closure)
        self._steps_taken += 1
        self._local_steps.after_update(self.state)
        return loss

    def average_parameters(self) -> None:
        refuse_before_sync(self._averaging)
        LocalStepsMethods.average_parameters(self)  # type: ignore[arg-type]

    average_parameters.__doc__ = LocalStepsMethods.average_parameters.__doc__
    diloco_state_dict = LocalStepsMethods.diloco_state_dict

    def load_diloco_state_dict(self, state: dict[str, Any]) -> None:
        refuse_before_sync(self._averaging)
        LocalStepsMethods.load_diloco_state_dict(self, state)  # type: ignore[arg-type]

    load_diloco_state_dict.__doc__ = LocalStepsMethods.load_diloco_state_dict.__doc__

    def diloco_stats(self) -> dict[str, Any]:
        """What this rank has done so far.

        Returns:
            nodes, ranks_of_node; sync_every, fragments (how many), delay, alpha; steps; under_way, the fragment that
            was sent and has not arrived, or None; synchronizations: sent, merged, not_finite (left out);
            fragment_elements, a list; parameter_bytes; bytes_between_nodes and bytes_inside_nodes that this rank has
            sent for synchronizations; seconds_between_nodes and seconds_inside_nodes that it has waited for them;
            gradient_bytes, sent inside of the node for gradients. In elastic runs also "lost_ranks" and "lost_norm",
            as `DistributedOptimizer.compression_stats` has them.
        """
        gradient_bytes = self._gradient_bytes_of_step * self._steps_taken
        lost = {} if self._averaging is None else self._averaging.stats()
        return {**self._local_steps.member.stats(), "gradient_bytes": gradient_bytes, **lost}


class _DiLoCoAveraging(Averaging):
    """See there.

    Args:
        local_steps: of the optimizer.
    """

    kind = "DiLoCo"

    def __init__(self, local_steps: LocalSteps) -> None:
        self._local_steps = local_steps
        self.parameters, self.buffers = local_steps.parameters, local_steps.buffers

    def save(self) -> Any:
        member = self._local_steps.member
        member.rest()
        return member, member.state_dict()

    def restore(self, saved: Any) -> None:
        # a sync that has failed may have made another member
        if saved is not None:
            self._local_steps.member, state = saved
            self._local_steps.member.restore(state)

    @property
    def steps(self) -> int:
        return self._local_steps.member.steps

    def owed(self) -> dict[str, Any]:
        return self._local_steps.member.owed()

    def land(self, state: Any) -> None:
        self._local_steps.land(state)

    def agreed(self) -> Any:
        return self._local_steps.member.agreed()

    def begin_again(self, label: str, agreed: Any, is_kept: bool) -> None:
        groups = NODES.groups(NODES.sets(1, user="DiLoCo"), name=label)
        before = self._local_steps.begin_again(groups)
        member = self._local_steps.member
        if agreed is not None:
            member.go_on_from(agreed)
            member.inherit(before, agreed["nodes"] if is_kept else 0)


def DiLoCo(
    inner: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    outer: Callable[[Any], torch.optim.Optimizer] = nesterov,
    sync_every: int = 30,
    fragments: int | Sequence[Sequence[str]] = 1,
    delay: int = 0,
    alpha: float = 0.0,
    compression: Any = None,
    feedback_decay: float = 1.0,
    named_buffers: NamedBuffers = None,
    ranks_per_node: int | None = 1,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
) -> Any:
    """Wrap an optimizer for DiLoCo: many steps on each rank alone, then one outer step with the average change.

    Every `sync_every` steps the ranks average reference - parameters, where the reference is the values that they
    agreed on last. The outer optimizer takes that average as its gradient and moves the reference, in the same way on
    all ranks; then the parameters become the reference. With `fragments` this happens to one part of the parameters
    after the other, and with `delay` training goes on while the average is under way. Source: Douillard et al., DiLoCo
    (arXiv 2311.08105, 2023), algorithm 1; Douillard et al., Streaming DiLoCo (arXiv 2501.18512, 2025), section 2.
    Differences: a fragment arrives at fixed steps and is sent `delay` steps before, as in torchft; if `fragments` is a
    number, it cuts the list of parameters into about equally large parts, whatever the layers are; what compression
    leaves out goes with the next average, unless the compressor has no error feedback.

    Start all ranks from equal parameters (`hvd.broadcast_parameters`, before or after this); the first synchronization
    checks that. End with `average_parameters()`. A step that a GradScaler skips still counts. All ranks of the process
    set must call this, and make equally many steps.

    If the average change is not finite, that synchronization is left out on all ranks with a warning: neither the outer
    optimizer nor the reference changes. A rank whose own parameters are not finite gets the reference back, and its
    inner optimizer forgets state that is not finite.

    Args:
        inner: the optimizer to wrap; its state stays on its rank.
        named_parameters: such as `model.named_parameters()`.
        outer: function that makes the outer optimizer of a list of parameters, float32 (float64 for float64 and
            complex128) on the host; it is called once for each fragment, before these have values. Without momentum:
            `lambda params: torch.optim.SGD(params, lr=1.0)`. To change the learning rate later, keep the optimizer that
            it returns, and change it on all ranks.
        sync_every: H, steps from one synchronization of a fragment to its next one, a multiple of the number of
            fragments.
        fragments: how many there are, or lists of parameter names, each name in one list. Fragment i arrives after step
            (i + 1) · sync_every / fragments, and again every `sync_every` steps.
        delay: steps between sending and arrival, in which training goes on; less than sync_every / fragments. With 0
            the step waits.
        alpha: weight of a rank's own parameters when the average arrives, from 0 to 1: they become
            alpha · own + (1 - alpha) · reference.
        compression: for the change of the parameters; a compressor of hvd_compress or a `Policy`; None sends the change
            as it is. A compressor without error feedback loses what it leaves out.
        feedback_decay: factor from 0 to 1 on what compression left out, each time before the next difference is added:
            as in Sarfi et al., SparseLoCo (arXiv 2508.15706, 2025). It applies to both hops of the exchange.
        named_buffers: buffers that `average_parameters()` averages: the model, whose buffers are looked up then, or
            (name, tensor) pairs such as `model.named_buffers()`.
        ranks_per_node: 1: each rank trains on its own; more: ranks of a node average gradients in each step and train
            together; None: a node is a host. A node counts by the number of its ranks, as in `DASO`, whose process sets
            are needed.
        process_set: the ranks that take part.
        backward_passes_per_step: backward passes that are summed up before a step.
        sparse_as_dense: make sparse gradients dense before they are averaged in a node.

    Raises:
        ValueError: a setting out of its range; fragments that do not fit; parameters without or with equal names.
        TypeError: an argument of another type than stated; `outer` makes no torch optimizer.
        UnsupportedError: a process set is missing; an optimizer that is distributed already; in an elastic run, nodes
            of several ranks, or a process set.
        MismatchError: the ranks disagree; raised on all of them.

    Example::

        opt = hvd.DiLoCo(torch.optim.AdamW(model.parameters()), model.named_parameters(), sync_every=30)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...  # train as always
        opt.average_parameters()
    """
    check_owner("DiLoCo", inner)
    settings = DiLoCoSettings(sync_every, fragments, delay, alpha, compression, feedback_decay)
    named = named_or_numbered(inner, named_parameters)
    buffers = Buffers(named_buffers)
    parameters = trained(inner, named)
    others = {name for name, _ in named} - parameters.keys()
    _refuse_elastic_sets(ranks_per_node, process_set)
    sets = NODES.sets(ranks_per_node, process_set, "DiLoCo", list(parameters))
    if sets.within.size() > 1:
        refuse_complex("DiLoCo", parameters)
    # in elastic runs it is made for the ranks of each sync: who joins wraps its optimizer while the others train
    groups = Groups.alone("hvd_compress.diloco") if is_elastic() else NODES.groups(sets, "diloco")
    local_steps = LocalSteps(parameters, buffers, settings, groups, outer, others)
    wrapped = wrapped_in_node(
        "DiLoCo", inner, named, parameters, _Overrides, sets.within, local_steps.refuse,
        backward_passes_per_step=backward_passes_per_step, sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    wrapped._local_steps = local_steps
    ranks = sets.within.size()
    nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
    wrapped._gradient_bytes_of_step, wrapped._steps_taken = round(2 * (ranks - 1) / ranks * nbytes), 0
    wrapped._averaging = _DiLoCoAveraging(local_steps) if is_elastic() else None
    return wrapped


def _refuse_elastic_sets(ranks_per_node: int | None, process_set: hvd.ProcessSet) -> None:
    refuse_elastic_nodes("DiLoCo", ranks_per_node)
    if process_set.process_set_id != 0:
        refuse_elastic_averaging(
            f"DiLoCo(process_set={process_set})", "Horovod forgets process sets when ranks come or go. Leave it out"
        )
