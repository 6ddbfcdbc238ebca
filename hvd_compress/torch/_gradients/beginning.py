"""What ranks tell each other of their tensors before the first exchange: what is sparse, and whether values differ."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress._torch.checksum import checksum
from hvd_compress.engine import first_unequal
from hvd_compress.errors import MismatchError
from hvd_compress.torch._gradients.waits import Wait

__all__ = ["Beginning", "compare_beginnings"]

_NO_GRADIENT, _DENSE = 0, 1
_SPARSE = 2  # and above: the number of sparse dimensions


class Beginning(NamedTuple):
    """What all ranks know of their tensors after they have compared.

    Args:
        sparse_dims: of the tensors whose gradient is sparse on some rank, by name.
        unequal: name of the first tensor whose values differ between ranks, and a rank that differs from the first one.
    """

    sparse_dims: dict[str, int]
    unequal: tuple[str, int] | None


def compare_beginnings(
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    has_loaded: bool,
    label: str,
    process_set: hvd.ProcessSet,
) -> Generator[Wait, None, Beginning]:
    """Tell all ranks what this one knows of its parameters and their gradients; a collective call.

    Args:
        tensors: parameters by name, the same and in the same order on all ranks.
        values: what is to be equal on all ranks, by name; of others, it is what `tensors` has.
        has_loaded: whether this rank has loaded AdaGrad's accumulators.
        label: of the collective.
        process_set: the ranks that take part.

    Yields:
        What is waited for.

    Raises:
        MismatchError: gradients of one tensor are sparse in different numbers of dimensions, or only some ranks have
            loaded accumulators; raised on all ranks.
    """
    if not tensors:
        # all of them are frozen, on all ranks
        return Beginning({}, None)
    of_tensors = [(_kind_of(p.grad), checksum(values.get(name, p))) for name, p in tensors.items()]
    mine = np.array([*of_tensors, (has_loaded, 0)], np.int64)
    name = f"hvd_compress.beginning.{next(iter(tensors), '')}{label}"
    handle = hvd.allgather_async(torch.from_numpy(mine.reshape(1, -1)), name=name, process_set=process_set)
    yield Wait(partial(hvd.poll, handle))
    rows = hvd.synchronize(handle).numpy().reshape(-1, len(tensors) + 1, 2)
    if len(set(rows[:, -1, 0].tolist())) > 1:
        loaded = np.flatnonzero(rows[:, -1, 0]).tolist()
        raise MismatchError(
            f"load_compression_state_dict() was called on the ranks {loaded} and not on the others: AdaGrad would give "
            "them other updates. Load a state on all ranks before the same step"
        )
    sparse_dims = {}
    for i, tensor in enumerate(tensors):
        kinds = {int(kind) for kind in rows[:, i, 0] if kind >= _SPARSE}
        if len(kinds) > 1:
            told = [int(kind) - _SPARSE for kind in sorted(kinds)]
            raise MismatchError(
                f"the gradients of {tensor!r} are sparse in {told[0]} dimensions on one rank and in {told[1]} on "
                "another. Use sparse_as_dense=True"
            )
        if kinds:
            sparse_dims[tensor] = kinds.pop() - _SPARSE
    return Beginning(sparse_dims, first_unequal(rows[:, :-1, 1], list(tensors)))


def _kind_of(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NO_GRADIENT
    return _SPARSE + gradient.sparse_dim() if gradient.is_sparse else _DENSE
