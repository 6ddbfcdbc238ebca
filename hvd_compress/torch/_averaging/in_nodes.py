"""What optimizers share that average gradients inside of a node, and parameters between nodes."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_compress._torch.scaling import told_by_scaler, unscale
from hvd_compress.compressors import BF16, NoCompression
from hvd_compress.elastic import refuse_elastic_averaging
from hvd_compress.errors import UnsupportedError
from hvd_compress.policy import Policy
from hvd_compress.torch._gradients.optimizer import DistributedOptimizer
from hvd_compress.torch._gradients.owners import disown, refuse_retired, take_over
from hvd_compress.torch._horovod import relay

__all__ = ["refuse_complex", "refuse_elastic_nodes", "update_in_node", "wrapped_in_node"]


def update_in_node(optimizer: Any, closure: Callable[[], Any] | None) -> Any:
    """Average gradients in the node, and update unless a GradScaler has found one that is not finite; the loss.

    Args:
        optimizer: made by `wrapped_in_node`.
        closure: as `step` takes it.

    Raises:
        GradientError: another wrapper has taken over the parameters.
    """
    # where a node is one rank, nothing is exchanged that would tell
    if optimizer._combiner.is_retired:
        refuse_retired()
    with told_by_scaler(optimizer) as told:
        optimizer._refuse_early_look(told)
        if told.get("grad_scale") is not None:
            unscale(optimizer.param_groups, told["grad_scale"])
        if not told.get("found_inf", False):
            return optimizer._below_step(closure)
        # of combined gradients, and so on all ranks of the node
        optimizer._combine_for_step()
    return None


def wrapped_in_node(
    kind: str,
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, torch.Tensor]],
    parameters: Mapping[str, torch.Tensor],
    overrides: type,
    process_set: Any,
    on_refusal: Callable[[str], None],
    **settings: Any,
) -> Any:
    """Wrap an optimizer with Horovod inside of a node, and with methods laid over that.

    Args:
        kind: of wrapper, for errors.
        optimizer: to wrap.
        named: all of its parameters.
        parameters: those that take gradients.
        overrides: the methods.
        process_set: the ranks of the node.
        on_refusal: lets other nodes know that this rank cannot go on.
        settings: of `DistributedOptimizer`.
    """
    # the one inside is of a kind of its own
    disown(optimizer)
    # of one rank nothing is exchanged, and an elastic run would ask for the state of its exchanges
    inside = _inside(parameters) if process_set.size() > 1 else NoCompression()
    wrapped = DistributedOptimizer(optimizer, named, inside, process_set=process_set, min_numel=0, **settings)
    relay(wrapped, overrides)
    wrapped._combiner.wrapping.on_refusal = on_refusal
    take_over(wrapped, parameters.values(), kind, optimizer)
    return wrapped


def refuse_elastic_nodes(kind: str, ranks_per_node: int | None) -> None:
    """Raise UnsupportedError for nodes of several ranks in an elastic run.

    Where a process set of the user's or of ours exists, and a rank is lost, Horovod 0.28.1 asks all ranks to give it up
    (process_set.cc, `ProcessSetTable::Finalize_`). The lost one never answers, and an exception ends the others.
    """
    if ranks_per_node != 1:
        refuse_elastic_averaging(
            f"{kind}(ranks_per_node={ranks_per_node!r})",
            "the ranks of a node average gradients in a process set, and Horovod ends all ranks of a run that has "
            "process sets when one of them is lost. Use ranks_per_node=1, each rank is a node then",
        )


def refuse_complex(kind: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedError if gradients in a node could not be averaged."""
    if found := next((name for name, p in parameters.items() if p.is_complex()), None):
        raise UnsupportedError(
            f"{kind} with parameter {found!r} of {parameters[found].dtype}: gradients in a node go through Horovod's "
            "allreduce, which has no complex numbers. Keep it as a real parameter with a last dimension of 2, and "
            "compute with torch.view_as_complex(p)"
        )


def _inside(parameters: Mapping[str, torch.Tensor]) -> Any:
    """How gradients go inside of a node: Horovod's allreduce knows no bfloat16."""
    halves = [name for name, p in parameters.items() if p.dtype == torch.bfloat16]
    return Policy([(glob.escape(name), BF16()) for name in halves]) if halves else NoCompression()
