"""What every compressor is: an immutable configuration with `encode` and `decode` on flat NumPy arrays."""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors.key import Key
from hvd_compress.errors import UnsupportedError, WireError
from hvd_compress.kernels import common

__all__ = ["Body", "Compressor", "Many"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_MOST_UNBACKED = 2**28  # elements that a payload of any size may claim: 1 GiB of float32
_NONE = {np.dtype(t): np.empty(0, t) for t in (np.float32, np.float64)}


class Body(NamedTuple):
    """What `Compressor._encode` has written into the body of a payload.

    Args:
        used: bytes.
        entries: for the header; what a body counts.
        parameter: for the header; what else decoding needs to know.
        finite: whether all values are. If not, nobody is sent the body; with error feedback it still has to be what was
            taken out of the residual, so that this can be put back.
    """

    used: int
    entries: int
    parameter: int
    finite: bool = True


_EMPTY = Body(0, 0, 0)
NOT_FINITE = Body(0, 0, 0, finite=False)


class Many(NamedTuple):
    """Kernels of `kernels.many` for one setting of a compressor.

    Args:
        codec: that their payloads state.
        encode: (x_at, gradients_at, numels, groups, slots_at, used); see `Compressor._encode`.
        decode: (at, flags, outs_at, numels, scale, adds); the number of the first payload that is damaged, or -1.
    """

    codec: int
    encode: Callable[..., None]
    decode: Callable[..., int]


class Compressor(ABC):
    """Base of all compressors; subclasses are frozen dataclasses whose fields are the settings."""

    id: ClassVar[str]
    """Stable name, used in configurations."""
    codec: ClassVar[int]
    """Stable number, used on the wire."""
    coded_codec: ClassVar[int | None] = None
    """Stable number of the form whose body is losslessly coded; None where there is no such form."""
    reducible: ClassVar[bool] = False
    """Whether an allreduce may sum what `compress` returns, as Horovod's own compressors require."""
    unbiased: ClassVar[bool] = False
    """Whether what is decoded is, on average, what was encoded."""
    seed: int = 0
    coding: str | None = None

    @property
    def fixed_size(self) -> bool:
        """Whether the payload's size follows from the shape alone."""
        return self.coding is None

    @property
    def feedback(self) -> bool:
        """Whether what was not sent is kept as residual and added to the next gradient."""
        return bool(getattr(self, "error_feedback", False))

    # -- configuration -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **settings: Any) -> Compressor:
        """Another one of this kind with the given settings; those that are not given are the defaults.

        So a ready one can be used as it is, and like its class where other settings are wanted.

        Raises:
            ValueError: a setting out of its range.
            TypeError: an unknown setting.

        Example:
            >>> from hvd_compress import Adaptive
            >>> ready = Adaptive()
            >>> ready(pi=32)
            Adaptive(pi=32, group='row', sample=1024, error_feedback=True, coding=None)
        """
        return type(self)(*args, **settings)

    def get_config(self) -> dict[str, Any]:
        """The settings as a JSON-able dict; `hvd_compress.from_config` is its inverse."""
        return {"id": self.id, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def many(self, group: int) -> Many | None:
        """Kernels for many flat float32 tensors with groups of so many elements; None where there are none."""
        return None

    def contraction(self, numel: int) -> float:
        """Factor on what is decoded that makes it, on average, nearer to the source than zero is."""
        return 1.0

    # -- what a subclass defines ---------------------------------------------------------------------------------

    @abstractmethod
    def group_numel(self, shape: tuple[int, ...]) -> int:
        """Elements per group for a tensor of `shape`."""

    @abstractmethod
    def body_bytes(self, numel: int, group: int) -> int:
        """The most bytes that the body of a payload for `numel` elements can take."""

    @abstractmethod
    def _encode(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        """Encode into `body`.

        With error feedback `x` is the residual: the sum of both is encoded, and what that leaves out is written into
        `x`; see `kernels.common.correct`. Without, `gradient` is empty, and `x` is what to encode, and is only read.
        """

    @abstractmethod
    def _decode(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        """Write or add `scale` times the decoded values; False if an index does not fit."""

    def _shorten(self, body: Bytes, done: Body, numel: int, group: int) -> Body | None:
        """Replace a body, which `done` tells of, by its losslessly coded form; None if that would not be shorter."""
        raise NotImplementedError(f"{self!r} has a coding, so its class must define _shorten")

    # -- for exchanges: flat arrays, given buffers ---------------------------------------------------------------

    def capacity(self, numel: int, group: int, shape: tuple[int, ...] | None = None) -> int:
        """The most bytes that a payload of `numel` elements can take; a multiple of 8."""
        return wire.header_bytes(shape if shape is not None else (numel,)) + wire.padded(self.body_bytes(numel, group))

    def encode_into(
        self,
        gradient: Array,
        residual: Array | None,
        payload: Bytes,
        group: int,
        key: Key,
        shape: tuple[int, ...] | None = None,
    ) -> int:
        """Encode a flat gradient into the start of `payload`; returns the number of bytes used.

        With a residual the sum of both is encoded, and the residual becomes what the payload leaves out. If a value is
        not finite the payload says only that, and the residual is what it was, to rounding (see `take_back`).

        Args:
            gradient: float32 or float64, flat and contiguous; only read.
            residual: like `gradient`, or None for no error feedback; renewed in place.
            payload: uint8, at least `capacity(gradient.size, group)` long, on an 8-byte boundary.
            group: elements per group.
            key: randomness of this call.
            shape: to be stated in the payload; flat by default.

        Raises:
            TypeError: an array is of another dtype than stated above.
            ValueError: an array is not flat, not contiguous, or of another size; or a residual is given to a compressor
                that keeps none.
        """
        _check_flat("gradient", gradient, gradient)
        if not gradient.flags.writeable:
            gradient = np.asarray(_ReadOnly(gradient))
        if residual is not None:
            _check_flat("residual", residual, gradient)
            self._check_feedback()
        shape = shape if shape is not None else (gradient.size,)
        at = wire.header_bytes(shape)
        body = payload[at:]
        codec, done = self.codec, _EMPTY
        if gradient.size:
            x, added = (gradient, _NONE[gradient.dtype]) if residual is None else (residual, gradient)
            done = self._encode(x, added, body, group, key)
            if not done.finite:
                if residual is not None:
                    self._put_back(done, body, group, residual)
                    common.take_back(residual, gradient)
                done = NOT_FINITE
            elif done.used & 7:
                body[done.used : wire.padded(done.used)] = 0
        if self.coding is not None and self.coded_codec is not None and done.finite and gradient.size:
            shorter = self._shorten(body[: wire.padded(done.used)], done, gradient.size, group)
            if shorter is not None:
                codec, done = self.coded_codec, shorter
        nbytes = at + wire.padded(done.used)
        wire.seal(
            payload[:nbytes],
            codec=codec,
            shape=shape,
            group=group,
            parameter=done.parameter,
            entries=done.entries,
            float64=gradient.dtype == np.float64,
            nonfinite=not done.finite,
        )
        return nbytes

    def take_back(self, payload: Bytes, residual: Array, gradient: Array | None) -> None:
        """Make a residual what it was before `encode_into` has made `payload` of it and of `gradient`, to rounding.

        Each element is off by at most 2^-22 (float64: 2^-51) of the largest of its gradient, its residual before and
        after, and its decoded value; what cannot be told from such a rounding error becomes 0. Without the gradient,
        where that is lost, it stays owed with the rest.
        """
        header, _ = opened = wire.open_payload(payload)
        if header.nonfinite or header.absent:
            # encoding has taken it back, or has not touched it
            return
        self.decode_opened(*opened, residual, add=True)
        if gradient is not None:
            common.take_back(residual, gradient)

    def _put_back(self, done: Body, body: Bytes, group: int, residual: Array) -> None:
        """Add what a body stands for, which is not sealed yet, to what it has left of the residual."""
        header = wire.Header(
            codec=self.codec, nonfinite=False, float64=residual.dtype == np.float64, absent=False,
            shape=(residual.size,), numel=residual.size, nbytes=0, group=group, parameter=done.parameter,
            entries=done.entries, body_at=0,
        )  # fmt: skip
        self._decode(header, wire.Sections(body[: wire.padded(done.used)]), residual, np.float32(1), True)

    def _check_feedback(self) -> None:
        if not self.feedback:
            raise ValueError(f"{self!r} keeps no residual: give none, or take a compressor with error feedback")

    def say_absent(self, payload: Bytes, numel: int, group: int) -> int:
        """Write that there is no gradient into the start of `payload`, and return the number of bytes used."""
        return self._say(payload, numel, group, absent=True)

    def say_nonfinite(self, payload: Bytes, numel: int, group: int) -> int:
        """As `say_absent`, that a value is not finite."""
        return self._say(payload, numel, group, nonfinite=True)

    def _say(self, payload: Bytes, numel: int, group: int, absent: bool = False, nonfinite: bool = False) -> int:
        nbytes = wire.header_bytes((numel,))
        wire.seal(
            payload[:nbytes],
            codec=self.codec,
            shape=(numel,),
            group=group,
            parameter=0,
            entries=0,
            float64=False,
            nonfinite=nonfinite,
            absent=absent,
        )
        return nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float = 1.0, add: bool = False) -> bool:
        """Decode into flat, contiguous `out` (float32 or float64), times `scale`; True if the values are finite.

        A payload that reports a value that was not finite fills `out` with NaN; one of no gradient stands for zeros.

        Raises:
            WireError: truncated, corrupted or foreign payload, or one for another number of elements.
            TypeError: `out` is neither float32 nor float64.
            ValueError: `out` is not flat, or not contiguous.
        """
        return self.decode_opened(*wire.open_payload(payload), out, scale, add)

    def decode_opened(
        self, header: wire.Header, body: wire.Sections, out: Array, scale: float = 1.0, add: bool = False
    ) -> bool:
        """`decode_into` of a payload that `wire.open_payload` has checked; its sections are used up."""
        if header.codec not in (self.codec, self.coded_codec):
            raise WireError(f"payload of codec {header.codec} given to {self!r} (codec {self.codec})")
        if header.numel != out.size:
            raise WireError(f"payload of {header.numel} elements, expected {out.size}")
        _check_flat("out", out, out)
        if header.nonfinite:
            body.finish()
            out[...] = np.nan
            return False
        if header.absent:
            body.finish()
            if not add:
                out[...] = 0
            return True
        if header.numel and not self._decode(header, body, out, np.float32(scale), add):
            raise WireError(f"payload of {self.id}: an index or count lies outside of its group")
        body.finish()
        return True

    # -- for people: any array, no ranks -------------------------------------------------------------------------

    def encode(self, x: npt.ArrayLike, residual: Array | None = None, key: Key | None = None) -> Bytes:
        """Encode an array to bytes, with error feedback if a residual is given.

        Args:
            x: float16, bfloat16, float32 or float64, any shape; not changed.
            residual: as many elements as `x`, contiguous, float64 if `x` is, else float32. It is added to `x`, and
                what the payload leaves out is written back into it. A value that is not finite leaves it unchanged, to
                rounding.
            key: randomness of the call; `Key()` by default.

        Returns:
            Flat uint8 array.

        Raises:
            TypeError: `x` is not of a floating type, or `residual` of another dtype than stated above.
            ValueError: `residual` does not have the size of `x`, it is not contiguous, or this compressor keeps none.

        Example:
            >>> import numpy as np, hvd_compress
            >>> x = np.array([0.5, -1.0, 2.0, -3.0], np.float32)
            >>> residual = np.zeros(4, np.float32)
            >>> compressor = hvd_compress.OneBit()
            >>> payload = compressor.encode(x, residual)
            >>> compressor.decode(payload)
            array([ 1.25, -2.  ,  1.25, -2.  ], dtype=float32)
            >>> residual
            array([-0.75,  1.  ,  0.75, -1.  ], dtype=float32)
        """
        array = np.asarray(x)
        shape = array.shape
        flat = as_flat_floats(array)
        if residual is not None:
            self._check_feedback()
        kept = _checked_residual(residual, flat)
        group = self.group_numel(shape)
        payload = np.empty(self.capacity(flat.size, group, shape), np.uint8)
        return payload[: self.encode_into(flat, kept, payload, group, key or Key(seed=self.seed), shape)]

    def decode(self, payload: npt.ArrayLike) -> Array:
        """Decode to an array of the encoded shape: float64 if the source was, else float32.

        Raises:
            WireError: truncated, corrupted or foreign payload.
        """
        buffer = as_bytes(payload)
        header, _ = wire.open_payload(buffer)
        if header.numel > max_numel(header):
            raise WireError(f"payload of {header.nbytes} bytes claims {header.numel} elements")
        try:
            out = np.zeros(header.numel, np.float64 if header.float64 else np.float32)
        except MemoryError:
            raise WireError(f"payload of {header.nbytes} bytes claims {header.numel} elements: no memory") from None
        self.decode_into(buffer, out)
        return out.reshape(header.shape)

    # -- Horovod's own interface ---------------------------------------------------------------------------------

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Horovod's `Compressor.compress`; only for compressors whose result an allreduce can sum.

        Raises:
            UnsupportedError: the result would be bytes, which stock Horovod would sum up.
        """
        raise UnsupportedError(
            f"{self!r} cannot be used with stock Horovod: its allreduce would sum the compressed bytes. "
            "Use the same optimizer from hvd_compress: `import hvd_compress.torch as hvd`."
        )

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Horovod's `Compressor.decompress`; see `compress`.

        Raises:
            UnsupportedError: as `compress` does.
        """
        return self.compress(tensor)


class _ReadOnly:
    """An array that must not be written to, as one that may be, without a copy.

    Numba would compile a kernel once more for the former, and cannot where the kernel writes to its residual, which
    a gradient without error feedback stands in for. Kernels only read gradients.
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def max_numel(header: wire.Header) -> int:
    """The most elements that a payload of this size is believed to stand for, so that a forged one allocates little."""
    # 4 bytes for 65536 elements is the least that a table of counts takes; only a group of which nothing is sent and a
    # value that is not finite say more elements with fewer bytes
    return max(16384 * header.nbytes, _MOST_UNBACKED)


def as_bytes(payload: npt.ArrayLike) -> Bytes:
    """A payload given as bytes, memoryview or array, as an aligned flat uint8 array."""
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = np.frombuffer(payload, np.uint8)
    array = np.asarray(payload)
    if array.dtype != np.uint8:
        raise WireError(f"a payload is made of uint8, got {array.dtype}")
    array = np.ascontiguousarray(array).reshape(-1)
    return array if array.ctypes.data % 8 == 0 else array.copy()


def as_flat_floats(array: Array) -> Array:
    """A flat float32 (float64 for float64) copy of an array of any floating type."""
    native = array.dtype.newbyteorder("=")
    if native in (np.float32, np.float64):
        return array.astype(native, order="C", copy=True).reshape(-1)
    if native == np.float16 or array.dtype.name == "bfloat16":
        return array.astype(np.float32, order="C").reshape(-1)
    raise TypeError(f"cannot encode {array.dtype}: gradients are float16, bfloat16, float32 or float64")


def _checked_residual(residual: Array | None, flat: Array) -> Array | None:
    if residual is None:
        return None
    if residual.dtype != flat.dtype:
        raise TypeError(f"residual of {residual.dtype} for a gradient that is handled as {flat.dtype}; they must agree")
    if residual.size != flat.size or not residual.flags.c_contiguous:
        raise ValueError(
            f"residual of shape {residual.shape} for a gradient of {flat.size} elements: it needs as many elements, "
            "contiguous"
        )
    return residual.reshape(-1)


def _check_flat(name: str, array: Array, like: Array) -> None:
    """Refuse what kernels, which address elements by their number, would read or write beyond its end."""
    if array.dtype not in _NONE or array.dtype != like.dtype:
        allowed = "float32 or float64" if array is like else f"{like.dtype}, as the gradient is"
        raise TypeError(f"{name} is {array.dtype}: must be {allowed}")
    if array.ndim != 1 or not array.flags.c_contiguous or array.size != like.size:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}: must be flat and contiguous, of {like.size} "
            "elements"
        )


def framework_of(tensor: Any) -> Any:
    """The framework module that `tensor` comes from; it is loaded already, or there would be no tensor."""
    return sys.modules[type(tensor).__module__.partition(".")[0]]


def count_groups(numel: int, group: int) -> int:
    """How many groups of `group` elements cover `numel`."""
    return -(-numel // (group or 1))


def top_count(numel: int, ratio: float) -> int:
    """How many of `numel` entries a ratio keeps: at least one."""
    return min(numel, max(1, math.ceil(numel * ratio)))
