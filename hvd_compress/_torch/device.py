"""Memory of a GPU: gradients are compressed where they are, and only payloads cross to the host.

All work on the device is given to two streams of this module's own: kernels run on one, payloads leave on the other.
The host waits only where somebody asks for a payload or for a verdict, so that hooks of backward passes never wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hvd_compress.compressors import Key, tables
from hvd_compress.engine import Tensor
from hvd_compress.kernels import table
from hvd_compress.memory import HOST, Memory, Payloads, Slots, Verdict

__all__ = [
    "CudaStreams",
    "DeviceMemory",
    "Event",
    "Streams",
    "described",
    "memories",
    "places",
    "told_places",
    "why_not",
]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
T = TypeVar("T")

_KINDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
_NEAR = 2**17  # bytes that are copied in less time than another copy takes to begin


class Event(Protocol):
    """The end of some work on the device."""

    def query(self) -> bool:
        """Tell whether it has come; never waits."""

    def synchronize(self) -> None:
        """Wait for it."""


class Streams(Protocol):
    """Where the work of a `DeviceMemory` is queued."""

    def run(self, work: Callable[[], T]) -> T:
        """Let kernels and copies that `work` starts run after all that was given to `run` before."""

    def fetch(self, work: Callable[[], None]) -> Event:
        """Let copies to the host run when all that was given to `run` has ended; returns their end."""

    def meet(self, stream: Any) -> None:
        """Let what is given to `run` from now on wait for all that was queued in a stream of the caller's."""

    def part(self) -> None:
        """Let the caller's current stream wait for all that was given to `run`."""


class CudaStreams:
    """Two streams of one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)

    # A thread's device is the first one unless it is told, and going back there would make a context on it.

    def run(self, work: Callable[[], T]) -> T:
        with torch.cuda.device(self._device), torch.cuda.stream(self._kernels):
            return work()

    def fetch(self, work: Callable[[], None]) -> Event:
        self._copies.wait_stream(self._kernels)
        with torch.cuda.device(self._device), torch.cuda.stream(self._copies):
            work()
            event: Event = self._copies.record_event()
        return event

    def meet(self, stream: Any) -> None:
        self._kernels.wait_stream(stream)

    def part(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._kernels)


class _DeviceSlots(Slots):
    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self._made = memory.empty(nbytes, "uint8")
        self._there = memory.pinned(nbytes)
        self.buffer = self._there.numpy()
        self.address = self._made.data_ptr()
        self._event: Event | None = None

    def clear(self) -> None:
        self._event = None
        self._memory.streams.run(self._made.zero_)

    def fetch(self) -> None:
        self._event = self._memory.fetch(self._there, self._made).event

    def is_here(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _VaryingSlots(_DeviceSlots):
    """Slots whose payloads have no fixed size: their lengths are brought first, and then no more than they take.

    Args:
        memory: of the device.
        nbytes: of all slots.
        places: where the slots begin.
    """

    def __init__(self, memory: DeviceMemory, nbytes: int, places: Numbers) -> None:
        super().__init__(memory, nbytes)
        self._places = places
        self._words = memory.from_host((places >> 3) + table.LENGTH_WORD)
        self._lengths = memory.pinned(8 * len(places)).view(torch.int64)
        # of its own: another stream copies from there, and memory that is let go is used anew by kernels
        self._gathered = memory.empty(len(places), "int64")
        self._has_lengths = False

    def fetch(self) -> None:
        words = self._made.view(torch.int64)
        self._memory.streams.run(lambda: torch.index_select(words, 0, self._words, out=self._gathered))
        self._event, self._has_lengths = self._memory.fetch(self._lengths, self._gathered).event, False

    def is_here(self) -> bool:
        if self._event is None:
            return True
        if not self._has_lengths and self._event.query():
            self._fetch_payloads()
        return self._has_lengths and self._event.query()

    def wait(self) -> None:
        super().wait()
        if self._event is not None and not self._has_lengths:
            self._fetch_payloads()
            super().wait()

    def _fetch_payloads(self) -> None:
        spans = _joined(self._places, self._lengths.numpy())

        def copy() -> None:
            for begin, end in spans:
                self._there[begin:end].copy_(self._made[begin:end], non_blocking=True)

        self._event, self._has_lengths = self._memory.streams.fetch(copy), True


def _joined(places: Numbers, lengths: Numbers) -> list[tuple[int, int]]:
    """Return which bytes are to be copied; payloads that lie near to each other are copied together."""
    spans: list[tuple[int, int]] = []
    for begin, length in zip(places.tolist(), lengths.tolist(), strict=True):
        if not length:
            # nothing was made there
            continue
        if spans and begin - spans[-1][1] < _NEAR:
            spans[-1] = spans[-1][0], begin + length
        else:
            spans.append((begin, begin + length))
    return spans


class _Inbox:
    """Memory for a message that comes: a part of the host that the device copies from by itself, and one of its own.

    Nobody writes to the former while it is copied: a step waits for the verdict on what was copied.
    """

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._memory = memory
        self.size = size
        self._staged = memory.pinned(size)
        self._bytes = self._staged.numpy()
        self._at = int(table.address_of(self._bytes))
        self._there = memory.empty(size, "uint8")

    def take(self, received: Bytes, places: Numbers) -> Numbers:
        size = received.size
        self._bytes[:size] = received
        offsets = places - table.address_of(received)
        # ranks that make payloads on the host sum them in another way
        table.sum_in_parts(offsets + self._at, size - offsets)
        self._memory.streams.run(lambda: self._there[:size].copy_(self._staged[:size], non_blocking=True))
        return offsets + self._there.data_ptr()


class _Fetched:
    """Something that is copied to the host, now or with the next copy.

    Args:
        target: on the host, pinned.
        source: on the device.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source = target, source
        self.event: Event | None = None


class DeviceMemory(Memory):
    """The memory of one device, on which Triton's kernels run.

    Args:
        device: where gradients lie.
        streams: of the device; two of its own by default.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device = device
        self.streams: Streams = CudaStreams(device) if streams is None else streams
        self._later: list[_Fetched] = []

    def __repr__(self) -> str:
        return f"DeviceMemory({self.device})"

    # -- arrays --------------------------------------------------------------------------------------------------

    def empty(self, numel: int, kind: str) -> torch.Tensor:
        dtype = getattr(torch, kind)
        return self.streams.run(lambda: torch.empty(numel, dtype=dtype, device=self.device))

    def zeros(self, numel: int, kind: str) -> torch.Tensor:
        dtype = getattr(torch, kind)
        return self.streams.run(lambda: torch.zeros(numel, dtype=dtype, device=self.device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes of the host that the device can copy from and to by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def kind_of(self, array: Any) -> str:
        return _KINDS[array.dtype]

    def to_host(self, array: Any) -> Array:
        values: Array = self.streams.run(array.cpu).numpy()
        return values

    def from_host(self, values: Array) -> torch.Tensor:
        return self._upload(values)

    def norm(self, array: Any) -> float:
        return float(self.streams.run(lambda: torch.linalg.vector_norm(array, dtype=torch.float64).cpu()))

    def multiply(self, array: Any, factor: float) -> None:
        self.streams.run(lambda: array.mul_(factor))

    def clear(self, array: Any) -> None:
        self.streams.run(array.zero_)

    def copy_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        if targets:
            self.streams.run(lambda: torch._foreach_copy_(list(targets), list(sources)))

    def all_finite(self, array: Any) -> Callable[[], bool]:
        is_finite = self.streams.run(lambda: torch.isfinite(array).all())
        fetched = self._fetch_later(self.pinned(1), is_finite)
        return lambda: bool(self._waited(fetched).item())

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Let the caller's stream use a tensor of this memory, which is not used anew before that stream has ended."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    # -- copies to the host --------------------------------------------------------------------------------------

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> _Fetched:
        """Copy to the host what all work so far makes of `source`, and what waits for such a copy; never waits."""
        fetched = self._fetch_later(target, source)
        self._fetch_all()
        return fetched

    def _fetch_all(self) -> None:
        together, self._later = self._later, []

        def copy() -> None:
            for one in together:
                one.target.copy_(one.source, non_blocking=True)

        event = self.streams.fetch(copy)
        for one in together:
            one.event = event

    def _fetch_later(self, target: torch.Tensor, source: torch.Tensor) -> _Fetched:
        """Copy to the host with the next copy, or when somebody waits for it."""
        fetched = _Fetched(target, source)
        self._later.append(fetched)
        return fetched

    def _waited(self, fetched: _Fetched) -> torch.Tensor:
        """Return what has been copied, when it has."""
        if fetched.event is None:
            self._fetch_all()
        if fetched.event is not None:
            fetched.event.synchronize()
        return fetched.target

    # -- messages ------------------------------------------------------------------------------------------------

    def slots(self, nbytes: int, places: Numbers | None = None) -> Slots:
        return _DeviceSlots(self, nbytes) if places is None else _VaryingSlots(self, nbytes, places)

    def receive(self, received: Bytes, places: Numbers, nbytes: int, kept: dict[str, Any]) -> Numbers:
        inbox = kept.get("inbox")
        if inbox is None:
            inbox = kept["inbox"] = _Inbox(self, nbytes)
        return inbox.take(received, places)

    # -- tables --------------------------------------------------------------------------------------------------

    def encode(self, payloads: Payloads, kind: str, key_of: Callable[[int], Key]) -> None:
        rows, kernels, compressor = payloads.rows, _kernels_of(payloads), payloads.compressor
        if compressor.draws:
            tables.fill_keys(rows, lambda i: compressor.drawing_key(key_of(i)))

        def work() -> None:
            launch = self._launch(payloads)
            launch.place(rows, kind, compressor.feedback)
            kernels.encode(launch)

        # where this fails nothing is to be taken back
        rows[:, table.USED] = 0
        self.streams.run(work)
        # how long they are is told by their headers, when they are here
        rows[:, table.USED] = rows[:, table.ROOM]

    def check(self, payloads: Payloads, kind: str) -> Callable[[], Verdict]:
        kernels = _kernels_of(payloads)

        def work() -> Any:
            launch = self._launch(payloads)
            launch.place(payloads.rows, kind, False)
            launch.check(payloads.compressor.codec)
            kernels.verify(launch)
            return launch

        launch = self.streams.run(work)
        there = payloads.prepared.get("found")
        if there is None:
            size = 8 * launch.state.numel()
            there = payloads.prepared["found"] = self.pinned(size).view(torch.int64).view(launch.state.shape)
        fetched = self._fetch_later(there, launch.state)

        def told() -> Verdict:
            found = launch.found_in(self._waited(fetched).numpy())
            bad = np.flatnonzero(found < 0)
            return int(bad[0]) if bad.size else -1, found & ~table.SUMMED

        return told

    def decode(self, payloads: Payloads, kind: str, scale: float) -> int:
        kernels = _kernels_of(payloads)

        def work() -> None:
            launch = self._launch(payloads)
            launch.place(payloads.rows, kind, False)
            kernels.decode(launch, scale, False)

        self.streams.run(work)
        return -1

    def take_back(self, payloads: Payloads, kind: str) -> None:
        from hvd_compress.kernels.cuda import feedback

        rows, kernels = payloads.rows.copy(), _kernels_of(payloads)
        if not rows[:, table.USED].any():
            return
        rows[:, table.ADD] = 1

        def work() -> None:
            launch = self._launch(payloads)
            launch.place(rows, "float32", False)
            kernels.decode(launch, 1.0, True)
            launch.place(rows, kind, True)
            feedback.take_back(launch)

        self.streams.run(work)

    def _launch(self, payloads: Payloads) -> Any:
        from hvd_compress.kernels.cuda.launch import Launch

        launch = payloads.prepared.get("launch")
        if launch is None:
            sizes = payloads.rows.copy()
            sizes[:, table.ROOM] = payloads.slots
            launch = payloads.prepared["launch"] = Launch(sizes, self._upload, self.empty)
        return launch

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cuda":
            source = source.pin_memory()
        return self.streams.run(lambda: source.to(self.device, non_blocking=True, copy=True))


def _kernels_of(payloads: Payloads) -> tables.DeviceKernels:
    kernels = payloads.compressor.device_kernels(int(payloads.rows[0, table.GROUP]))
    if kernels is None:
        raise RuntimeError(f"{payloads.compressor!r} has no kernels for this device")
    return kernels


@cache
def why_not() -> str | None:
    """Say why gradients of GPUs go through host memory in this process; None if they do not."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm, where nobody has tried the kernels"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        from hvd_compress.kernels.cuda.start import probe

        probe(torch.zeros(1, dtype=torch.int32, device="cuda"))
    except ImportError as error:
        return f"Triton cannot be imported ({error}); it comes with torch's builds for CUDA"
    except Exception as error:
        # it compiles for the device, with the C compiler that it finds
        return f"Triton cannot run a kernel here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


@cache
def _tell(reason: str) -> None:
    warnings.warn(
        f"gradients of GPUs are compressed in host memory, which takes several times as long: {reason}", stacklevel=2
    )


def as_tensor(flat: Any) -> torch.Tensor:
    """Return an array of a `Memory` as a tensor with the same memory."""
    return flat if isinstance(flat, torch.Tensor) else torch.from_numpy(flat)


def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Tensor]:
    """Return named torch tensors as a ledger knows them."""
    tensors = list(tensors)
    return [
        Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.element_size(), place)
        for (name, t), place in zip(tensors, places(t for _, t in tensors), strict=True)
    ]


def places(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Number the devices of tensors in the order in which they come: zeros where all are on one, whichever it is."""
    devices = [tensor.device for tensor in tensors]
    numbers = {device: number for number, device in enumerate(dict.fromkeys(devices))}
    return [numbers[device] for device in devices]


def told_places(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return what ranks compare of `places`, on which buckets depend: nothing where all tensors are on one device."""
    found = places(tensors)
    return found if any(found) else []


def memories(tensors: Iterable[tuple[str, torch.Tensor]]) -> Callable[[Sequence[str]], Memory]:
    """Return what tells in which memory tensors, given by name, are exchanged together: that of a GPU, or the host's.

    Args:
        tensors: by name, all that may be asked for.
    """
    devices = {name: tensor.device for name, tensor in tensors if _is_taken(tensor)}
    reason = why_not() if devices else None
    if reason is not None:
        _tell(reason)
    if not devices or reason is not None:
        return lambda names: HOST
    made: dict[torch.device, Memory] = {}

    def memory_of(names: Sequence[str]) -> Memory:
        found = {devices.get(name) for name in names}
        device = found.pop() if len(found) == 1 else None
        if device is None:
            return HOST
        if device not in made:
            made[device] = DeviceMemory(device)
        return made[device]

    return memory_of


def _is_taken(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) and tensor.numel() > 0
