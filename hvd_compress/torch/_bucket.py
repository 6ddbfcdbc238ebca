"""One bucket's exchange: the stages of `engine.Bucket` joined by asynchronous collectives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvd_compress import engine
from hvd_compress.engine import Lane, Pack
from hvd_compress.exchange import Parcel
from hvd_compress.torch._calls import Calls
from hvd_compress.torch._staging import Staged, flat_of, stage, tensor_of

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
        if name in self.lanes:
            begin = time.perf_counter()
            staged = stage(gradient, name=name, keep=keep, memory=self._spare.pop(name, None))
            self._staged[name] = staged
            self.lanes[name].counters.encode_seconds += time.perf_counter() - begin
            return flat_of(staged.memory), None if staged.source is None else flat_of(staged.source)
        self._small[name] = gradient.detach().clone() if keep else gradient.detach()
        return self._small[name].reshape(-1).cpu().numpy(), None

    def start(self, name: str, flat: Array | None, source: Array | None = None) -> None:
        """Encode what was taken, on the CPU and flat; start the first collective when all are here.

        `flat` is spoiled, and holds the gradient unless there is a `source`. None leaves the tensor out of this step,
        on all ranks alike.
        """
        if self.give(name, flat, source):
            self._issue(self.collectives[0], self.parcel())

    def progress(self) -> None:
        """Run the next stage if its collective is complete; never waits."""
        if self._is_between() and self._calls.is_done(self._handle):
            self.wait_next()

    # -- when backward has ended ---------------------------------------------------------------------------------

    def wait_next(self) -> bool:
        """Wait for a collective that is not the last one, and start the next; whether there was one."""
        if not self._is_between():
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

    def combine(self, keep: bool, scale: float) -> dict[str, torch.Tensor]:
        """The sums times `scale` as gradients, without those left out; see `Lane.finish` for `keep`."""
        results = {}
        for name, result in self.finish(keep, scale).items():
            if name in self.lanes and result is not None:
                results[name] = self._restored(self.lanes[name], self._staged[name], result, keep)
        for name, gradient in self._small.items():
            assert self.pack is not None
            results[name] = gradient.copy_(torch.from_numpy(self.pack.part(name)).view(gradient.shape))
        self._staged, self._small = {}, {}
        return results

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        # a rank on which a collective was complete in time has started the next one already
        while self.wait_next():
            pass
        if self._handle is not None:
            self._calls.wait(self._handle)
        self._handle, self._waiting_for, self._staged, self._small = None, "", {}, {}
        super().abandon()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _restored(self, lane: Lane, staged: Staged, result: np.ndarray[Any, Any], keep: bool) -> torch.Tensor:
        begin = time.perf_counter()
        if lane.residual is not None and keep and staged.is_seen_elsewhere():
            # a buffer of the user's that .grad was a view of will be written to again
            lane.residual = lane.residual.copy()
        tensor = tensor_of(result)
        restored = staged.restore(tensor)
        if not staged.shared:
            self._spare[lane.name] = tensor
        lane.counters.decode_seconds += time.perf_counter() - begin
        return restored

    def _is_between(self) -> bool:
        """Whether a collective is in flight that is not the last one."""
        return self._waiting_for not in ("", self.collectives[-1])

    def _issue(self, collective: str, parcel: Parcel) -> None:
        begin = time.perf_counter()
        self._handle = self._calls.start(collective, self, parcel)
        self._waiting_for = collective
        self.count_start(time.perf_counter() - begin)

    def _receive(self) -> np.ndarray[Any, Any]:
        begin = time.perf_counter()
        array = self._calls.wait(self._handle)
        self._handle, self._waiting_for = None, ""
        self.count_wait(time.perf_counter() - begin)
        return array
