"""What a `DistributedOptimizer` knows of its step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.engine import Ledger, Routing
from hvd_compress.exchange import AdaGrad
from hvd_compress.torch._gradients.bucket import Shipment
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.members import Members
from hvd_compress.torch._gradients.steering import Steering
from hvd_compress.torch._gradients.wrapping import Wrapping

__all__ = ["Step"]


class Step:
    """Attributes of `Overrides`; those that have no value here are set where an optimizer is wrapped, or its hooks."""

    # of torch's and Horovod's optimizers, which `_horovod.make_class` lays these methods over
    param_groups: list[dict[str, Any]]
    op: Any
    process_set: hvd.ProcessSet
    backward_passes_per_step: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    _compression: Any
    _parameter_names: dict[torch.Tensor, str]
    _requires_update: set[torch.Tensor]
    _allreduce_delay: dict[torch.Tensor, int]
    _handles: dict[Any, Any]
    _groups: Any
    _group_counts: dict[tuple[torch.Tensor, ...], int]
    _p_to_group: dict[torch.Tensor, tuple[torch.Tensor, ...]]
    _should_synchronize: bool
    _synchronized: bool
    _make_hook: Callable[[torch.Tensor], Callable[..., None]]

    _engine: Engine | None = None
    _steering: Steering | None = None
    _alone: Ledger[Any] | None = None
    """With AdaGrad, where this rank exchanges nothing."""
    _itself: weakref.ref[Any]
    """See `_horovod.make_class`; only of the instance."""
    _wrapping: Wrapping
    _members: Members
    _is_open = False
    """Whether gradients of a step are coming, or being exchanged."""
    _combined: dict[str, torch.Tensor] | None = None
    """The gradients of a step whose exchange is complete, until the step is made or given up."""
    _given: dict[str, torch.Tensor]
    """The gradients of this step that have come."""
    _versions: dict[str, int]
    """How often each of them had been written to by then."""
    _samples: dict[str, tuple[int, torch.Tensor]]
    """Some values of some of them, after a pass that has not brought all."""
    _has_warned = False
    """Whether the user was told of gradients that were changed before the last of their passes."""
    _queued_in: int | None = None
    """The backward pass whose end will be told."""
    _has_compared = False
    """Whether ranks know which gradients of each other are sparse; nothing is sent before."""
    _sparse_dims: dict[str, int]
    """Of the tensors that all ranks send sparse."""
    _chooses = False
    _is_plain = False
    """Whether all tensors go through Horovod's allreduce in one way."""
    _plain_steps = 0
    """Plain steps that are not among the counters yet: counting in every hook would make short steps longer."""
    _sparse_steps: Counter[str]
    """In how many of these a tensor was sparse, and so not reduced."""
    _sparse_now: set[str]
    """Those that are sparse in the step that is not complete yet; it may be abandoned."""
    _adagrad: AdaGrad | None = None
    _has_loaded = False
    """Whether AdaGrad's accumulators were loaded since the last step: all ranks have to do so, or replicas drift."""
    _waiting: dict[str, Shipment] = {}  # noqa: RUF012 - replaced, never changed
    """The bucket of each tensor whose gradient a hook only puts there; Horovod's dicts know nothing of it then."""
    _new: dict[str, torch.Tensor] = {}  # noqa: RUF012 - replaced, never changed
    """Parameters that take gradients since this step began."""
    _stopped: str | None = None
    """Why it cannot go on: ranks have disagreed while steps were made, and what some have started stays under way."""
    _retired = False
    """Whether another optimizer has taken over the parameters."""
    _horovods: Any
    _make_engine: Callable[[Routing], Engine]
    _sent_itemsizes: dict[tuple[Any, torch.dtype], int]

    def _close(self) -> None:
        """The step is made, or given up."""
        self._is_open, self._combined, self._synchronized = False, None, False
        self._given, self._versions, self._new, self._samples = {}, {}, {}, {}

    def _known_engine(self) -> Engine:
        """The engine, where there is something to exchange."""
        if self._engine is None:
            raise RuntimeError("this rank exchanges nothing, and has no engine")
        return self._engine
