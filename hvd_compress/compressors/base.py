"""Define what every compressor is: an immutable configuration with `encode` and `decode` on flat NumPy arrays."""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import tables
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import NARROW
from hvd_compress.compressors.tables import LIKE, DeviceKernels, Kernels
from hvd_compress.errors import ContractError, UnsupportedError, WireError
from hvd_compress.kernels import common, table

__all__ = ["NOT_FINITE", "Body", "Compressor", "TableCompressor", "add_gradient"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

NOT_FINITE_WITHOUT_A_WORD = (
    "payload decodes to values that are not finite, and its header says that all are: no encoder of hvd_compress makes "
    "such a payload, so it is damaged or forged"
)
_MOST_UNBACKED = 2**28  # elements that a payload of any size may claim: 1 GiB of float32


class Body(NamedTuple):
    """Says what `Compressor.encode_body` has written into the body of a payload.

    Args:
        used: how many bytes of the body are used.
        entries: a count that decoding needs, for the header; 32 bits.
        parameter: what else decoding needs to know, for the header; 32 bits.
        finite: whether all values are finite. If not, the body is sent to nobody. With error feedback it must still
            hold what was taken out of the residual, so that this can be put back; 0 bytes if nothing was taken out.
    """

    used: int
    entries: int = 0
    parameter: int = 0
    finite: bool = True


_EMPTY = Body(0)
NOT_FINITE = Body(0, finite=False)
"""A value is not finite, and nothing was taken out of the residual."""
_MOST_IN_HEADER = 2**32 - 1


class Compressor(ABC):
    """Base of all compressors; subclasses are frozen dataclasses whose fields are the settings.

    A subclass of your own defines `id`, `codec`, `body_bytes`, `encode_body` and `decode_body`; everything else has a
    default. `hvd_compress.register` makes it known, and `hvd_compress.testing.check_compressor` tells what it does
    wrong. A field `error_feedback` that is True switches the residual on, which keeps what was not sent and adds it to
    the next gradient; "float8" keeps the residual in 8 bits between steps. A field `seed` seeds its random choices.

    Example:
        One bit for each element, and one scale for all:

        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> import numpy as np
        >>> import hvd_compress
        >>> from hvd_compress.compressors import NOT_FINITE, Body, add_gradient
        >>> from hvd_compress.wire import Sections
        >>> @hvd_compress.register
        ... @dataclass(frozen=True)
        ... class Signs(hvd_compress.Compressor):
        ...     factor: float = 1.0
        ...     error_feedback: bool = True
        ...     id: ClassVar[str] = "docsigns"
        ...     codec: ClassVar[int] = 250
        ...
        ...     def body_bytes(self, numel, group):
        ...         return 8 + (numel + 7) // 8
        ...
        ...     def encode_body(self, x, gradient, body, group, key):
        ...         if not add_gradient(x, gradient):
        ...             return NOT_FINITE
        ...         scale = np.float32(self.factor * np.abs(x).mean(dtype=np.float64))
        ...         bits = np.packbits(x >= 0)
        ...         sections = Sections(body)
        ...         sections.blank(1, np.float32)[0] = scale
        ...         sections.blank(bits.size, np.uint8)[:] = bits
        ...         if gradient.size:  # error feedback: x is the residual
        ...             x -= np.where(x >= 0, scale, -scale)
        ...         return Body(sections.used)
        ...
        ...     def decode_body(self, header, body, out, scale, add):
        ...         (size,) = body.take(1, np.float32) * scale
        ...         bits = np.unpackbits(body.take((out.size + 7) // 8, np.uint8), count=out.size)
        ...         values = np.where(bits, size, -size)
        ...         out[:] = out + values if add else values
        ...         return True
        >>> compressor = hvd_compress.from_config({"id": "docsigns", "factor": 2.0})
        >>> hvd_compress.decode(compressor.encode(np.array([1.0, -3.0], np.float32)))
        array([ 4., -4.], dtype=float32)
    """

    id: ClassVar[str]
    """Stable name, used in configurations."""
    codec: ClassVar[int]
    """Stable number, used on the wire; 192 to 255 are for compressors of others than this package."""
    coded_codec: ClassVar[int | None] = None
    """Stable number of the form whose body is losslessly coded; None where there is no such form."""
    reducible: ClassVar[bool] = False
    """Whether an allreduce may sum what `compress` returns, as Horovod's own compressors require."""
    unbiased: ClassVar[bool] = False
    """Whether what is decoded is, on average, what was encoded."""
    is_dense: ClassVar[bool] = False
    """Whether every value arrives, to the rounding of 16 bits or better."""
    can_overflow: ClassVar[bool] = False
    """Whether a finite value may be decoded as an infinite one."""
    sums_factors: ClassVar[bool] = False
    """Whether ranks sum factors of a gradient, in an exchange of their own, and there are no payloads."""
    sends_entries: ClassVar[bool] = False
    """Whether some entries are sent exactly, and nothing of the others: then nothing is owed of what was sent."""
    votes: ClassVar[bool] = False
    """Whether what arrives is what most ranks have sent, so that sums need an owner, who encodes them likewise."""
    seed: int = 0
    coding: str | None = None

    @property
    def fixed_size(self) -> bool:
        """Whether the payload's size follows from the shape alone."""
        return self.coding is None

    @property
    def feedback(self) -> bool:
        """Whether what was not sent is kept as a residual and added to the next gradient."""
        return bool(getattr(self, "error_feedback", False))

    @property
    def has_narrow_residuals(self) -> bool:
        """Whether residuals are kept in 8 bits from one step to the next."""
        return getattr(self, "error_feedback", False) == NARROW

    # -- configuration -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **settings: Any) -> Compressor:
        """Make another one of this kind with the given settings; those that are not given are the defaults.

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
        """Return the settings as a JSON-able dict; `hvd_compress.from_config` is its inverse."""
        return {"id": self.id, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @property
    def draws(self) -> bool:
        """Whether encoding draws random numbers, which cost a hash for each tensor."""
        return True

    def kernels(self, group: int) -> Kernels | None:
        """Return the kernels for tensors with groups of `group` elements; None if `encode_body` encodes each tensor."""
        return None

    def device_kernels(self, group: int) -> DeviceKernels | None:
        """Return the kernels for gradients in device memory; None where such gradients go through host memory."""
        return None

    def drawing_key(self, key: Key) -> Key:
        """Return the part of a key that random choices depend on; by default all of it."""
        return key

    def limit_of(self, numel: int, group: int) -> int:
        """Return what kernels have to know about a tensor besides its size, such as how many entries to send."""
        return 0

    def contraction(self, numel: int) -> float:
        """Return the factor that brings decoded values, on average, nearer to the source than zero is."""
        return 1.0

    # -- what others need to know of a compressor; a subclass may say it ------------------------------------------

    @classmethod
    def decoder(cls) -> Compressor:
        """Return a compressor of this class with any settings; it decodes payloads of all settings."""
        return cls()

    def group_numel(self, shape: tuple[int, ...]) -> int:
        """Return the elements per group for a tensor of `shape`; where possible, ranks' parts end between groups."""
        return 1

    def for_part(self, numel: int, total: int) -> Compressor:
        """Return the compressor for a part, of `numel` elements, of a tensor of `total` that is exchanged in parts."""
        return self

    def for_sum(self, ranks: int) -> Compressor:
        """Return the compressor for the sum of what this many ranks have sent; `self` by default."""
        return self

    def keeping(self, share: float) -> Compressor:
        """Return a compressor that sends at least this share of the values, for the first epochs; `self` by default."""
        return self

    def kept_share(self, numel: int) -> float:
        """Return roughly what share of a tensor's change one payload transmits; 1.0 by default."""
        return 1.0

    @property
    def typical_deviation(self) -> float | None:
        """The standard deviation of the gradients that these settings suit; None if they suit all gradients."""
        return None

    # -- what a subclass defines ---------------------------------------------------------------------------------

    @abstractmethod
    def body_bytes(self, numel: int, group: int) -> int:
        """Return the most bytes that the body of a payload for `numel` elements can take."""

    @abstractmethod
    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        """Encode a flat array of at least one element into `body`.

        With error feedback `x` is the residual: encode the sum of `x` and `gradient`, and write what the payload leaves
        out into `x`; begin with `add_gradient`. Without error feedback `gradient` is empty, and `x` is what to encode;
        only read it.

        Args:
            x: float32 or float64.
            gradient: like `x`, or empty; only read.
            body: `body_bytes(x.size, group)` or more, whose content is not defined.
            group: elements per group.
            key: randomness of this call; `key.words()` seeds a generator.

        Returns:
            How much was written. `NOT_FINITE` if a value is infinite or NaN.
        """

    @abstractmethod
    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        """Write or add `scale` times the decoded values; returns False if what is in `body` makes no sense, else True.

        Use only the header and the body: this object's settings may differ from those of the encoder.

        Args:
            header: has `entries`, `parameter` and `group` as they were when encoding.
            body: hands out what `encode_body` has written, section by section; take all of it.
            out: float32 or float64, flat; its size is the number of elements.
            scale: factor on the values.
            add: whether to add to what is in `out`.
        """

    def shorten_body(self, body: Bytes, done: Body, numel: int, group: int) -> Body | None:
        """Replace a body, which `done` describes, by its losslessly coded form; returns None if that is not shorter."""
        raise NotImplementedError(f"{self!r} has a coding, so its class must define shorten_body")

    # -- for exchanges: flat arrays, given buffers ---------------------------------------------------------------

    def capacity(self, numel: int, group: int, shape: tuple[int, ...] | None = None) -> int:
        """Return the most bytes that a payload of `numel` elements can take; a multiple of 8."""
        nbytes: Any = self.body_bytes(numel, group)
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ContractError(f"{self!r}: body_bytes({numel}, {group}) is {nbytes!r}; it must be an int, 0 or more")
        return wire.header_bytes(shape if shape is not None else (numel,)) + wire.padded(nbytes)

    def group_of(self, shape: tuple[int, ...]) -> int:
        """Check `group_numel` and return it.

        Raises:
            ContractError: `group_numel` returned no number of elements.
        """
        group: Any = self.group_numel(shape)
        if type(group) is not int or not 1 <= group <= _MOST_IN_HEADER:
            raise ContractError(f"{self!r}: group_numel({shape}) is {group!r}; it must be an int from 1 to 4294967295")
        return int(group)

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
        not finite, the payload says only that, and the residual keeps its values, up to rounding (see `take_back`).

        Args:
            gradient: float32 or float64, flat and contiguous; only read.
            residual: like `gradient`, or None for no error feedback; updated in place.
            payload: uint8, at least `capacity(gradient.size, group, shape)` long, on an 8-byte boundary.
            group: elements per group, 1 or more.
            key: randomness of this call.
            shape: the shape that the payload states; flat by default.

        Raises:
            TypeError: an array is of another dtype than stated above.
            ValueError: an array is not flat, not contiguous, or of another size; the payload is too short or not
                aligned; a residual or the payload is read-only; a residual is given to a compressor that keeps none;
                the group is no size of a group; or the shape is one of another number of elements.
            ContractError: the class does not do what `Compressor` asks of it.
        """
        self._check_arrays(gradient, residual)
        shape = shape if shape is not None else (gradient.size,)
        if math.prod(shape) != gradient.size:
            raise ValueError(f"shape {shape} has {math.prod(shape)} elements: the gradient has {gradient.size}")
        if not 1 <= group <= _MOST_IN_HEADER:
            raise ValueError(f"group is {group}: must be from 1 to {_MOST_IN_HEADER} elements")
        _check_room(payload, self._most_bytes(gradient, group, shape))
        if not gradient.flags.writeable:
            gradient = np.asarray(_ReadOnly(gradient))
        return self._encode(gradient, residual, payload, group, key, shape)

    def _most_bytes(self, gradient: Array, group: int, shape: tuple[int, ...]) -> int:
        """Return the most bytes that a payload of this gradient can take: `capacity`, or less for its dtype."""
        return self.capacity(gradient.size, group, shape)

    def _check_arrays(self, gradient: Array, residual: Array | None) -> None:
        _check_flat("gradient", gradient, gradient)
        if residual is not None:
            _check_flat("residual", residual, gradient)
            _check_writeable("residual", residual)
            if not self.feedback:
                raise self._keeps_none()

    def _encode(
        self, gradient: Array, residual: Array | None, payload: Bytes, group: int, key: Key, shape: tuple[int, ...]
    ) -> int:
        """Encode checked arrays by `encode_body`; see `encode_into`."""
        at = wire.header_bytes(shape)
        body = payload[at:]
        done = _EMPTY
        if gradient.size:
            x, added = (gradient, LIKE[gradient.dtype]) if residual is None else (residual, gradient)
            try:
                done = self.encode_body(x, added, body, group, key)
            except MemoryError:
                raise
            except Exception as error:
                room = f"of {x.size} elements in a body of {body.size} bytes, which is what body_bytes asked for"
                raise self._mistake(f"encode_body {room}: {type(error).__name__}: {error}") from error
            if not (
                type(done) is Body
                and 0 <= done.used <= body.size
                and 0 <= done.entries <= _MOST_IN_HEADER
                and 0 <= done.parameter <= _MOST_IN_HEADER
            ):
                raise self._mistake(
                    f"encode_body of {x.size} elements returned {done!r}; it must return a Body that has used at most "
                    f"the {body.size} bytes that body_bytes asked for, with entries and a parameter of 32 bits"
                )
            if not done.finite:
                if residual is not None:
                    if done.used:
                        self._put_back(done, body, group, residual)
                    common.take_back(residual, gradient)
                done = NOT_FINITE
            elif done.used & 7:
                body[done.used : wire.padded(done.used)] = 0
        nbytes = at + wire.padded(done.used)
        wire.seal(
            payload[:nbytes],
            codec=self.codec,
            shape=shape,
            group=group,
            parameter=done.parameter,
            entries=done.entries,
            float64=gradient.dtype == np.float64,
            nonfinite=not done.finite,
        )
        return nbytes if self.coding is None else self.shorten(payload[:nbytes])

    def shorten(self, payload: Bytes) -> int:
        """Replace the body of a payload by its losslessly coded form, if that is shorter; returns the bytes used."""
        header, _ = wire.open_payload(payload)
        if self.coded_codec is None or header.codec == self.coded_codec or not header.numel or header.nonfinite:
            return header.nbytes
        done = Body(header.nbytes - header.body_at, header.entries, header.parameter)
        shorter = self.shorten_body(payload[header.body_at : header.nbytes], done, header.numel, header.group)
        if shorter is None:
            return header.nbytes
        nbytes = header.body_at + wire.padded(shorter.used)
        wire.seal(
            payload[:nbytes],
            codec=self.coded_codec,
            shape=header.shape,
            group=header.group,
            parameter=shorter.parameter,
            entries=shorter.entries,
            float64=header.float64,
            nonfinite=False,
        )
        return nbytes

    def take_back(self, payload: Bytes, residual: Array, gradient: Array | None) -> None:
        """Restore a residual to what it was before `encode_into` made `payload` of it and of `gradient`, to rounding.

        Each element is off by at most 2^-22 (float64: 2^-51) of the largest of its gradient, its residual before and
        after, and its decoded value; a value that cannot be told from such a rounding error becomes 0. If the gradient
        is lost (None), it remains part of the residual.
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
        try:
            self.decode_body(header, wire.Sections(body[: wire.padded(done.used)]), residual, np.float32(1), True)
        except MemoryError:
            raise
        except Exception as error:
            raise self._mistake(
                f"encode_body returned {done!r} and a body that decode_body refuses ({error}), so the residual cannot "
                "be put back; return NOT_FINITE before anything is taken out of it"
            ) from error

    def _mistake(self, text: str) -> ContractError:
        return ContractError(f"{self!r}: {text}. hvd_compress.testing.check_compressor tells more")

    def _keeps_none(self) -> ValueError:
        return ValueError(f"{self!r} keeps no residual: give none, or take a compressor with error feedback")

    def say_absent(self, payload: Bytes, numel: int, group: int) -> int:
        """Write that there is no gradient into the start of `payload`, and return the number of bytes used."""
        return self._say(payload, (numel,), group, absent=True)

    def say_nonfinite(self, payload: Bytes, numel: int, group: int) -> int:
        """Write that a value is not finite, and return the number of bytes used; see `say_absent`."""
        return self._say(payload, (numel,), group, nonfinite=True)

    def _say(
        self,
        payload: Bytes,
        shape: tuple[int, ...],
        group: int,
        absent: bool = False,
        nonfinite: bool = False,
        float64: bool = False,
    ) -> int:
        """Write a payload without a body."""
        nbytes = wire.header_bytes(shape)
        wire.seal(
            payload[:nbytes],
            codec=self.codec,
            shape=shape,
            group=group,
            parameter=0,
            entries=0,
            float64=float64,
            nonfinite=nonfinite,
            absent=absent,
        )
        return nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float = 1.0, add: bool = False) -> bool:
        """Decode into flat, contiguous `out` (float32 or float64), times `scale`; returns whether all is finite.

        A payload that reports a value that was not finite fills `out` with NaN; a payload that reports no gradient
        stands for zeros.

        Raises:
            WireError: truncated, corrupted or foreign payload, or one for another number of elements.
            TypeError: `out` is neither float32 nor float64.
            ValueError: `out` is not flat, not contiguous, or read-only.
        """
        return self.decode_opened(*wire.open_payload(payload), out, scale, add)

    def decode_opened(
        self, header: wire.Header, body: wire.Sections, out: Array, scale: float = 1.0, add: bool = False
    ) -> bool:
        """Decode, as `decode_into` does, a payload that `wire.open_payload` has checked; uses up its sections."""
        if header.codec not in (self.codec, self.coded_codec):
            raise WireError(f"payload of codec {header.codec} given to {self!r} (codec {self.codec})")
        if header.numel != out.size:
            raise WireError(f"payload of {header.numel} elements, expected {out.size}")
        _check_flat("out", out, out)
        _check_writeable("out", out)
        if header.nonfinite:
            body.finish()
            out[...] = np.nan
            return False
        if header.absent:
            body.finish()
            if not add:
                out[...] = 0
            return True
        if header.numel:
            self._decode(header, body, out, np.float32(scale), add)
        else:
            body.finish()
        return True

    def _decode(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> None:
        """Decode a body by `decode_body`; see `decode_opened`."""
        try:
            is_sound = self.decode_body(header, body, out, scale, add)
        except (WireError, MemoryError):
            raise
        except Exception as error:
            raise self._undecodable(error) from error
        if not is_sound:
            raise self._unsound(is_sound)
        body.finish()

    def _undecodable(self, error: Exception) -> WireError:
        return WireError(
            f"payload of {self.id} cannot be decoded: {self!r}.decode_body raised {type(error).__name__}: {error}"
        )

    def _unsound(self, answer: Any) -> Exception:
        if answer is None:
            return self._mistake("decode_body returned None; it must return True, or False for a damaged body")
        return WireError(f"payload of {self.id}: an index or count lies outside of its group")

    # -- for people: any array, no ranks -------------------------------------------------------------------------

    def encode(self, x: npt.ArrayLike, residual: Array | None = None, key: Key | None = None) -> Bytes:
        """Encode an array to bytes, with error feedback if a residual is given.

        Args:
            x: float16, bfloat16, float32 or float64, any shape; not changed.
            residual: as many elements as `x`, contiguous, float64 if `x` is, else float32. It is added to `x`, and what
                the payload leaves out is written back into it. If a value is not finite, the residual stays unchanged,
                up to rounding.
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
        if residual is not None and not self.feedback:
            raise self._keeps_none()
        kept = _checked_residual(residual, flat)
        group = self.group_of(shape)
        payload = np.empty(self.capacity(flat.size, group, shape), np.uint8)
        return payload[: self.encode_into(flat, kept, payload, group, key or Key(seed=self.seed), shape)]

    def decode(self, payload: npt.ArrayLike, max_numel: int | None = None) -> Array:
        """Decode to an array of the encoded shape: float64 if the source was, else float32.

        Args:
            payload: uint8 or bytes.
            max_numel: refuse a payload that claims more elements than this; see `hvd_compress.decode`.

        Raises:
            WireError: truncated, corrupted or foreign payload; a payload that claims more elements than allowed; or one
                whose values are not finite although it says that they are.
            ValueError: `max_numel` is no integer of at least 0.
        """
        buffer = as_bytes(payload)
        header, _ = wire.open_payload(buffer)
        check_numel(header, max_numel)
        try:
            out = np.zeros(header.numel, np.float64 if header.float64 else np.float32)
        except MemoryError:
            raise WireError(f"payload of {header.nbytes} bytes claims {header.numel} elements: no memory") from None
        # of these, values travel as they are, and 16 bits overflow without telling
        may_tell_nothing = self.reducible or self.can_overflow
        if self.decode_into(buffer, out) and not may_tell_nothing and not common.all_finite(out):
            raise WireError(NOT_FINITE_WITHOUT_A_WORD)
        return out.reshape(header.shape)

    # -- Horovod's own interface ---------------------------------------------------------------------------------

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Do what Horovod's `Compressor.compress` does; only for compressors whose result an allreduce can sum.

        Raises:
            UnsupportedError: the result would be bytes, which stock Horovod would sum up.
        """
        raise UnsupportedError(
            f"{self!r} cannot be used with stock Horovod: its allreduce would sum the compressed bytes. "
            "Use the same optimizer from hvd_compress: `import hvd_compress.torch as hvd`."
        )

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Do what Horovod's `Compressor.decompress` does; see `compress`.

        Raises:
            UnsupportedError: as `compress` does.
        """
        return self.compress(tensor)


class TableCompressor(Compressor):
    """Base of the compressors of this package, which encode and decode whole tables of tensors by kernels.

    A subclass defines `kernels`; if it has a lossless coding, these kernels also have `shorten` and `decode_coded`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "encode_body" in vars(cls):
            raise TypeError(
                f"{cls.__name__} defines encode_body, and its base encodes by kernels that do not call it: derive from "
                "hvd_compress.Compressor"
            )

    @abstractmethod
    def kernels(self, group: int) -> Kernels: ...

    @property
    def draws(self) -> bool:
        return False

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        raise NotImplementedError(f"{type(self).__name__} encodes by kernels; call encode or encode_into")

    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        raise NotImplementedError(f"{type(self).__name__} decodes by kernels; call decode or decode_into")

    def _encode(
        self, gradient: Array, residual: Array | None, payload: Bytes, group: int, key: Key, shape: tuple[int, ...]
    ) -> int:
        if not gradient.size:
            return self._say(payload, shape, group, float64=gradient.dtype == np.float64)
        x, added = (gradient, 0) if residual is None else (residual, table.address_of(gradient))
        rows = tables.row(table.address_of(x), gradient.size, group, payload)
        rows[0, table.GRADIENT], rows[0, table.LIMIT] = added, self.limit_of(gradient.size, group)
        rows[0, table.DIMENSIONS] = len(shape)
        if len(shape) != 1:
            payload[wire.HEADER_BYTES : wire.header_bytes(shape)].view("<u8")[:] = shape
        tables.encode(self, self.kernels(group), rows, LIKE[gradient.dtype], lambda _: key)
        return int(rows[0, table.USED])

    def _decode(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> None:
        if not body.whole.size:
            # NumPy gives what is empty the address of the memory that it is cut from
            raise WireError(f"payload of {self.id}: {header.numel} elements, and no body")
        at = table.address_of(body.whole) - header.body_at
        rows = tables.row(table.address_of(out), out.size, header.group, tables.bytes_at(at, header.nbytes))
        is_coded = header.codec == self.coded_codec
        rows[0, table.ADD], rows[0, table.FLAGS] = add, table.FLOAT64 * header.float64 | table.CODED * is_coded
        if tables.decode(self, self.kernels(header.group), rows, LIKE[out.dtype], float(scale)) >= 0:
            raise WireError(
                self.misfit(header)
                or f"payload of {self.id}: its {header.nbytes - header.body_at} bytes of body are not {header.entries} "
                f"among {header.numel} elements in groups of {header.group}, or an index or count lies outside of its "
                "group"
            )

    def misfit(self, header: wire.Header) -> str | None:
        """Say what is wrong with a header that kernels have refused; None if the body is at fault."""
        return None


class _ReadOnly:
    """Shows an array that must not be written to as one that may be, without a copy.

    Numba would compile a kernel once more for the former, and cannot where the kernel writes to its residual, which
    a gradient without error feedback stands in for. Kernels only read gradients.
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def add_gradient(x: Array, gradient: Array) -> bool:
    """Add the gradient to the residual `x`, to begin `encode_body`; returns whether all is finite as float32.

    A sum that is not finite is not written. Without error feedback, where `gradient` is empty, `x` is only checked.

    Args:
        x: flat float32, changed in place.
        gradient: flat float32 of the same length, or empty.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.compressors import add_gradient
        >>> residual = np.array([1.0, 2.0], np.float32)
        >>> add_gradient(residual, np.array([0.5, 0.5], np.float32)), residual
        (True, array([1.5, 2.5], dtype=float32))
    """
    return bool(common.correct(x, gradient) == 0)


def check_numel(header: wire.Header, most: Any) -> None:
    """Raise WireError if a payload claims more elements than allowed: a forged one must not make us allocate them."""
    if most is None:
        # 4 bytes for 65536 elements is the least that a table of counts takes; only a group of which nothing is sent
        # and a value that is not finite say more elements with fewer bytes
        most = max(16384 * header.nbytes, _MOST_UNBACKED)
    elif isinstance(most, bool) or not isinstance(most, int | np.integer) or most < 0:
        raise ValueError(
            f"max_numel={most!r}: must be an integer of at least 0, or None for the limit that is built in"
        )
    if header.numel > most:
        raise WireError(
            f"payload of {header.nbytes} bytes claims {header.numel} elements, and {most} are allowed. If it is right, "
            f"give max_numel={header.numel}"
        )


def as_bytes(payload: npt.ArrayLike) -> Bytes:
    """Return a payload, given as bytes, memoryview or array, as an aligned flat uint8 array."""
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = np.frombuffer(payload, np.uint8)
    array = np.asarray(payload)
    if array.dtype != np.uint8:
        raise WireError(f"a payload is made of uint8, got {array.dtype}")
    array = np.ascontiguousarray(array).reshape(-1)
    return array if array.ctypes.data % 8 == 0 else array.copy()


def as_flat_floats(array: Array) -> Array:
    """Copy an array of any floating type into a flat float32 (float64 for float64) one."""
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
    _check_writeable("residual", residual)
    return residual.reshape(-1)


def _check_writeable(name: str, array: Array) -> None:
    """Refuse memory that NumPy would not write to: kernels write by address."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, and is to be written to: give a copy of it")


def _check_flat(name: str, array: Array, like: Array) -> None:
    """Refuse arrays whose end kernels would go beyond, since they address elements by their number."""
    if array.dtype not in LIKE or array.dtype != like.dtype:
        allowed = "float32 or float64" if array is like else f"{like.dtype}, as the gradient is"
        raise TypeError(f"{name} is {array.dtype}: must be {allowed}")
    if array.ndim != 1 or not array.flags.c_contiguous or array.size != like.size:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}: must be flat and contiguous, of {like.size} "
            "elements"
        )


def _check_room(payload: Bytes, needed: int) -> None:
    """Refuse memory whose end kernels would go beyond, since they trust that a payload has its capacity."""
    if payload.dtype != np.uint8:
        raise TypeError(f"payload is {payload.dtype}: must be uint8")
    if payload.ndim != 1 or not payload.flags.c_contiguous or payload.ctypes.data % 8:
        raise ValueError(
            f"payload has shape {payload.shape} and begins at address {payload.ctypes.data:#x}: must be flat and "
            "contiguous, and begin on an 8-byte boundary"
        )
    if payload.size < needed:
        raise ValueError(f"payload has {payload.size} bytes: must have {needed}; see `capacity`")
    _check_writeable("payload", payload)


def framework_of(tensor: Any) -> Any:
    """Return the framework module that `tensor` comes from; it is loaded already, or there would be no tensor."""
    return sys.modules[type(tensor).__module__.partition(".")[0]]


def count_groups(numel: int, group: int) -> int:
    """Return how many groups of `group` elements cover `numel`."""
    return -(-numel // (group or 1))


def top_count(numel: int, ratio: float) -> int:
    """Return how many of `numel` entries a ratio keeps: at least one."""
    return min(numel, max(1, math.ceil(numel * ratio)))
