"""Whether a compressor, of this package or of your own, does what every compressor has to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors import Compressor, Key, check_registered, decode, from_config
from hvd_compress.errors import ContractError, WireError
from hvd_compress.loopback import Loopback

__all__ = ["check_compressor"]

Array = npt.NDArray[Any]

_KEY = Key(seed=1, name="layer.weight", step=3, rank=2)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 5), (1,), (7,), (8,), (1009,), (13, 1031), (6, 5, 3, 3))
_CONTENTS: dict[str, Callable[[int], Array]] = {
    "normal deviates": lambda n: np.random.default_rng(n).standard_normal(n),
    "zeros": np.zeros,
    "equal values": lambda n: np.full(n, 0.75),
    "negative values": lambda n: -np.abs(np.random.default_rng(n).standard_normal(n)) - 0.125,
    "denormals": lambda n: 1e-40 * np.random.default_rng(n).integers(-9, 10, n),
}
_GUARD = 64
_MARK = 0x5A


def check_compressor(compressor: Compressor) -> None:
    """Test that a compressor does what every exchange relies on; this takes some seconds.

    Checked are: round trips of shapes from empty to four dimensions in float32 and float64, sizes, writing beyond the
    given memory, gradients that are only read, equal bytes for equal keys, the residual (what is sent and what is left
    add up to what came in), values that are not finite, scaling and adding, damaged payloads, the configuration, and an
    exchange of three ranks.

    Args:
        compressor: of a registered class.

    Raises:
        ContractError: an AssertionError that says what is wrong with which input.
        TypeError: a class that is not registered.

    Example:
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.testing import check_compressor
        >>> check_compressor(OneBit())
    """
    check_registered(compressor)
    contract = _Contract(compressor)
    contract.check_configuration()
    for said, x in _arrays():
        # first, since it gives memory with a border: what is written beyond it could end the process elsewhere
        contract.check_memory(said, x)
        contract.check_round_trip(said, x)
        contract.check_scale(said, x)
        contract.check_damage(said, x)
        if compressor.feedback:
            contract.check_residual(said, x)
        if x.size:
            contract.check_not_finite(said, x)
    contract.check_exchanges()


def _arrays() -> Iterator[tuple[str, Array]]:
    for content, make in _CONTENTS.items():
        for shape in _SHAPES:
            for dtype in (np.float32, np.float64):
                x = make(int(np.prod(shape, dtype=np.int64))).astype(dtype).reshape(shape)
                yield f"{content} of shape {shape}, {x.dtype}", x


def _residual_like(x: Array) -> Array:
    scale = float(np.abs(x).max(initial=0)) / 16
    return (scale * np.random.default_rng(5).uniform(-1, 1, x.size)).astype(x.dtype)


class _Contract:
    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def _fail(self, text: str, said: str = "") -> ContractError:
        given = f", given {said}" if said else ""
        return ContractError(f"{self._compressor!r}{given}: {text}")

    def _encode(self, said: str, x: Array, residual: Array | None = None) -> npt.NDArray[np.uint8]:
        try:
            return self._compressor.encode(x, residual, _KEY)
        except ContractError as error:
            raise self._fail(str(error), said) from error

    def _decode(self, said: str, payload: npt.NDArray[np.uint8]) -> Array:
        try:
            return self._compressor.decode(payload)
        except (ContractError, WireError) as error:
            raise self._fail(f"what was encoded cannot be decoded: {error}", said) from error

    def check_configuration(self) -> None:
        compressor = self._compressor
        try:
            again = from_config(json.loads(json.dumps(compressor.get_config())))
        except (TypeError, ValueError) as error:
            raise self._fail(f"its configuration does not survive JSON and from_config: {error}") from error
        if again != compressor or hash(again) != hash(compressor):
            raise self._fail(f"from_config makes {again!r} of its configuration {compressor.get_config()}")
        try:
            for field in dataclasses.fields(compressor):  # type: ignore[arg-type]
                setattr(compressor, field.name, getattr(compressor, field.name))
                raise self._fail(f"its setting {field.name} can be changed; make the class a frozen dataclass")
        except dataclasses.FrozenInstanceError:
            pass

    def check_round_trip(self, said: str, x: Array) -> None:
        before = x.copy()
        payload = self._encode(said, x)
        if x.tobytes() != before.tobytes():
            raise self._fail("encode changed the gradient", said)
        group = self._compressor.group_of(x.shape)
        if payload.size > (most := self._compressor.capacity(x.size, group, x.shape)):
            raise self._fail(f"the payload has {payload.size} bytes; body_bytes allows for {most}", said)
        y = self._decode(said, payload)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise self._fail(f"it is decoded to {y.dtype} of shape {y.shape}", said)
        if not np.isfinite(y).all() and not self._compressor.can_overflow:
            raise self._fail("finite values were decoded to values that are not finite", said)
        if decode(payload).tobytes() != y.tobytes():
            raise self._fail(
                "hvd_compress.decode decodes another array, since it does not know the settings; decode_body must take "
                "all from header and body",
                said,
            )

    def check_memory(self, said: str, x: Array) -> None:
        """In memory of two contents, with a border."""
        compressor, flat = self._compressor, x.reshape(-1)
        group = compressor.group_of(x.shape)
        capacity = compressor.capacity(x.size, group)
        payloads = []
        for content in (_MARK, 255 - _MARK):
            memory = np.full(capacity + _GUARD, content, np.uint8)
            source, residual = flat.copy(), np.zeros_like(flat) if compressor.feedback else None
            try:
                used = compressor.encode_into(source, residual, memory[:capacity], group, _KEY)
            except ContractError as error:
                raise self._fail(str(error), said) from error
            if (memory[capacity:] != content).any():
                raise self._fail("encode_body writes beyond the body that it was given", said)
            if source.tobytes() != flat.tobytes():
                raise self._fail("encode_body changes the gradient; with error feedback, write into x only", said)
            payloads.append(memory[:used].tobytes())
        if payloads[0] != payloads[1]:
            raise self._fail(
                "equal arguments give different bytes: draw random numbers from key.words() alone, and lay sections "
                "with Sections.blank, or write all of those from Sections.take",
                said,
            )

    def check_scale(self, said: str, x: Array) -> None:
        payload = self._encode(said, x)
        y = self._decode(said, payload).reshape(-1)
        out = np.full_like(y, 3.0)
        self._compressor.decode_into(payload, out, scale=0.5, add=True)
        allowed = 4 * np.finfo(np.float32).eps * (3.0 + np.abs(y))
        if (wrong := np.flatnonzero(np.abs(out - (3.0 + 0.5 * y)) > allowed)).size:
            raise self._fail(
                f"decoding with scale=0.5 and add=True onto 3.0 gives {out[wrong[0]]} for a value of {y[wrong[0]]}",
                said,
            )

    def check_residual(self, said: str, x: Array) -> None:
        """What is decoded and what is left make up what came in, to rounding."""
        residual = _residual_like(x)
        before = residual.copy()
        y = self._decode(said, self._encode(said, x, residual)).reshape(-1).astype(np.float64)
        came = x.reshape(-1).astype(np.float64) + before
        size = np.abs(x.reshape(-1)) + np.abs(before) + np.abs(y)
        allowed = 4 * float(np.finfo(x.dtype).eps) * size + 1e-44
        wrong = np.flatnonzero(~(np.abs(y + residual - came) <= allowed))
        if wrong.size:
            i = wrong[0]
            raise self._fail(
                f"element {i} came in as {came[i]:.9g} with its residual, was decoded as {y[i]:.9g}, and left "
                f"{residual[i]:.9g}: it must leave {came[i] - y[i]:.9g}. With error feedback encode_body writes into x "
                "what the payload leaves out",
                said,
            )

    def check_not_finite(self, said: str, x: Array) -> None:
        for value in (np.nan, np.inf, -np.inf):
            bad = x.copy()
            bad.reshape(-1)[2 * x.size // 3] = value
            residual = _residual_like(x) if self._compressor.feedback else None
            before = None if residual is None else residual.copy()
            y = self._decode(said, self._encode(said, bad, residual))
            if np.isfinite(y).all():
                raise self._fail(f"a value of {value} was hidden; encode_body must return NOT_FINITE", said)
            if residual is None or before is None:
                continue
            # what is restored by arithmetic is off by the rounding of the largest value that took part
            size = np.abs(x.reshape(-1)) + np.abs(before)
            share = 2.0 ** (-21 if x.dtype == np.float32 else -50)
            if not (np.abs(residual - before) <= share * (size + np.abs(x).max())).all():
                raise self._fail(f"a value of {value} changed the residual, which must be what it was before", said)

    def check_damage(self, said: str, x: Array) -> None:
        """Bodies that are cut, longer, or of other bits, under a checksum that is right, as of a peer with a fault."""
        payload = self._encode(said, x)
        header, _ = wire.open_payload(payload)
        body = payload[header.body_at :]
        rng = np.random.default_rng(x.size)
        damaged = [body[: body.size // 16 * 8], np.concatenate([body, np.zeros(8, np.uint8)])]
        damaged += [rng.integers(0, 256, body.size).astype(np.uint8) for _ in range(2)]
        for i, given in enumerate(damaged):
            forged = np.concatenate([payload[: header.body_at], given])
            wire.seal(
                forged, codec=header.codec, shape=header.shape, group=header.group, parameter=header.parameter,
                entries=header.entries, float64=header.float64, nonfinite=False,
            )  # fmt: skip
            memory = np.full(x.size + _GUARD, 7.0, x.dtype)
            try:
                self._compressor.decode_into(forged, memory[: x.size])
            except WireError:
                continue
            finally:
                if (memory[x.size :] != 7.0).any():
                    raise self._fail("decode_body writes beyond out when the body is damaged", said)
            if x.size and given.size != body.size:
                how = "cut" if i == 0 else "longer"
                raise self._fail(f"a body that was {how} was decoded; take sections from body with their sizes", said)

    def check_exchanges(self) -> None:
        """Three ranks in this process: all decode the same, which is about the mean in the long run."""
        arrays = [np.random.default_rng(rank).standard_normal((37, 101)).astype(np.float32) for rank in range(3)]
        for exchange in ("two_phase",) if self._compressor.votes else ("two_phase", "allgather"):
            ranks = Loopback(3, self._compressor, exchange)
            for _ in range(2):
                results = ranks.allreduce(arrays)
                if len({result.tobytes() for result in results}) > 1:
                    raise self._fail(f"three ranks decoded different arrays in the exchange {exchange!r}")
