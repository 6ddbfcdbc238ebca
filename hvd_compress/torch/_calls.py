"""The collectives of a bucket, started now and awaited later: Horovod's, or messages of MPI to a root and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.exchange import ParameterServer, Parcel
from hvd_compress.mpi import Channel
from hvd_compress.torch._gossip import TorchCollectives

__all__ = ["Calls", "calls_for", "collective_name"]

Array = np.ndarray[Any, Any]


def collective_name(collective: str, name: str, label: str = "") -> str:
    """What Horovod knows a collective of a bucket by; `name` is that of the bucket."""
    return f"hvd_compress.{collective}.{name}{label}"


class _Bucket(Protocol):
    """What is known of the bucket that a collective is for."""

    root: int | None

    @property
    def name(self) -> str:
        """For its collectives."""

    @property
    def answer_bytes(self) -> int:
        """The most bytes that the last one brings."""


class Calls(Protocol):
    """Runs the collectives of a bucket."""

    def start(self, collective: str, bucket: _Bucket, parcel: Parcel) -> Any:
        """Start what a stage has made a parcel for."""

    def is_done(self, handle: Any) -> bool:
        """Whether it would not have to be awaited."""

    def wait(self, handle: Any) -> Array:
        """What it has brought."""


def calls_for(exchange: str | ParameterServer, process_set: hvd.ProcessSet, label: str = "") -> Callable[[], Calls]:
    """Makes what carries the exchanges of a bucket of a process set; a collective call.

    `label` tells the collectives from those of other optimizers with tensors of the same names.

    Raises:
        UnsupportedError: messages of MPI are asked for, and cannot be had.
    """
    if isinstance(exchange, ParameterServer) and exchange.transport == "mpi":
        messages = TorchCollectives(process_set).root_messages()
        return lambda: RootCalls(messages.channel())
    return lambda: HorovodCalls(process_set, label)


class HorovodCalls:
    """Horovod's asynchronous collectives.

    Args:
        process_set: the ranks that take part.
        label: at the end of the collectives' names.
    """

    def __init__(self, process_set: hvd.ProcessSet, label: str = "") -> None:
        self._process_set = process_set
        self._label = label

    @torch.inference_mode(False)  # Horovod's thread, which is in no such mode, sizes the results made here
    def start(self, collective: str, bucket: _Bucket, parcel: Parcel) -> Any:
        """See `Calls`."""
        # named by tensor and stage: ranks may issue them in any order
        settings = {"name": collective_name(collective, bucket.name, self._label), "process_set": self._process_set}
        buffer = torch.from_numpy(parcel.buffer)
        if collective == "allgather":
            return hvd.allgather_async(buffer, **settings)
        if collective == "broadcast":
            # Horovod counts roots among all ranks
            return hvd.broadcast_async_(buffer, self._process_set.ranks[bucket.root], **settings)
        splits = None if parcel.sizes is None else torch.tensor(parcel.sizes, dtype=torch.int32)
        return hvd.alltoall_async(buffer, splits=splits, **settings)

    def is_done(self, handle: Any) -> bool:
        """See `Calls`."""
        return bool(hvd.poll(handle))

    def wait(self, handle: Any) -> Array:
        """See `Calls`."""
        output = hvd.synchronize(handle)
        tensor = output[0] if isinstance(output, tuple) else output
        array: Array = tensor.numpy()
        return array


class RootCalls:
    """The two collectives of a parameter server as messages of MPI.

    Args:
        channel: of the bucket.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def start(self, collective: str, bucket: _Bucket, parcel: Parcel) -> Any:
        """See `Calls`."""
        assert bucket.root is not None
        if collective == "alltoall":
            return self._channel.gather(bucket.root, parcel)
        return self._channel.answer(bucket.root, parcel.buffer, bucket.answer_bytes)

    def is_done(self, handle: Any) -> bool:
        """See `Calls`."""
        return bool(handle.is_done())

    def wait(self, handle: Any) -> Array:
        """See `Calls`."""
        array: Array = handle.wait()
        return array
