"""Horovod's asynchronous functions and those that work in place, for tensors of any type and layout, with names.

A call without a name gets one that counts the calls of its kind. Horovod would count all operations of this process
(mpi_ops_v2.cc, GetOpName), and while gradients are exchanged that number depends on time: a hook starts the second
collective of a bucket as soon as the first one is complete, on one rank earlier than on another. A call between
`backward()` and `step()` would wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.fingerprint import scope_of
from hvd_compress.torch._carried import movable, moved, reduced, reducible, settled

__all__ = [
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Tensors = Sequence[torch.Tensor]

_calls: Counter[tuple[str, str]] = Counter()


class _Handle(int):
    """Horovod's handle, with what makes the user's result of Horovod's."""

    finish: Callable[[Any], Any]


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation, as `horovod.torch.synchronize` does.

    Args:
        handle: what the function that started it has returned.

    Returns:
        The result: a tensor, or several in a tuple; None if it has been returned already.

    Raises:
        HorovodInternalError: the operation has failed, or the ranks' tensors do not fit.
    """
    result = hvd.synchronize(handle)
    return handle.finish(result) if isinstance(handle, _Handle) and result is not None else result


def poll(handle: Any) -> bool:
    """Whether `synchronize(handle)` would return without waiting."""
    return bool(hvd.poll(int(handle)))


# -- reductions ------------------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Start an allreduce of a tensor, which is not changed; see `horovod.torch.allreduce_async`.

    Returns:
        A handle for `synchronize`, which returns a tensor of the same shape and type.

    Raises:
        TypeError: a type that Horovod does not reduce.
    """
    name = name_of_call("allreduce", name, process_set)
    sent = reducible(tensor, op, "allreduce")
    handle = hvd.allreduce_async(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return _handle(handle, lambda result: reduced(result, tensor))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Start an allreduce of a tensor in place; see `allreduce_async`.

    A tensor that Horovod cannot work in has its result when `synchronize` has returned.
    """
    name = name_of_call("allreduce", name, process_set)
    sent = reducible(tensor, op, "allreduce_")
    handle = hvd.allreduce_async_(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return _handle(handle, lambda result: settled(reduced(result, tensor), tensor))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> torch.Tensor:
    """Average or reduce a tensor over all ranks in place; see `horovod.torch.allreduce_`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """`allreduce_async` of several tensors as one operation."""
    name, tensors = name_of_call("grouped_allreduce", name, process_set), list(tensors)
    sent = [reducible(t, op, "grouped_allreduce") for t in tensors]
    handle = hvd.grouped_allreduce_async(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return _handle(handle, lambda results: tuple(map(reduced, results, tensors)))


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """`allreduce_async_` of several tensors as one operation."""
    name, tensors = name_of_call("grouped_allreduce", name, process_set), list(tensors)
    sent = [reducible(t, op, "grouped_allreduce_") for t in tensors]
    handle = hvd.grouped_allreduce_async_(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return _handle(
        handle, lambda results: tuple(settled(reduced(r, t), t) for r, t in zip(results, tensors, strict=True))
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """`allreduce_` of several tensors as one operation."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Start a reduction of which each rank gets a part along the first dimension.

    See `horovod.torch.reducescatter_async`.

    Raises:
        ValueError: a tensor without dimensions.
    """
    name = name_of_call("reducescatter", name, process_set)
    sent = reducible(_divisible(tensor, "reducescatter"), op, "reducescatter")
    with torch.inference_mode(False):
        handle = hvd.reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor)
    return _handle(handle, lambda result: reduced(result, tensor))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """`reducescatter_async` of several tensors as one operation."""
    name, tensors = name_of_call("grouped_reducescatter", name, process_set), list(tensors)
    function = "grouped_reducescatter"
    sent = [reducible(_divisible(t, function), op, function) for t in tensors]
    with torch.inference_mode(False):
        handle = hvd.grouped_reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor)
    return _handle(handle, lambda results: tuple(map(reduced, results, tensors)))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: hvd.ProcessSet = hvd.global_process_set
) -> Callable[[], torch.Tensor]:
    """Start a reduction of a sparse tensor by gathering indices and values; see Horovod's function of this name.

    Args:
        tensor: sparse, in coordinate format.
        name: the same on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits, and returns a sparse tensor of the same shape and type.
    """
    # horovod/torch/mpi_ops.py joins along the first dimension, too, where indices have a row for each value
    indices = allgather_async(tensor._indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        of_all, places = synchronize(values), synchronize(indices).t()
        if tensor.dtype == torch.bfloat16:
            of_all = of_all.float()
        of_all = of_all / process_set.size() if op == hvd.Average else of_all
        total = torch.sparse_coo_tensor(places, of_all, tensor.size(), check_invariants=False)
        # values of one place are summed before they are rounded
        return total.coalesce().to(tensor.dtype) if total.dtype != tensor.dtype else total

    return finish


# -- movements -------------------------------------------------------------------------------------------------------


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Start a broadcast of the root's tensor; the other ranks' tensors only tell their shape and type.

    See `horovod.torch.broadcast_async`.
    """
    handle = hvd.broadcast_async(movable(tensor), root_rank, name_of_call("broadcast", name, process_set), process_set)
    return _handle(handle, lambda result: moved(result, tensor))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Start a broadcast that writes to the other ranks' tensors, at the latest in `synchronize`."""
    handle = hvd.broadcast_async_(movable(tensor), root_rank, name_of_call("broadcast", name, process_set), process_set)
    return _handle(handle, lambda result: settled(moved(result, tensor), tensor))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> torch.Tensor:
    """Make a tensor of all ranks that of the root, in place; see `horovod.torch.broadcast_`."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> Any:
    """Start to join the tensors of all ranks along their first dimension.

    See `horovod.torch.allgather_async`. Tensors without dimensions become elements of a vector.
    """
    name = name_of_call("allgather", name, process_set)
    # the thread of Horovod that sizes the result is not in inference mode
    with torch.inference_mode(False):
        handle = hvd.allgather_async(movable(torch.atleast_1d(tensor)), name, process_set)
    return _handle(handle, lambda result: moved(result, tensor))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> Any:
    """`allgather_async` of several tensors as one operation."""
    name, tensors = name_of_call("grouped_allgather", name, process_set), list(tensors)
    with torch.inference_mode(False):
        sent = [movable(torch.atleast_1d(t)) for t in tensors]
        handle = hvd.grouped_allgather_async(sent, name, process_set)
    return _handle(handle, lambda results: tuple(map(moved, results, tensors)))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Start to send each rank a part of the tensor along its first dimension.

    See `horovod.torch.alltoall_async`.

    Raises:
        ValueError: a tensor without dimensions.
    """
    name = name_of_call("alltoall", name, process_set)
    with torch.inference_mode(False):
        parts = splits.contiguous() if isinstance(splits, torch.Tensor) else splits
        handle = hvd.alltoall_async(movable(_divisible(tensor, "alltoall")), parts, name, process_set)
    return _handle(handle, lambda result: (moved(result[0], tensor), result[1]))


# -- parts -----------------------------------------------------------------------------------------------------------


def name_of_call(kind: str, name: str | None, process_set: hvd.ProcessSet) -> str:
    """The name that the user gave, or one that counts the calls of this kind."""
    if name is not None:
        return name
    # ranks outside of a process set do not count its calls
    key = kind, scope_of(process_set)
    _calls[key] += 1
    return f"hvd_compress.unnamed.{kind}.{_calls[key] - 1}"


def forget_count_of_calls() -> None:
    """Count calls without a name from the beginning; all ranks must do so at the same point."""
    _calls.clear()


def _handle(handle: int, finish: Callable[[Any], Any]) -> _Handle:
    finishing = _Handle(handle)
    finishing.finish = finish
    return finishing


def _divisible(tensor: torch.Tensor, function: str) -> torch.Tensor:
    if tensor.dim() == 0:
        raise ValueError(
            f"{function} of a tensor without dimensions: there is no first one to divide among the ranks. Give a "
            "tensor of one dimension or more"
        )
    return tensor
