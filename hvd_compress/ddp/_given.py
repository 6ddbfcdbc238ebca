"""Gradients of one bucket of DDP as named tensors, and as flat arrays that kernels read and write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch

from hvd_compress._torch.device import DeviceMemory, as_tensor
from hvd_compress.errors import GradientError
from hvd_compress.exchange import Bucket

__all__ = ["BoundHook", "Given", "Side", "Sides", "Staged", "views_of"]

_KINDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
"""The types, but for float32, that kernels of some memory read where they are."""


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut the flat buffer of a bucket of DDP into gradients like these parameters, which lie there one after the other.

    DDP lays a gradient out as its parameter is, such as with channels last.

    Raises:
        GradientError: the buffer is of another size.
    """
    views, at = [], 0
    for p in parameters:
        # DDP shows complex numbers as pairs of real ones, or before torch 2.10 as they are
        numel = p.numel() * (2 if p.is_complex() and not buffer.is_complex() else 1)
        part = buffer[at : at + numel]
        if part.numel() != numel:
            break
        if numel != p.numel():
            part = torch.view_as_complex(part.view(-1, 2))
        is_dense = _is_dense(p)
        views.append(part.as_strided(p.shape, p.stride()) if is_dense else part.view(p.shape))
        at += numel
    if at != buffer.numel() or len(views) != len(parameters):
        raise GradientError(
            f"a bucket of DDP has {buffer.numel()} elements, and its {len(parameters)} parameters have "
            f"{sum(p.numel() for p in parameters)}: a parameter has got another shape. Wrap the model again"
        )
    return views


def _is_dense(p: torch.Tensor) -> bool:
    """Whether its elements lie in one piece without gaps, in whatever order."""
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(p.stride(), p.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    return True


class Side:
    """A stream of our own for the work of one GPU beside the backward pass; on the host there is nothing to do.

    Args:
        device: where gradients lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, ready: Any) -> Iterator[None]:
        """Run what is begun here on the stream, after an event."""
        if self.stream is None:
            yield
            return
        self.stream.wait_event(ready)
        # a thread's device is the first one unless it is told, and going back there would make a context on it
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield


class Sides:
    """One `Side` for each device."""

    def __init__(self) -> None:
        self._known: dict[torch.device, Side] = {}

    def of(self, device: torch.device) -> Side:
        """Return the `Side` of a device."""
        if device not in self._known:
            self._known[device] = Side(device)
        return self._known[device]


class Given:
    """A bucket of DDP that its hook was called with.

    Args:
        number: of the bucket in its step.
        buffer: all its gradients, one after the other; the result is written there.
        gradients: views of the buffer, by the names of the parameters.
        is_last: whether it is the last one of the step.
        side: of its device.
    """

    def __init__(
        self, number: int, buffer: torch.Tensor, gradients: Mapping[str, torch.Tensor], is_last: bool, side: Side
    ) -> None:
        self.number = number
        self.buffer = buffer
        self.gradients = dict(gradients)
        self.is_last = is_last
        self.side = side
        self._ready: Any = None

    def note_ready(self) -> None:
        """Note that what the caller has queued so far, debts that are added among it, makes the gradients."""
        if self.buffer.is_cuda:
            self._ready = torch.cuda.current_stream(self.buffer.device).record_event()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors, in their order there."""
        return tuple(self.gradients)

    def beside(self) -> AbstractContextManager[None]:
        """Run what is begun here beside the backward pass, after `note_ready`."""
        return self.side.after(self._ready)


class Staged:
    """Takes the gradients of one exchange, which one or more buckets of DDP bring, through it, from step to step.

    Args:
        bucket: the stages.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.tensors = bucket.tensors
        """The names of all tensors, in the order in which their gradients are expected."""
        self._memory = bucket.memory
        self._device = bucket.memory if isinstance(bucket.memory, DeviceMemory) else None
        # in an allgather sums are made where results go, and those are not made in 16 bits
        reads_halves = self._device is not None and bucket.exchange.has_owners
        self._in_place = {torch.float32, *((torch.float16, torch.bfloat16) if reads_halves else ())}
        if self._device is None:
            self._in_place.add(torch.float64)
        self._copies: dict[str, torch.Tensor] = {}
        """Memory for gradients that kernels do not read where they are, kept for the next step."""
        self._came: list[tuple[Given, list[str]]] = []
        """The buckets of this step, and which of their gradients are copies."""
        self._flats: list[torch.Tensor] = []
        """Small gradients as kernels of a device read them: on another stream than that in which they were made, so
        that their memory is not to be used anew meanwhile."""

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""
        self._came = []
        self.bucket.abandon()

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""
        self.bucket.settle_counts()

    def give(self, given: Given, unused: Sequence[str] = ()) -> bool:
        """Encode gradients, but for those of `unused`, which are left out; returns whether the last one has come."""
        pack = self.bucket.pack
        members = [] if pack is None else [name for name in given.gradients if name in pack.shapes]
        with given.beside():
            places, kinds = self._placed(given, unused)
            small = {name: self._small(given.gradients[name]) for name in members}
        if self._device is not None:
            self._device.streams.meet(given.side.stream)
        left_out = [self.bucket.give(name, None) for name in unused if name in self.bucket.accounts]
        packed = self.bucket.give_small(small) if small else False
        at_places = self.bucket.give_at(places, kinds) if places else False
        return any(left_out) or packed or at_places

    def combine(self, keep: bool, scale: float) -> None:
        """Decode the sums, times `scale`, into the gradients; see `Bucket.finish` for `keep`."""
        came, self._came = self._came, []
        if not self.bucket.busy:
            # all of them were left out
            return
        self.bucket.finish(keep, scale)
        for given, copied in came:
            with given.beside():
                self._restore(given, copied)
        # the stream in which they were made has waited for kernels
        self._flats = []

    def _restore(self, given: Given, copied: Sequence[str]) -> None:
        """Write results that are elsewhere into the gradients."""
        if self._device is not None:
            self._device.streams.part()
        for name in copied:
            given.gradients[name].copy_(self._copies[name])
        pack = self.bucket.pack
        if pack is not None:
            for name, gradient in given.gradients.items():
                if name in pack.shapes:
                    gradient.copy_(as_tensor(pack.part(name)).view(gradient.shape))

    def _placed(self, given: Given, unused: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
        """Return where kernels read each compressed gradient, and the types of those that are not float32."""
        places, kinds = {}, {}
        copied: list[str] = []
        self._came.append((given, copied))
        for name, gradient in given.gradients.items():
            if name in unused or name not in self.bucket.accounts:
                continue
            is_here = self._device is not None or gradient.device.type == "cpu"
            if not (is_here and gradient.dtype in self._in_place and gradient.is_contiguous()):
                gradient = self._copy(name, gradient)
                copied.append(name)
            places[name] = gradient.data_ptr()
            if gradient.dtype != torch.float32:
                kinds[name] = _KINDS[gradient.dtype]
        return places, kinds

    def _copy(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        copy = self._copies.get(name)
        if copy is None or copy.dtype != dtype:
            device = torch.device("cpu") if self._device is None else self._device.device
            copy = self._copies[name] = torch.empty(gradient.shape, dtype=dtype, device=device)
        copy.copy_(gradient)
        return copy

    def _small(self, gradient: torch.Tensor) -> Any:
        flat = gradient.reshape(-1).to(torch.float32)
        if self._device is None:
            return flat.cpu().numpy()
        self._flats.append(flat)
        return flat


class BoundHook:
    """A hook of one model: copies of the model, as for averages of weights, share it, and do nothing with it."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with a hook of hvd_compress.ddp cannot be pickled: save model.module.state_dict() and, for each "
            "rank, ddp.state_dict(model)"
        )
