"""Gradients of one bucket of DDP that go uncompressed: the allreduce of the user's own process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

from hvd_compress.compressors import FP16, Compressor
from hvd_compress.ddp._given import Given

__all__ = ["DensePart", "dense_parts", "pay_debts"]


class DensePart:
    """Averages some gradients of a bucket, as DDP does without a hook: divided by the number of ranks, then summed.

    Args:
        given: the bucket.
        names: of the gradients; all of the bucket's where the buffer itself is sent.
        kind: the type in which they travel.
    """

    def __init__(self, given: Given, names: Sequence[str], kind: torch.dtype) -> None:
        self.names = list(names)
        self.itemsize = kind.itemsize
        self._given = given
        self._is_whole = len(self.names) == len(given.gradients) and kind == given.buffer.dtype
        self._kind = kind
        self._sent = given.buffer
        self._work: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Start the allreduce: in hooks, which come in the same order on all ranks."""
        if not self._is_whole:
            pieces = [self._given.gradients[name].reshape(-1) for name in self.names]
            self._sent = torch.cat(pieces).to(self._kind)
        self._sent.div_(group.size())
        self._work = dist.all_reduce(self._sent, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Wait for the mean, on a device in its stream only; returns it, and leaves it where it came."""
        self._work.wait()
        return self._sent

    def combine(self) -> None:
        """Write the mean over the gradients."""
        if self._is_whole:
            return
        if self._sent.is_cuda:
            # made on the stream of the hook: not to be used anew there before it has been read here
            self._sent.record_stream(torch.cuda.current_stream(self._sent.device))
        at = 0
        for name in self.names:
            gradient = self._given.gradients[name]
            gradient.copy_(self._sent[at : at + gradient.numel()].view(gradient.shape))
            at += gradient.numel()


def dense_parts(given: Given, names: Sequence[str], compressor_of: Callable[[str], Compressor]) -> list[DensePart]:
    """Divide gradients by the types in which they travel: float16 for those of FP16, else their own."""
    alike: dict[torch.dtype, list[str]] = {}
    for name in names:
        kind = given.buffer.dtype
        is_real = kind.is_floating_point and not given.gradients[name].is_complex()
        is_wide = is_real and kind.itemsize > 2 and not given.buffer.is_sparse
        if is_wide and isinstance(compressor_of(name), FP16):
            kind = torch.float16
        alike.setdefault(kind, []).append(name)
    return [DensePart(given, of_kind, kind) for kind, of_kind in alike.items()]


def pay_debts(debts: Mapping[str, npt.NDArray[Any]], given: Given, names: Iterable[str]) -> list[str]:
    """Add what is owed of gradients that go uncompressed now; returns the names of those that were paid.

    Args:
        debts: by name.
        given: the bucket.
        names: of its tensors that go uncompressed, and that this rank has used: DDP leaves the gradient of a parameter
            alone that no rank has.
    """
    paid = [name for name in names if name in debts]
    for name in paid:
        owed = torch.from_numpy(debts[name]).view(given.gradients[name].shape)
        given.gradients[name].add_(owed.to(given.buffer.device, given.buffer.dtype))
    return paid
