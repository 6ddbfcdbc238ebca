"""Run an asynchronous parameter server among the ranks of an MPI communicator."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.async_server import AsyncServerSettings, ServerMember, Values
from hvd_compress.compressors import NoCompression
from hvd_compress.errors import HvdCompressError, UnsupportedError
from hvd_compress.fingerprint import agree
from hvd_compress.missing import missing_mpi
from hvd_compress.mpi.connections import MOST_BYTES, MpiConnection
from hvd_compress.mpi.session import Session, session
from hvd_compress.policy import check_patterns
from hvd_compress.tensors import ParameterSpec

__all__ = ["AsyncParameterServer", "join_server"]

Array = npt.NDArray[Any]


class AsyncParameterServer:
    """Applies each worker's gradients to the server's parameters as they come, on NumPy arrays, without Horovod.

    One rank, the server, holds the parameters and applies gradients; all others are workers. A worker sends a gradient,
    computes the next one with the parameters it has, and waits for the answer to the last one before it sends that. The
    answer is held back while the worker is more than `staleness` gradients ahead of the slowest. Creating this is a
    collective call, which gives all ranks the server's parameters. Source: Sievert (2017), section 3.2.2; the bound is
    that of Ho et al. (NeurIPS 2013). Run it as `mpirun -np 4 python train.py`.

    A worker that stops for more than `patience` seconds does not stop the others. One that dies ends the job: that is
    MPI's way. The server has room for the longest gradient and the longest answer of each worker, and a copy of the
    parameters for each where answers are compressed.

    Args:
        parameters: by name, float32 or float64, C-contiguous; the same names and shapes on all ranks. They change in
            place: on the server by `update`, on workers in `step`.
        update: called on the server with the gradients of one worker, by name, as arrays of the parameters' shapes that
            last until it returns; changes `parameters` in place. Workers do not need it.
        comm: a communicator of mpi4py; `MPI.COMM_WORLD` by default.
        staleness: how many gradients a worker may be ahead of the slowest. 0: all wait for all in each step; 1: they do
            while they compute the next gradient.
        compression: a compressor or a `Policy` for gradients, with its error feedback.
        answer: the same for parameters: then differences to what the worker has travel, so that nothing is lost.
        patience: seconds of silence after which a worker that others wait for does not count.
        server: the rank that serves.

    Raises:
        TypeError: an argument of another type than stated.
        ValueError: a setting out of its range; no parameters.
        UnsupportedError: fewer than two ranks, or messages of 16 GiB and more.
        MismatchError: the ranks disagree; raised on all of them.
        MissingError: mpi4py is not installed, or finds no MPI.

    A whole program is `examples/reference/mpi_names.py`.
    """

    def __init__(
        self,
        parameters: dict[str, Array],
        update: Callable[[dict[str, Array]], object] | None = None,
        comm: Any = None,
        staleness: int = 4,
        compression: Any = NoCompression(),
        answer: Any = NoCompression(),
        patience: float = 60.0,
        server: int = 0,
    ) -> None:
        settings = AsyncServerSettings(staleness, compression, answer, patience, server)
        values = _Arrays(parameters, update)
        try:
            mpi = session()
        except (ImportError, RuntimeError) as error:
            raise missing_mpi("AsyncParameterServer", error) from error
        with mpi:
            comm = (mpi.mpi.COMM_WORLD if comm is None else comm).Dup()
        self._values = values
        self._member = join_server(values.tensors, settings, values, mpi, comm)

    @property
    def is_server(self) -> bool:
        """Whether this rank serves; the others are workers."""
        return self._member.is_server

    @property
    def is_over(self) -> bool:
        """Whether, on a worker, the others finished while it was silent, so that its gradients count no more."""
        return self._member.is_over

    @property
    def version(self) -> int:
        """The number of updates that the parameters of this rank contain."""
        return self._member.version

    def serve(self, on_update: Callable[[int], object] | None = None) -> None:
        """Apply gradients, on the server, until all workers have finished, but for those that have been silent.

        Args:
            on_update: called with the number of updates after each of them.

        Raises:
            UnsupportedError: this rank is a worker.
            WireError: a damaged message.
        """
        self._member.serve(on_update)

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Send gradients by name, on a worker, once the last ones are answered; `parameters` may be newer then.

        Args:
            gradients: of the shapes of the parameters, not changed; a parameter that is left out has none. Where one is
                not finite, none of this step is applied, and residuals stay as they are.

        Raises:
            UnsupportedError: this rank is the server.
            ValueError: an unknown name, or another shape.
            HvdCompressError: the server has failed, or MPI has ended.
        """
        given = self._values.flat_gradients(gradients)
        self._member.step(lambda: given)

    def stats(self) -> dict[str, Any]:
        """See `server_stats` of `hvd_compress.torch.AsyncParameterServerOptimizer`."""
        return self._member.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, as `hvd_compress.feedback.write_state` saves them, for the same rank."""
        return self._member.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: not such a state, or of another rank or other parameters.
        """
        self._member.load_state_dict(state)

    def close(self) -> None:
        """Say that this rank has finished; on the server, wait until all workers have. At exit it is called too."""
        self._member.close()

    def __enter__(self) -> AsyncParameterServer:  # noqa: PYI034 (Self is of Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Arrays:
    """Gives the parameters to the server as flat arrays, see `async_server.Values`."""

    def __init__(self, parameters: dict[str, Array], update: Callable[[dict[str, Array]], object] | None) -> None:
        self._parameters = parameters
        self._update = update
        self.has_update = update is not None
        self.tensors = [_described(name, p) for name, p in parameters.items()]

    def arrays(self) -> Sequence[Array]:
        """Return the parameters as flat arrays, in their own memory."""
        return [self._flat_parameter(t) for t in self.tensors]

    def take(self, arrays: Sequence[Array]) -> None:
        """Do nothing: the arrays are the parameters' memory."""

    def update(self, gradients: Sequence[Array | None]) -> None:
        """Call the user's function."""
        assert self._update is not None
        pairs = zip(self.tensors, gradients, strict=True)
        self._update({t.name: gradient.reshape(t.shape) for t, gradient in pairs if gradient is not None})

    def flat_gradients(self, gradients: Mapping[str, Array]) -> list[Array | None]:
        """Return the gradients as flat arrays, in the order and the dtypes of the parameters.

        Raises:
            ValueError: an unknown name, or another shape.
        """
        if unknown := sorted(gradients.keys() - {t.name for t in self.tensors}):
            raise ValueError(f"gradient of {unknown[0]!r}, which is no parameter: there are {list(self._parameters)}")
        return [_flat_gradient(t, gradients[t.name]) if t.name in gradients else None for t in self.tensors]

    def _flat_parameter(self, tensor: ParameterSpec) -> Array:
        # `update` may have put another array there; kernels trust their sizes, and write where the user must see it
        p: Any = self._parameters[tensor.name]
        if _described(tensor.name, p) != tensor:
            raise ValueError(
                f"parameter {tensor.name!r} is {p.dtype} of shape {p.shape}, and was {tensor.dtype} of shape "
                f"{tensor.shape} when the server was made: these must stay"
            )
        flat: Array = p.reshape(-1)
        return flat


def _flat_gradient(tensor: ParameterSpec, gradient: Any) -> Array:
    array = np.asarray(gradient)
    if array.shape != tensor.shape:
        raise ValueError(
            f"gradient {tensor.name!r} has shape {array.shape}, its parameter has {tensor.shape}: they must be equal"
        )
    return np.ascontiguousarray(array, tensor.dtype).reshape(-1)


def _described(name: str, p: Any) -> ParameterSpec:
    if not isinstance(p, np.ndarray) or p.dtype not in (np.float32, np.float64):
        raise TypeError(f"parameter {name!r}: must be a NumPy array of float32 or float64, got {_type_of(p)}")
    if not p.flags.c_contiguous or not p.flags.writeable:
        raise ValueError(
            f"parameter {name!r} changes in place: it must be C-contiguous and writeable, as a copy of it would be"
        )
    return ParameterSpec(name, p.shape, p.dtype.name)


def _type_of(p: object) -> str:
    return f"one of {p.dtype}" if isinstance(p, np.ndarray) else type(p).__name__


def join_server(
    tensors: Sequence[ParameterSpec], settings: AsyncServerSettings, values: Values, mpi: Session, comm: Any
) -> ServerMember:
    """Make this rank's part of an asynchronous parameter server, which is closed at exit; a collective call.

    Args:
        tensors: of the parameters.
        settings: the same on all ranks.
        values: the parameters.
        mpi: its session.
        comm: a communicator of mpi4py that nobody else uses; it is freed.

    Raises:
        TypeError: the server knows no update.
        ValueError: no parameters, or no such server.
        UnsupportedError: fewer than two ranks, or messages of 16 GiB and more.
        MismatchError: the ranks disagree; raised on all of them.
    """
    size, position, server = int(comm.size), int(comm.rank), settings.server
    # ranks compare first: what is refused below is then refused on all of them
    told = settings.description(tensors)
    agree(told, lambda data, _: _gathered(mpi, comm, data), "hvd_compress.fingerprint.mpi")
    for compression in (settings.compression, settings.answer):
        check_patterns(compression, [t.name for t in tensors])
    if size < 2:
        raise UnsupportedError(
            "an asynchronous parameter server with one rank: one serves and the others train. Start with mpirun -np 2 "
            "or more"
        )
    if server >= size:
        raise ValueError(f"server={server}: must be one of the ranks 0 to {size - 1}")
    if not tensors:
        raise ValueError("no parameters: give those that are trained")
    if not _gathered(mpi, comm, bytes([values.has_update]))[server]:
        raise TypeError(
            f"rank {server} is the server and was given update=None: give it the function that applies gradients"
        )
    to_server, to_worker = settings.gradient_bytes(tensors), settings.answer_bytes(tensors)
    if max(to_server, to_worker) > MOST_BYTES:
        raise UnsupportedError(
            f"messages of up to {max(to_server, to_worker)} bytes: MPI counts {MOST_BYTES} at most. Divide the "
            "parameters among several servers"
        )
    peers = [rank for rank in range(size) if rank != server] if position == server else [server]
    room = to_server if position == server else to_worker
    connections = {peer: MpiConnection(peer, room, mpi, comm) for peer in peers}
    member = _MpiMember(tensors, settings, values, connections, position, size)
    _end_at_exit(member, mpi, comm)
    return member


def _gathered(mpi: Session, comm: Any, mine: bytes) -> bytes:
    """Join what each rank gives, in their order; a collective call, by buffers: nothing that comes is unpickled."""
    mpi.meet(comm)
    sizes = np.empty(comm.size, np.int64)
    with mpi:
        comm.Allgather(np.array([len(mine)], np.int64), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        comm.Allgatherv(np.frombuffer(mine, np.uint8), [everyone, sizes])
    return everyone.tobytes()


class _MpiMember(ServerMember):
    """Closes at exit: messages that nobody receives would keep MPI from ending."""

    mpi: Session
    comm: Any

    def close(self) -> None:
        """See `ServerMember.close`."""
        if self not in _open:
            return
        _open.remove(self)
        try:
            super().close()
        finally:
            with self.mpi:
                _leaving.append((self.comm, self.comm.Ibarrier()))


_open: list[_MpiMember] = []
_leaving: list[tuple[Any, Any]] = []
"""Communicators of members that are closed here, and a barrier which tells when they are on all ranks."""


def _end_at_exit(member: _MpiMember, mpi: Session, comm: Any) -> None:
    if not _open and not _leaving:
        # registered after Horovod's own end, and so called before it
        atexit.register(_end, mpi)
    member.mpi, member.comm = mpi, comm
    _open.append(member)


def _end(mpi: Session) -> None:
    """Close what is open, and wait until others have closed it: when one rank ends, Horovod ends MPI on all.

    This does not wait until others come to their end as well: they may wait for this rank in a collective of Horovod's,
    which fails when this one ends.
    """
    if mpi.has_ended:
        return
    with ExitStack() as stack:
        stack.callback(_wait_for_others, mpi)
        # callbacks run in reverse order, and all of them run, whichever raises
        for member in _open:
            stack.callback(member.close)


def _wait_for_others(mpi: Session) -> None:
    # a rank that is in none of these may end MPI meanwhile
    with suppress(HvdCompressError):
        while _leaving:
            comm, barrier = _leaving.pop()
            mpi.wait_until(barrier.Test)
            with mpi:
                comm.Free()
