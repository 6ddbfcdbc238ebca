"""One bucket's exchange: the stages of `engine.Bucket` joined by asynchronous collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress import engine
from hvd_compress.engine import Lane, Pack
from hvd_compress.errors import GradientError
from hvd_compress.exchange import Parcel, aligned_empty
from hvd_compress.torch._calls import Calls
from hvd_compress.torch._staging import (
    Staged,
    flat_of,
    is_seen_elsewhere,
    memory_of,
    own_memory,
    shaped,
    stage,
    tensor_of,
)

__all__ = ["Bucket"]

Array = np.ndarray[Any, Any]


class Bucket(engine.Bucket):
    """`engine.Bucket` with the gradients' tensors and the collective in flight.

    Args:
        lanes: of the compressed tensors by name.
        pack: of the small ones, if there are any.
        calls: that run the collectives.
    """

    def __init__(self, lanes: Mapping[str, Lane], pack: Pack | None, calls: Calls) -> None:
        super().__init__(lanes, pack)
        self._calls = calls
        self.waiting = frozenset(name for name in self.tensors if self.waits(name))
        """Names of the tensors that are encoded together, when all of them are here."""
        self._count = len(self.waiting)
        self.came: dict[str, torch.Tensor | None] = {}
        """Which of these are here in this step; with the gradient of each that was put off."""
        self.is_between = False
        """Whether a collective is in flight that is not the last one."""
        # tensors, not records of them: a step with many would make Python look for cycles more often
        self._own: dict[str, torch.Tensor] = {}
        self._memories: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        self._placed: dict[str, torch.Tensor] = {}
        """Gradients that are given by their addresses, in `_places`; `_memories` keeps these from being used anew."""
        self._staged: dict[str, Staged] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._small: dict[str, torch.Tensor] = {}
        self._handle: Any = None
        self._waiting_for = ""

    # -- while backward goes on ----------------------------------------------------------------------------------

    def take(self, name: str, gradient: torch.Tensor, keep: bool = False) -> tuple[Array, Array | None]:
        """Hold a dense gradient until the step has ended; what `start` wants of it.

        With `keep` its own memory stays as it is, and must until the step has ended; else it is where the result will
        be, or is lost.
        """
        begin = time.perf_counter()
        taken = self._take(name, gradient, keep)
        if name in self.lanes:
            self.lanes[name].counters.encode_seconds += time.perf_counter() - begin
        return taken

    def put_off(self, name: str, gradient: torch.Tensor | None) -> int | None:
        """`take` the gradient of a tensor in `waiting` when all of them are here: how many are not; None if it cannot.

        Several are taken in half the time. It cannot be where one has come already, either.
        """
        came = self.came
        if (
            name in came
            or gradient is None
            or gradient.dtype is not torch.float32
            or not gradient.is_cpu
            or gradient.is_sparse
            or gradient.requires_grad
        ):
            return None
        came[name] = gradient
        return self._count - len(came)

    def let_pass(self, name: str) -> int:
        """A tensor in `waiting` was given to `start`; how many of them are not here yet."""
        self.came[name] = None
        return self._count - len(self.came)

    def take_together(self) -> tuple[dict[str, int], dict[str, Array]]:
        """`take` what was put off; what `start_together` wants of it."""
        begin = time.perf_counter()
        flats = {}
        for name, gradient in self.came.items():
            if gradient is None:
                continue
            memory = memory_of(gradient) if name in self.lanes else None
            self._check_size(name, gradient)
            if memory is None:
                flats[name], _ = self._take(name, gradient, keep=False)
            else:
                self._memories[name], self._places[name], self._placed[name] = memory, gradient.data_ptr(), gradient
        self.count("encode_seconds", time.perf_counter() - begin)
        return self._places, flats

    def start(self, name: str, flat: Array | None, source: Array | None = None) -> None:
        """Encode what was taken, on the CPU and flat; start the first collective when all are here.

        `flat` is spoiled, and holds the gradient unless there is a `source`. None leaves the tensor out of this step,
        on all ranks alike.
        """
        if self.give(name, flat, source):
            self._issue(self.collectives[0], self.parcel())

    def start_together(self, places: dict[str, int], flats: dict[str, Array]) -> None:
        """`start` what `take_together` has returned."""
        if self.give_together(places, flats):
            self._issue(self.collectives[0], self.parcel())

    def progress(self) -> None:
        """Run the next stage if its collective is complete; never waits."""
        if self.is_between and self._calls.is_done(self._handle):
            self.wait_next()

    def is_over(self) -> bool:
        """Whether the collective that is in flight, if any, is complete."""
        return self._handle is None or self._calls.is_done(self._handle)

    # -- when backward has ended ---------------------------------------------------------------------------------

    def wait_next(self) -> bool:
        """Wait for a collective that is not the last one, and start the next; whether there was one."""
        if not self.is_between:
            return False
        collective = self._waiting_for
        following = self.collectives[self.collectives.index(collective) + 1]
        self._issue(following, self.advance(collective, self._receive()))
        return True

    def wait(self) -> bool:
        """Wait until the last payloads are here; whether all are finite."""
        while self.wait_next():
            pass
        return self.arrive(self._receive())

    @property
    def staged_places(self) -> list[int]:
        """Where the gradients lie that kernels got a copy of."""
        return [staged.gradient.data_ptr() for staged in self._staged.values()]

    def combine(self, keep: bool, scale: float, shared: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """The sums times `scale` as gradients, without those left out; see `Lane.finish` for `keep`.

        A result is written into its gradient, unless that was to be kept, or lies at a place in `shared`, where several
        gradients are.
        """
        results = self._still_in_place()
        finished = self.finish(keep, scale)
        begin = time.perf_counter()
        for name, result in finished.items():
            if result is not None and name in self._places:
                results[name] = shaped(tensor_of(result), torch.Size(self.lanes[name].plan.shape))
            elif name in self.lanes and result is not None:
                results[name] = self._restored(name, result, keep, shared)
        self.count("decode_seconds", time.perf_counter() - begin)
        for name, gradient in self._small.items():
            assert self.pack is not None
            results[name] = gradient.copy_(torch.from_numpy(self.pack.part(name)).view(gradient.shape))
        self._forget()
        return results

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        # one that has failed, because another rank took part in another way, is over too
        with suppress(HorovodInternalError):
            # a rank on which a collective was complete in time has started the next one already
            while self.wait_next():
                pass
        if self._handle is not None:
            with suppress(HorovodInternalError):
                self._receive()
        self._forget()
        super().abandon()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _take(self, name: str, gradient: torch.Tensor, keep: bool) -> tuple[Array, Array | None]:
        self._check_size(name, gradient)
        if name not in self.lanes:
            # `data`: a result that is written there does not count as a write of the user's
            self._small[name] = gradient.detach().clone() if keep else gradient.data
            return self._small[name].reshape(-1).to("cpu", torch.float32).numpy(), None
        own = None if keep else own_memory(gradient)
        if own is not None:
            self._own[name] = own
            return flat_of(own), None
        staged = self._staged[name] = stage(gradient, name=name, keep=keep, memory=self._spare.pop(name, None))
        return flat_of(staged.memory), None if staged.source is None else flat_of(staged.source)

    def _check_size(self, name: str, gradient: torch.Tensor) -> None:
        """Raise GradientError where kernels would read beyond the end of a gradient."""
        expected = math.prod(self.shape_of(name))
        if gradient.numel() != expected:
            raise GradientError(
                f"the gradient of {name!r} has {gradient.numel()} elements, and had {expected} when the optimizer was "
                "wrapped. Wrap it again after a parameter has got another shape"
            )

    def _still_in_place(self) -> dict[str, torch.Tensor]:
        """The gradients in which their results will be written; those of the others will be results of `finish`."""
        moved = [name for name, gradient in self._placed.items() if gradient.data_ptr() != self._places[name]]
        for name in moved:
            # its memory, which may have any size now, is the user's
            del self._placed[name]
            self.move(name, aligned_empty(self.lanes[name].plan.numel, np.float32))
        return dict(self._placed)

    def _restored(self, name: str, result: Array, keep: bool, shared: Collection[int]) -> torch.Tensor:
        tensor, own = tensor_of(result), self._own.get(name)
        if own is None:
            self._spare[name] = tensor
            staged = self._staged[name]
            return staged.restore(tensor, apart=staged.gradient.data_ptr() in shared)
        lane = self.lanes[name]
        if keep and lane.residual is not None and is_seen_elsewhere(own):
            # a buffer of the user's that .grad was a view of will be written to again
            lane.residual = lane.residual.copy()
        return shaped(tensor, own.shape)

    def _issue(self, collective: str, parcel: Parcel) -> None:
        begin = time.perf_counter()
        self._handle = self._calls.start(collective, self, parcel)
        self._waiting_for, self.is_between = collective, collective != self.collectives[-1]
        self.count("start_seconds", time.perf_counter() - begin)

    def _receive(self) -> Array:
        begin = time.perf_counter()
        try:
            array = self._calls.wait(self._handle)
        finally:
            # a handle that has failed cannot be asked again
            self._ended()
        self.count("exchange_seconds", time.perf_counter() - begin)
        return array

    def _ended(self) -> None:
        """Nothing is in flight."""
        self._handle, self._waiting_for, self.is_between = None, "", False

    def _forget(self) -> None:
        self._own, self._staged, self._small, self.came = {}, {}, {}, {}
        self._memories, self._places, self._placed = {}, {}, {}
