"""Horovod's functions, with names for collectives that the user calls without one.

Horovod names those by a number that counts the operations of this process (mpi_ops_v2.cc, GetOpName). While gradients
are exchanged that number depends on time: a hook starts the second collective of a bucket as soon as the first one is
complete, on one rank earlier than on another. A call between `backward()` and `step()` would wait for ever.
Here each function counts its own calls.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

# those that take a compressor of ours are in `_functions`
__all__ = [
    "allgather",
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

_calls: Counter[tuple[str, int]] = Counter()


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    kind = function.__name__

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        bound.apply_defaults()
        if bound.arguments["name"] is None:
            process_set = bound.arguments["process_set"].process_set_id
            # ranks outside of a process set do not count its calls
            bound.arguments["name"] = f"hvd_compress.unnamed.{kind}.{_calls[kind, process_set]}"
            _calls[kind, process_set] += 1
        return function(*bound.args, **bound.kwargs)

    return call


allgather = _named(hvd.allgather)
allgather_async = _named(hvd.allgather_async)
allreduce = _named(hvd.allreduce)
allreduce_ = _named(hvd.allreduce_)
allreduce_async = _named(hvd.allreduce_async)
allreduce_async_ = _named(hvd.allreduce_async_)
alltoall = _named(hvd.alltoall)
alltoall_async = _named(hvd.alltoall_async)
broadcast = _named(hvd.broadcast)
broadcast_ = _named(hvd.broadcast_)
broadcast_async = _named(hvd.broadcast_async)
broadcast_async_ = _named(hvd.broadcast_async_)
grouped_allgather = _named(hvd.grouped_allgather)
grouped_allgather_async = _named(hvd.grouped_allgather_async)
grouped_allreduce = _named(hvd.grouped_allreduce)
grouped_allreduce_ = _named(hvd.grouped_allreduce_)
grouped_allreduce_async = _named(hvd.grouped_allreduce_async)
grouped_allreduce_async_ = _named(hvd.grouped_allreduce_async_)
grouped_reducescatter = _named(hvd.grouped_reducescatter)
grouped_reducescatter_async = _named(hvd.grouped_reducescatter_async)
reducescatter = _named(hvd.reducescatter)
reducescatter_async = _named(hvd.reducescatter_async)
