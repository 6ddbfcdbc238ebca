"""`DiLoCo` on process groups of torch.distributed: the model is not wrapped, and gradients stay on their rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hvd_compress._torch.local_steps import LocalSteps, LocalStepsMethods
from hvd_compress._torch.outer import nesterov
from hvd_compress._torch.parameters import Buffers, NamedBuffers, named_or_numbered, trained
from hvd_compress._torch.scaling import told_by_scaler, unscale
from hvd_compress.averaging import Groups, Nodes
from hvd_compress.ddp._groups import groups_like
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.diloco import DiLoCoSettings
from hvd_compress.elastic import NO_STATE, refuse_elastic_averaging
from hvd_compress.errors import UnsupportedError

__all__ = ["DiLoCo"]


class _Methods(LocalStepsMethods):
    """Methods laid over those of the optimizer that is wrapped."""

    # a GradScaler would not call `step` at all where a gradient is not finite, and ranks would count differently
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with this rank's gradients, and do what is due."""
        self._local_steps.check(self.param_groups)
        self._local_steps.before_update()
        loss = None
        with told_by_scaler(self) as told:
            if told.get("grad_scale") is not None:
                unscale(self.param_groups, told["grad_scale"])
            if not told.get("found_inf", False):
                loss = super().step(closure)  # type: ignore[misc]  # of the optimizer that is wrapped
        self._local_steps.after_update(self.state)
        return loss

    # torch lays its hooks over the method of the wrapped class, and would lay them over this one, too
    step.hooked = True  # type: ignore[attr-defined]

    def diloco_stats(self) -> dict[str, Any]:
        """What this rank has done so far.

        Returns:
            nodes, which are the ranks here; sync_every, fragments (how many), delay, alpha; steps; under_way, the
            fragment that was sent and has not arrived, or None; synchronizations: sent, merged, not_finite (left out);
            fragment_elements, a list; parameter_bytes; bytes_between_nodes that this rank has sent for
            synchronizations, and seconds_between_nodes that it has waited for them.
        """
        return self._local_steps.member.stats()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "an optimizer that ddp.DiLoCo has wrapped cannot be copied or pickled: its process groups are of this "
            "process. Save state_dict() and diloco_state_dict()"
        )


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
    process_group: Any = None,
    timeout: timedelta | None = None,
) -> Any:
    """Wrap an optimizer for DiLoCo over torch.distributed: many steps on each rank alone, then one outer step together.

    `hvd_compress.torch.DiLoCo` describes the algorithm, its sources, and what happens with values that are not finite;
    over Horovod it follows the same trajectories. The model must not be in DistributedDataParallel, which would
    exchange gradients in each step. Averages go through separate Gloo groups, whatever the backend of the process group
    is; parameters on a GPU are copied to the host and back in the steps of a synchronization.

    All ranks of the process group call this, from equal parameters, and make equally many steps. End with
    `average_parameters()`. Schedulers, `zero_grad`, `state_dict` and a GradScaler work as on the optimizer that is
    wrapped; use what is returned in its place.

    Args:
        inner: the optimizer to wrap; its state stays on its rank.
        named_parameters: such as `model.named_parameters()`; if left out, parameters are named by numbers.
        outer: function that makes the outer optimizer of a list of parameters, float32 (float64 for float64 and
            complex128) on the host; it is called once for each fragment, before these have values.
        sync_every: H, steps from one synchronization of a fragment to its next one, a multiple of the number of
            fragments.
        fragments: how many there are, or lists of parameter names, each name in one list.
        delay: steps between sending and arrival, in which training goes on; less than sync_every / fragments. With 0
            the step waits.
        alpha: weight of a rank's own parameters when the average arrives, from 0 to 1.
        compression: for the change of the parameters; a compressor, its name, or a `Policy`; None sends the change as
            it is.
        feedback_decay: factor from 0 to 1 on what compression left out, each time before the next difference is added.
        named_buffers: buffers that `average_parameters()` averages: the model, whose buffers are looked up then, or
            (name, tensor) pairs such as `model.named_buffers()`.
        process_group: the ranks that take part; all of them if left out.
        timeout: how long a rank waits for others; that of the process group if left out. It must be longer than the
            slowest rank's `sync_every` steps take.

    Raises:
        ValueError: a setting out of its range; fragments that do not fit; parameters without or with equal names; a
            rank that is not in the process group.
        TypeError: an argument of another type than stated; `outer` makes no torch optimizer.
        UnsupportedError: an optimizer that is wrapped already, or divides its state among ranks; sharded parameters;
            no Gloo.
        MismatchError: the ranks disagree; raised on all of them.
        LostRankError: a rank does not join in time.

    Example::

        opt = ddp.DiLoCo(torch.optim.AdamW(model.parameters()), model.named_parameters(), sync_every=30)
        for p in model.parameters():
            torch.distributed.broadcast(p.data, 0)
        ...  # train as always
        opt.average_parameters()
    """
    refuse_elastic_averaging("hvd_compress.ddp.DiLoCo", NO_STATE)
    settings = DiLoCoSettings(sync_every, fragments, delay, alpha, compression, feedback_decay)
    _check_inner(inner)
    named = named_or_numbered(inner, named_parameters)
    buffers = Buffers(named_buffers)
    parameters = trained(inner, named)
    _refuse_sharded({**parameters, **buffers.tensors()})
    others = {name for name, _ in named} - parameters.keys()
    groups, made = _groups_of(process_group, timeout)
    try:
        local_steps = LocalSteps(parameters, buffers, settings, groups, outer, others)
    except BaseException:
        _close(made)
        raise
    wrapped = _laid_over(inner)
    wrapped._local_steps = local_steps
    # at the end of the process threads end with it
    weakref.finalize(wrapped, _close, made).atexit = False
    return wrapped


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"ddp.DiLoCo around a {type(inner).__name__}: give a torch optimizer")
    if hasattr(inner, "_local_steps"):
        raise UnsupportedError(
            "ddp.DiLoCo around an optimizer that it has wrapped already: use the one that it has returned, or make a "
            "torch optimizer anew"
        )
    if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(inner).__mro__}:
        raise UnsupportedError(
            "ddp.DiLoCo around ZeroRedundancyOptimizer, whose ranks update a part of one model each: in DiLoCo each "
            "rank trains a model of its own. Give the optimizer that it was made of"
        )


def _refuse_sharded(tensors: dict[str, torch.Tensor]) -> None:
    if (found := next((n for n, t in tensors.items() if hasattr(t, "device_mesh")), None)) is not None:
        raise UnsupportedError(
            f"ddp.DiLoCo with {found!r}, a DTensor of which this rank has a shard only: it averages whole parameters. "
            "Train without FSDP or tensor parallelism, or see ddp.fsdp_all_reduce_hook"
        )


def _groups_of(process_group: Any, timeout: timedelta | None) -> tuple[Groups, list[GlooRanks]]:
    """Return where this rank stands, and what is to be closed; a collective call."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError('ddp.DiLoCo without a process group: call torch.distributed.init_process_group("gloo") before')
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"ddp.DiLoCo on rank {dist.get_rank()}, which is not in process_group: only its ranks call it")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    nodes = Nodes.of_equal(size, 1)
    if size == 1:
        return Groups(nodes, rank, None, None, None, "hvd_compress.diloco"), []
    make = groups_like(group, timeout)
    # Gloo matches collectives by their order, and ranks compare while averages are under way
    made: list[GlooRanks] = []
    try:
        made.extend(make(number) for number in range(2))
    except BaseException:
        _close(made)
        raise
    everyone, across = made
    return Groups(nodes, rank, everyone, None, across, f"hvd_compress.diloco.{everyone.name}"), made


def _laid_over(inner: torch.optim.Optimizer) -> Any:
    """Return an optimizer that has all that `inner` has, and our methods: a scheduler of either one sees both."""
    kind = type(inner)
    wrapped: Any = object.__new__(type(kind.__name__, (_Methods, kind), {"__module__": kind.__module__}))
    # a scheduler that was made before counts calls by a method of its own, which knows the step of `inner` only
    vars(inner).pop("step", None)
    wrapped.__dict__ = vars(inner)
    return wrapped


def _close(made: Iterable[GlooRanks]) -> None:
    for ranks in made:
        ranks.close()
