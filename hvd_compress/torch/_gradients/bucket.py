"""Runs one bucket's exchange: the stages of `exchange.Bucket`, joined by asynchronous collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._torch.device import DeviceMemory, as_tensor
from hvd_compress.errors import GradientError, WireError
from hvd_compress.exchange import Bucket
from hvd_compress.ranks import Ranks
from hvd_compress.torch._gradients.staging import Held, device_of, has_room, hold, version_of

__all__ = ["Shipment", "collective_name"]

Array = np.ndarray[Any, Any]

_KINDS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def collective_name(collective: str, name: str, label: str = "") -> str:
    """What Horovod knows a collective of a bucket by; `name` is that of the bucket."""
    return f"hvd_compress.{collective}.{name}{label}"


class Shipment:
    """A bucket on its way: the tensors of its gradients, and the collective in flight.

    Args:
        bucket: its stages.
        ranks: that run the collectives.
        label: what tells the collectives from those of other optimizers with tensors of the same names.
    """

    def __init__(self, bucket: Bucket, ranks: Ranks, label: str = "") -> None:
        self.bucket = bucket
        self._between = ranks
        # named by tensor and stage: ranks may issue them in any order
        self._names = {kind: collective_name(kind, bucket.name, label) for kind in bucket.collectives}
        self.tensors = bucket.tensors
        """The names of all tensors, in the order in which their gradients are expected."""
        self.waiting = frozenset(name for name in self.tensors if bucket.waits(name))
        """Names of the tensors that are encoded together, once all of them have come."""
        self._numels = {name: math.prod(bucket.shape_of(name)) for name in self.tensors}
        self._count = len(self.waiting)
        self.came: dict[str, torch.Tensor | None] = {}
        """Those of them that have come in this step, with the gradients that were put off."""
        self.is_between = False
        """Whether a collective is in flight that is not the last one."""
        self._gradients: dict[str, Held] = {}
        # of those that wait, columns and not records: a step with many would make Python look for cycles more often
        self._placed: dict[str, torch.Tensor] = {}
        self._places: dict[str, int] = {}
        self._versions: list[int] = []
        self._storages: list[Any] = []
        """They keep the memory of the gradients in `_placed` from being used anew."""
        self._kinds: dict[str, str] = {}
        """The types of the gradients in `_placed` that are not float32."""
        self._spare: dict[str, Any] = {}
        """Memory for copies of gradients."""
        self._small: dict[str, torch.Tensor] = {}
        self._device = bucket.memory if isinstance(bucket.memory, DeviceMemory) else None
        device = device_of(bucket.memory)
        # what `Tensor.get_device` returns; -1 stands for the host
        self._index = -1 if device.type == "cpu" else device.index or 0
        self._place = device
        # in an allgather sums are made where results go, and those are not made in 16 bits
        reads_halves = self._device is not None and bucket.exchange.has_owners
        self._in_place = frozenset([torch.float32, *(_KINDS if reads_halves else ())])
        """The types of gradients that kernels read where they are, for those that wait."""
        self._readable = self._in_place | {torch.float64} if self._device is None else self._in_place
        """The types of gradients that kernels read where they are."""
        self._flats: list[torch.Tensor] = []
        """Small gradients as kernels of a device read them."""
        self._streams: set[Any] = set()
        """Streams of a device on which gradients in `came` were computed."""
        self.loading = ""
        """The collective that begins when its payloads are on the host, if there is one."""
        self._handle: Any = None
        self._waiting_for = ""
        self._finite: bool | None = None
        """Whether all payloads of a step that have arrived are finite: whoever was interrupted may wait again."""

    # -- while backward goes on ----------------------------------------------------------------------------------

    def take(self, name: str, gradient: torch.Tensor, keep: bool = False) -> Any:
        """Hold a dense gradient until the step has ended; returns what `start` wants of it.

        It is read until then, and holds the result afterwards; with `keep` the result is a tensor of its own.
        """
        begin = time.perf_counter()
        if self._device is not None:
            self._meet(self._device)
        taken = self._take(name, gradient, keep)
        self.bucket.tally.seconds["encode_seconds"] += time.perf_counter() - begin
        return taken

    def put_off(self, name: str, gradient: torch.Tensor | None) -> int | None:
        """Defer this gradient until all tensors in `waiting` have come; returns how many are missing.

        Returns None, and does nothing, where a gradient cannot be deferred: one that kernels would have to copy, or a
        second one of the same tensor. Taking many gradients at once takes half the time.
        """
        came = self.came
        if (
            name in came
            or gradient is None
            or gradient.dtype not in self._in_place
            or gradient.get_device() != self._index
            or gradient.is_sparse
            or gradient.requires_grad
            or gradient.is_inference()
        ):
            return None
        came[name] = gradient
        if self._index >= 0:
            self._streams.add(torch.cuda.current_stream(self._index))
        return self._count - len(came)

    def let_pass(self, name: str) -> int:
        """Note that a tensor in `waiting` was given to `start` alone; returns how many are missing."""
        self.came[name] = None
        return self._count - len(self.came)

    def take_together(self) -> tuple[dict[str, int], dict[str, Array]]:
        """Take all gradients that were put off; returns the arguments for `start_together`."""
        begin = time.perf_counter()
        flats = {}
        if self._device is not None:
            self._meet(self._device)
        for name, gradient in self.came.items():
            if gradient is None:
                continue
            if gradient.numel() != self._numels[name]:
                raise self._wrong_size(name, gradient)
            if name not in self.bucket.accounts or not gradient.is_contiguous():
                flats[name] = self._take(name, gradient, keep=False)
            else:
                self._placed[name], self._places[name] = gradient, gradient.data_ptr()
                if gradient.dtype is not torch.float32:
                    self._kinds[name] = _KINDS[gradient.dtype]
                self._versions.append(gradient._version)
                self._storages.append(gradient.untyped_storage())
        self.bucket.tally.seconds["encode_seconds"] += time.perf_counter() - begin
        return self._places, flats

    def start(self, name: str, flat: Array | None) -> None:
        """Encode a gradient that was taken, and start the first collective once all have come.

        None leaves the tensor out of this step, on all ranks alike.
        """
        if self.bucket.give(name, flat):
            self._issue(self.bucket.collectives[0])

    def start_together(self, places: dict[str, int], flats: dict[str, Any]) -> None:
        """Do the same for what `take_together` has returned."""
        small = {name: flat for name, flat in flats.items() if name not in self.bucket.accounts}
        given = [self.bucket.give(name, flat) for name, flat in flats.items() if name not in small]
        given.append(self.bucket.give_small(small) if small else False)
        given.append(self.bucket.give_at(places, self._kinds) if places else False)
        if any(given):
            self._issue(self.bucket.collectives[0])

    def progress(self) -> None:
        """Run the next stage if its collective is complete; never waits."""
        if self.loading:
            if self.bucket.is_loaded():
                self.load()
        elif self.is_between and self._between.is_done(self._handle):
            self.wait_next(load=False)

    def is_over(self) -> bool:
        """Whether the collective that is in flight, if any, is complete."""
        return self._handle is None or self._between.is_done(self._handle)

    def load(self) -> None:
        """Wait for the payloads that are on their way to the host, if there are some, and start their collective."""
        if self.loading:
            collective, self.loading = self.loading, ""
            self.bucket.wait()
            self._issue(collective)

    # -- when backward has ended ---------------------------------------------------------------------------------

    def wait_next(self, load: bool = True) -> bool:
        """Wait for the present collective and start the next; returns False if the last one is under way already.

        Without `load`, the next one may start later, when its payloads are on the host.
        """
        if not self.is_between:
            return False
        if self.loading:
            self.load()
        collective = self._waiting_for
        self.bucket.proceed(collective, self._receive())
        self._issue(self.bucket.collectives[self.bucket.collectives.index(collective) + 1])
        if self.loading and load:
            self.load()
        return True

    def wait(self) -> bool:
        """Wait for the last payloads; returns whether all values are finite."""
        if self._finite is None:
            while self.wait_next():
                pass
            if self.loading:
                self.load()
            self._finite = self.bucket.arrive(self._receive())
        return self._finite

    def spans(self) -> list[tuple[int, int]]:
        """Return where the gradients begin and end that results will be written to."""
        held = [h for h in self._gradients.values() if not (h.keep or (h.is_copy and not has_room(h.gradient)))]
        of_held = [(h.place, h.place + h.gradient.element_size() * len(h.flat)) for h in held]
        numels = self._numels
        if self._kinds:
            return of_held + [
                (at, at + g.nbytes) for g, at in zip(self._placed.values(), self._places.values(), strict=True)
            ]
        return of_held + [(at, at + 4 * numels[name]) for name, at in self._places.items()]

    def combine(self, keep: bool, scale: float, shared: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """Decode the sums, times `scale`, and return them as gradients; see `Bucket.finish` for `keep`.

        A result is written into its gradient, wherever that lies now, unless that was to be kept, cannot hold it, or
        begins at a place in `shared`, where other gradients are, too.
        """
        if not keep:
            self._lose_changed()
        apart = self._apart(shared)
        if self._device is not None:
            # what the user has queued since may read gradients, which results are written over
            self._meet(self._device)
        self.bucket.finish(keep, scale)
        begin = time.perf_counter()
        if self._device is not None:
            self._device.streams.part()
            for result in apart.values():
                self._device.hand_over(result)
        results = dict(self._placed)
        for name, held in self._gradients.items():
            results[name] = held.gradient
            if held.is_copy:
                can_hold = has_room(held.gradient) and held.gradient.numel() == len(held.flat)
                results[name] = held.restored(held.keep or held.place in shared or not can_hold)
                self._spare[name] = held.flat
        for name, result in apart.items():
            gradient = results[name]
            is_kept = name in self._gradients and self._gradients[name].keep
            can_hold = has_room(gradient) and gradient.shape == result.shape
            if is_kept or gradient.data_ptr() in shared or not can_hold:
                results[name] = result
            else:
                # it has moved; `data`: what is written there does not count as a write of the user's
                gradient.data.copy_(result)
        self.bucket.tally.seconds["decode_seconds"] += time.perf_counter() - begin
        if self._small:
            pack = self.bucket.pack
            assert pack is not None
            # `data`: a result that is written there does not count as a write of the user's
            # where `expand` has made one memory stand for several elements, there is no room for a result
            small = {n: torch.empty_like(g) if 0 in g.stride() else g for n, g in self._small.items()}
            targets = [gradient.data for gradient in small.values()]
            sources = [as_tensor(pack.part(name)).view(gradient.shape) for name, gradient in small.items()]
            torch._foreach_copy_(targets, sources)
            results |= small
        self._forget()
        return results

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        # one that has failed, because another rank took part in another way, is over too; and a damaged payload ends
        # the exchange, since this rank has nothing to send on
        with suppress(HorovodInternalError, WireError):
            # a rank on which a collective was complete in time has started the next one already
            while self.wait_next():
                pass
            self.load()
        if self._handle is not None:
            with suppress(HorovodInternalError):
                self._receive()
        self._lose_changed()
        if self._device is not None:
            self._meet(self._device)
        self.bucket.abandon()
        if self._device is not None:
            # gradients are read when the step is taken back
            self._device.streams.part()
        self._forget()

    @property
    def beginning(self) -> tuple[str, str]:
        """Its first collective, and the name that it has there."""
        return self.bucket.collectives[0], self.bucket.name

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self.bucket.busy

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""
        self.bucket.settle_counts()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _take(self, name: str, gradient: torch.Tensor, keep: bool) -> Any:
        if gradient.numel() != self._numels[name]:
            raise self._wrong_size(name, gradient)
        if name not in self.bucket.accounts:
            self._small[name] = gradient.detach().clone() if keep else gradient
            if self._device is not None:
                flat = gradient.detach().reshape(-1).to(self._device.device, torch.float32)
                if flat.data_ptr() != gradient.data_ptr():
                    # the copy was made after what kernels wait for, and its memory is not to be used anew meanwhile
                    self._meet(self._device)
                self._flats.append(flat)
                return flat
            return gradient.detach().reshape(-1).to("cpu", torch.float32).numpy()
        held = self._gradients[name] = hold(
            gradient, name, keep, self._spare.pop(name, None), self.bucket.memory, self._place, self._readable
        )
        return held.flat

    def _lose_changed(self) -> None:
        """Tell the exchange which gradients have changed, so that it does not subtract them from residuals."""
        changed = [name for name, held in self._gradients.items() if not held.is_copy and held.has_changed]
        for (name, gradient), version in zip(self._placed.items(), self._versions, strict=True):
            if version_of(gradient) != version or gradient.data_ptr() != self._places[name]:
                changed.append(name)
        for name in changed:
            self.bucket.lose_gradient(name)

    def _apart(self, shared: Collection[int]) -> dict[str, torch.Tensor]:
        """Make tensors for results that cannot be written over their gradients."""
        moved = [n for n, g in self._placed.items() if g.data_ptr() != self._places[n] or self._places[n] in shared]
        for name, held in self._gradients.items():
            if not held.is_copy and (held.keep or held.has_moved or held.place in shared):
                moved.append(name)
        results = {}
        for name in moved:
            plan = self.bucket.accounts[name].plan
            memory = self.bucket.memory
            flat = None if name in self._placed else self._gradients[name].flat
            kind = self._kinds.get(name, "float32") if flat is None else memory.kind_of(flat)
            out = memory.empty(plan.numel, kind)
            self.bucket.move(name, out)
            results[name] = as_tensor(out).view(plan.shape)
        return results

    def _wrong_size(self, name: str, gradient: torch.Tensor) -> GradientError:
        """Return the error for a gradient of another size, beyond whose end kernels would read."""
        return GradientError(
            f"the gradient of {name!r} has {gradient.numel()} elements, and had {self._numels[name]} when the "
            "optimizer was wrapped. Wrap it again after a parameter has got another shape"
        )

    def _meet(self, memory: DeviceMemory) -> None:
        """Let the device wait for what has computed the gradients, before it reads them."""
        streams, self._streams = self._streams, set()
        if self._index >= 0:
            streams.add(torch.cuda.current_stream(self._index))
        for stream in streams or {None}:
            memory.streams.meet(stream)

    def _issue(self, collective: str) -> None:
        """Start a collective, now or when its payloads are on the host."""
        self._waiting_for, self.is_between = collective, collective != self.bucket.collectives[-1]
        if self._device is not None and not self.bucket.is_loaded():
            self.loading = collective
            return
        parcel = self.bucket.parcel()
        begin = time.perf_counter()
        name, root = self._names[collective], self.bucket.root or 0
        self._handle = self._between.start(collective, name, parcel.buffer, parcel.sizes, root)
        self.bucket.tally.seconds["start_seconds"] += time.perf_counter() - begin

    def _receive(self) -> Array:
        begin = time.perf_counter()
        try:
            array = self._between.wait(self._handle)
        finally:
            # a handle that has failed cannot be asked again
            self._ended()
        self.bucket.tally.seconds["exchange_seconds"] += time.perf_counter() - begin
        return array

    def _ended(self) -> None:
        """Note that nothing is in flight."""
        self._handle, self._waiting_for, self.is_between, self.loading = None, "", False, ""

    def _forget(self) -> None:
        self._gradients, self._small, self.came, self._finite = {}, {}, {}, None
        self._placed, self._places, self._versions, self._storages, self._kinds = {}, {}, [], [], {}
        self._streams, self._flats = set(), []
