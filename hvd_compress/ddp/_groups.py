"""Process groups of our own beside that of the user; all of torch.distributed that is private is here.

Collectives that hooks issue in the order in which buckets are ready, and those that follow when the former are
complete, come in one order on one rank and in another on the next one. Gloo matches them by order. So each stage of an
exchange has a group, in which all ranks issue the collectives of their buckets one after the other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.errors import LostRankError, UnsupportedError

__all__ = ["groups_like", "timeout_of"]

_made: Counter[str] = Counter()


def groups_like(group: dist.ProcessGroup, timeout: timedelta | None) -> Callable[[int], GlooRanks]:
    """Return what makes Gloo groups of the same ranks as `group`, by number; a collective call of each.

    The processes that make them are those of the group alone: `dist.new_group` wants all processes, or names groups by
    how many a process has made before, which may differ.

    Raises:
        UnsupportedError: the processes have no store by which they find each other.
        LostRankError: from what is returned; another process has not called it in time.
    """
    members = dist.get_process_group_ranks(group)
    scope = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
    _made[scope] += 1
    # distributed_c10d l. 1433 (torch 2.13): the store that all processes have met at; none where MPI has started them
    store = distributed_c10d._get_default_store()
    if not dist.is_gloo_available() or type(store) is Store:
        raise UnsupportedError(
            "hvd_compress.ddp moves payloads through Gloo, which this torch, or a process group that MPI has started, "
            'lacks: call init_process_group("gloo"), "nccl" or "cpu:gloo,cuda:nccl"'
        )
    name = f"ddp.{scope}.{_made[scope]}"
    limit = timeout or timeout_of(group)

    def make(number: int) -> GlooRanks:
        prefix = PrefixStore(f"hvd_compress.{name}.{number}", store)
        rank = members.index(dist.get_rank())
        try:
            made = dist.ProcessGroupGloo(prefix, rank, len(members), limit)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {rank} of {len(members)} has not met all others: {str(error).strip()}. All ranks of the process "
                "group must call ddp.register_comm_hook, ddp.fsdp_all_reduce_hook or ddp.DiLoCo within its timeout of "
                f"{limit}"
            ) from error
        return GlooRanks(made, f"{name}.{number}")

    return make


def timeout_of(group: Any) -> timedelta:
    """Return how long a collective of a group may take."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (AttributeError, RuntimeError):
            # no such backend in this group, or an older torch
            continue
        if isinstance(limit := getattr(options, "_timeout", None), timedelta):
            return limit
    return distributed_c10d.default_pg_timeout
