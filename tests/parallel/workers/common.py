"""What the workers share: a network whose gradients are known on every rank, and what they must become."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit
from hvd_compress.compressors import Compressor
from hvd_compress.exchange import kinds
from hvd_compress.loopback import Loopback
from tests import close
from tests.parallel.workers.neutral import (
    COMPRESSORS,
    COMPRESSORS_AND_EXCHANGES,
    EXCHANGES,
    MIN_NUMEL,
    SHAPES,
    numbers,
    raises,
    ranks_of_start,
)

__all__ = [
    "COMPRESSORS",
    "COMPRESSORS_AND_EXCHANGES",
    "EXCHANGES",
    "MIN_NUMEL",
    "SHAPES",
    "Net",
    "Oracle",
    "bytes_of",
    "check_equal_on_all_ranks",
    "gradient",
    "loss_of",
    "numbers",
    "raises",
    "ranks_of_start",
    "residuals",
    "to_numpy",
    "train",
    "wrap",
    "wrap_to_compress",
]


class Layer(torch.nn.Module):
    """A weight and a bias without a forward pass."""

    def __init__(self, weight: tuple[int, ...], bias: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(weight, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.ones(bias, dtype=dtype))


class Net(torch.nn.Module):
    """Two layers with the parameters of SHAPES."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Layer(SHAPES["first.weight"], SHAPES["first.bias"], dtype)
        self.second = Layer(SHAPES["second.weight"], SHAPES["second.bias"], dtype)


def wrap(model: torch.nn.Module, compression: Any = None, **settings: Any) -> Any:
    """Plain SGD around a model, its weights compressed (one-bit unless said otherwise) in two phases, each alone."""
    settings = {"exchange": "two_phase", "min_numel": MIN_NUMEL, "bucket_bytes": 0, **settings}
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compression or OneBit(), **settings)


def wrap_to_compress(model: torch.nn.Module, compressor: Compressor, **settings: Any) -> Any:
    """`wrap`, with tensors compressed whose payloads, gathered by four ranks, take as much as an allreduce, too."""
    with mock.patch.object(kinds, "saves_bytes", return_value=True):
        return wrap(model, compressor, **settings)


def gradient(name: str, rank: int, step: int, p: torch.Tensor) -> torch.Tensor:
    """`numbers` in the dtype of a parameter."""
    return torch.from_numpy(numbers(name, rank, step, p.shape)).to(p.dtype)


def loss_of(model: torch.nn.Module, step: int, only: Iterable[str] | None = None, rank: int | None = None) -> Any:
    """A loss whose gradient is exactly `gradient(...)` for the parameters in `only` (all), and none for others."""
    rank = horovod.rank() if rank is None else rank
    terms = [
        (p * gradient(name, rank, step, p)).sum().double()
        for name, p in model.named_parameters()
        if p.requires_grad and (only is None or name in only)
    ]
    return torch.stack(terms).sum()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A dense contiguous copy; 16-bit types as float32."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    wide = dense.float() if dense.dtype in (torch.float16, torch.bfloat16) else dense
    return wide.contiguous().numpy().copy()


def _to_array(gradient: np.ndarray | torch.Tensor) -> np.ndarray:
    return to_numpy(gradient) if isinstance(gradient, torch.Tensor) else gradient


class Oracle:
    """What the ranks must hold after each step: compressed tensors by the loopback, small ones by NumPy.

    Args:
        compressor: of the large tensors.
        exchange: "two_phase" or "allgather".
        op: "average" or "sum".
        ranks: all, or the members of a process set.
        min_numel: tensors with fewer elements are not compressed.
        together: names of tensors that share an exchange, in its order; the others go alone.
    """

    def __init__(
        self,
        compressor: Compressor,
        exchange: str = "two_phase",
        op: str = "average",
        ranks: Sequence[int] | None = None,
        min_numel: int = MIN_NUMEL,
        together: Sequence[str] = (),
    ) -> None:
        self.ranks = list(range(horovod.size())) if ranks is None else list(ranks)
        self.loopback = Loopback(len(self.ranks), compressor, exchange, op)
        self.op = op
        self.min_numel = min_numel
        self.together = list(together)

    def combine(self, arrays: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """The averages or sums of the tensors of one step, of each an array per rank."""
        combined = {}
        if shared := [name for name in self.together if name in arrays]:
            of_ranks = [{name: arrays[name][i] for name in shared} for i in range(len(self.ranks))]
            combined |= self.loopback.grouped_allreduce(of_ranks)[0]
        for name in arrays.keys() - combined.keys():
            if arrays[name][0].size >= self.min_numel:
                combined[name] = self.loopback.allreduce(arrays[name], name=name)[0]
            else:
                combined[name] = (np.mean if self.op == "average" else np.sum)(arrays[name], axis=0)
        return combined

    def check_all(
        self, found: Mapping[str, torch.Tensor], of_rank: Callable[[str, int], np.ndarray | torch.Tensor]
    ) -> None:
        """Compare the combined gradients of one step, bit for bit where they were compressed."""
        arrays = {name: [_to_array(of_rank(name, rank)) for rank in self.ranks] for name in found}
        for name, combined in self.combine(arrays).items():
            expected = torch.from_numpy(np.asarray(combined)).to(found[name].dtype)
            mine, its = to_numpy(found[name]), to_numpy(expected)
            if mine.size >= self.min_numel:
                assert mine.tobytes() == its.tobytes(), f"{name}: {np.abs(mine - its).max()} off the loopback"
            else:
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(found[name].dtype, 1e-5)
                np.testing.assert_allclose(mine, its, rtol=tolerance, atol=tolerance, err_msg=name)

    def check(self, name: str, found: torch.Tensor, of_rank: Callable[[int], np.ndarray | torch.Tensor]) -> None:
        """`check_all` of a tensor that goes alone."""
        self.check_all({name: found}, lambda _, rank: of_rank(rank))

    def check_step(self, model: torch.nn.Module, step: int, only: Callable[[int], Iterable[str]] | None = None) -> None:
        """`check` all gradients of a model after `loss_of(model, step, only(rank))` on each rank."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def of_rank(name: str, rank: int) -> torch.Tensor:
            p = parameters[name]
            if only is not None and name not in only(rank):
                return torch.zeros_like(p)
            return gradient(name, rank, step, p)

        missing = [name for name, p in parameters.items() if p.grad is None]
        assert not missing, f"{missing} have no gradient"
        self.check_all({name: p.grad for name, p in parameters.items()}, of_rank)


def train(model: torch.nn.Module, optimizer: Any, steps: Iterable[int], check: Callable[[int], None]) -> None:
    """Plain training: backward, step, check, zero_grad."""
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        check(step)
        optimizer.zero_grad()


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """All bits of some tensors."""
    return b"".join(to_numpy(t).tobytes() for t in tensors)


def check_equal_on_all_ranks(model: torch.nn.Module, process_set: Any = horovod.global_process_set) -> None:
    """Fail unless all ranks hold the same bits."""
    mine = torch.tensor([zlib.crc32(bytes_of(model.parameters()))])
    digests = horovod.allgather(mine, name="digest", process_set=process_set).tolist()
    assert len(set(digests)) == 1, f"the ranks' parameters differ: {digests}"


def check_taken_back(optimizer: Any, before: dict[str, Any], largest: float = 40.0) -> None:
    """Fail unless this rank owes what it owed, to rounding, and make it owe that to the bit.

    Args:
        optimizer: after a step that was taken back.
        before: its `compression_state_dict()` before that.
        largest: see `tests.close`.
    """

    def values(state: dict[str, Any]) -> dict[str, Any]:
        return {
            f"{kind} {name}": entry["values"].numpy()
            for kind in ("residuals", "owner_residuals")
            for name, entry in state[kind].items()
        }

    after, was = values(optimizer.compression_state_dict()), values(before)
    # an owner that owed nothing may have begun to keep account
    close.check_taken_back(after, {key: was.get(key) for key in after}, largest)
    assert was.keys() <= after.keys()
    optimizer.load_compression_state_dict(before)


@contextlib.contextmanager
def throwing_away() -> Iterator[None]:
    """Let combined gradients be thrown away without a step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradients were combined, and then thrown away")
        yield


def residuals(optimizer: Any) -> dict[str, bytes]:
    """Bits of everything that this rank owes."""
    state = optimizer.compression_state_dict()
    return {
        f"{kind} {name}": entry["values"].numpy().tobytes()
        for kind in ("residuals", "owner_residuals")
        for name, entry in state[kind].items()
    }
