"""Do the arithmetic of the compressors in plain torch expressions, as GRACE and other libraries of the field write it.

A method keeps the residuals; it sends one-dimensional tensors of torch's own types (a byte for a sign, int64 for an
index), since no torch expression packs bits. Reconstruction values are those of the whole tensor, except for the
buckets of QSGD.

    method = OneBit()
    tensors, ctx = method.compress(gradient, name)      # the tensors are what an allgather would send
    gradient = method.decompress(tensors, ctx)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

Tensors = list[torch.Tensor]


class Method(ABC):
    """Keeps residuals around what a subclass sends."""

    feedback = True

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[Tensors, torch.Size]:
        """Return what to send of `tensor` and of what was not sent before, and the shape to return to."""
        if self.feedback and name in self.memory:
            tensor = tensor + self.memory[name]
        tensors = self._send(tensor.flatten())
        if self.feedback:
            self.memory[name] = tensor - self.decompress(tensors, tensor.shape)
        return tensors, tensor.shape

    def decompress(self, tensors: Tensors, ctx: torch.Size) -> torch.Tensor:
        """Return the tensor of shape `ctx` that `tensors` stand for."""
        return self._receive(tensors, ctx.numel()).view(ctx)

    @abstractmethod
    def _send(self, x: torch.Tensor) -> Tensors: ...

    @abstractmethod
    def _receive(self, tensors: Tensors, numel: int) -> torch.Tensor: ...


class OneBit(Method):
    """Sends signs, and the means of the non-negative and of the negative values."""

    def _send(self, x: torch.Tensor) -> Tensors:
        positive = x >= 0
        count = positive.sum()
        high = x[positive].sum() / count.clamp(min=1)
        low = x[~positive].sum() / (x.numel() - count).clamp(min=1)
        return [positive.to(torch.uint8), torch.stack([high, low])]

    def _receive(self, tensors: Tensors, numel: int) -> torch.Tensor:
        signs, means = tensors
        positive = signs.bool()
        return positive * means[0] + ~positive * means[1]


class _Sparse(Method):
    def _receive(self, tensors: Tensors, numel: int) -> torch.Tensor:
        values, indices = tensors
        dense = torch.zeros(numel, dtype=values.dtype)
        dense.scatter_(0, indices, values)
        return dense


class Threshold(_Sparse):
    """Sends plus or minus `tau` for the values beyond it."""

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = tau

    def _send(self, x: torch.Tensor) -> Tensors:
        (indices,) = torch.where(x.abs() > self.tau)
        return [x[indices].sign() * self.tau, indices]


class Adaptive(_Sparse):
    """Sends the largest 1 / `pi` of the non-negative values and of the negative ones, as their means."""

    def __init__(self, pi: int = 64) -> None:
        super().__init__()
        self.pi = pi

    def _send(self, x: torch.Tensor) -> Tensors:
        count = int((x >= 0).sum())
        values, indices = [], []
        for sign, k in ((1, -(-count // self.pi)), (-1, -(-(x.numel() - count) // self.pi))):
            largest, at = torch.topk(sign * x, k, sorted=False)
            indices.append(at)
            values.append(torch.full_like(largest, float(sign * largest.mean()) if k else 0.0))
        return [torch.cat(values), torch.cat(indices)]


class TopK(_Sparse):
    """Sends the largest magnitudes with their values."""

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        self.ratio = ratio

    def _send(self, x: torch.Tensor) -> Tensors:
        _, indices = torch.topk(x.abs(), max(1, int(x.numel() * self.ratio)), sorted=False)
        return [x[indices], indices]


class Percentile(TopK):
    """Sends the largest tenth; what is dropped is not owed."""

    feedback = False

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__(1 - percentile / 100)


class QSGD(Method):
    """Sends randomly rounded levels of the norm of each bucket; unbiased, so nothing is owed."""

    feedback = False

    def __init__(self, bits: int = 4, bucket_numel: int = 512) -> None:
        super().__init__()
        self.levels = 2 ** (bits - 1) - 1
        self.bucket = bucket_numel

    def _send(self, x: torch.Tensor) -> Tensors:
        buckets = torch.nn.functional.pad(x, (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        norms = buckets.norm(dim=1, keepdim=True)
        scaled = buckets.abs() * (self.levels / norms.clamp(min=1e-30))
        level = scaled.floor()
        level += torch.rand_like(level) < scaled - level
        return [(level * buckets.sign()).to(torch.int8).flatten(), norms.flatten()]

    def _receive(self, tensors: Tensors, numel: int) -> torch.Tensor:
        codes, norms = tensors
        return (codes.view(-1, self.bucket) * (norms[:, None] / self.levels)).flatten()[:numel]
