"""Keep what the receivers of a rank hold of it, and what it holds of its senders; turn tensors into payloads.

Of each tensor, the receivers hold a copy of what was sent. A tensor that is sent whole replaces the copy. A compressed
one is the encoded difference to it, which sender and receivers add to equal copies; so what a payload leaves out is
part of the next difference, and nothing is lost. Source: Koloskova et al., CHOCO-SGD (ICML 2019), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import saved, wire
from hvd_compress.compressors import Compressor, Key, NoCompression
from hvd_compress.compressors.base import NOT_FINITE_WITHOUT_A_WORD
from hvd_compress.errors import StateError, WireError
from hvd_compress.kernels import gossip as kernels
from hvd_compress.kernels.common import all_finite, norm
from hvd_compress.tensors import ParameterSpec

__all__ = ["Copies", "smaller"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_RAW = NoCompression()
_NO_KEY = Key()


class Copies:
    """Keeps copies of flat tensors; arrays are in the order of `tensors`.

    Args:
        tensors: the same on all ranks.
        compressors: of each tensor; where a payload would not be smaller, the tensor goes whole.
        senders: how many ranks send to this one.
        position: of this rank, which keys randomness.
        keeps_own: whether to keep what was sent of tensors that go whole, too.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        compressors: Sequence[Compressor] | None,
        senders: int,
        position: int,
        keeps_own: bool,
    ) -> None:
        self._tensors = tensors
        self._position = position
        given = [_RAW] * len(tensors) if compressors is None else compressors
        self.compressors = [smaller(c, t) for c, t in zip(given, tensors, strict=True)]
        # an encoder that overshoots on average would be amplified from difference to difference
        self._scales = [c.contraction(t.numel) for c, t in zip(self.compressors, tensors, strict=True)]
        self.own = [
            np.zeros(t.numel, t.dtype) if keeps_own or c is not _RAW else None
            for c, t in zip(self.compressors, tensors, strict=True)
        ]
        """What the receivers hold of this rank; None of tensors that go whole and of which nobody asks."""
        self.of_senders = [np.zeros((senders, t.numel), t.dtype) for t in tensors]
        self.needs_whole = np.ones(len(tensors), np.bool_)
        """Of which receivers hold nothing that a difference could be added to."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that the payloads of all tensors can take."""
        return sum(
            max(t.raw_bytes, 0 if c is _RAW else c.capacity(t.numel, c.group_numel(t.shape)))
            for c, t in zip(self.compressors, self._tensors, strict=True)
        )

    def start_from(self, arrays: Sequence[Array | None]) -> None:
        """Take this rank's own values for all copies."""
        for of_senders, own, x in zip(self.of_senders, self.own, arrays, strict=True):
            if x is None:
                continue
            of_senders[...] = x
            if own is not None:
                own[...] = x

    def distances(self, arrays: Sequence[Array | None]) -> npt.NDArray[np.float64]:
        """Compute for each tensor the Euclidean norm of its difference to the receivers' copy; 0 if it is left out."""
        pairs = zip(arrays, self.own, strict=True)
        return np.array([0.0 if x is None else kernels.distance(x, own) for x, own in pairs], np.float64)

    # -- payloads ----------------------------------------------------------------------------------------------------

    def encode(self, i: int, x: Array, number: int, buffer: Bytes) -> int:
        """Write tensor `i` into the start of `buffer`, for all receivers, and return the number of bytes used."""
        compressor, own, tensor = self.compressors[i], self.own[i], self._tensors[i]
        if own is not None and compressor is not _RAW and not self.needs_whole[i]:
            key = Key(compressor.seed, tensor.name, number, self._position)
            used = compressor.encode_into(x - own, None, buffer, compressor.group_numel(tensor.shape), key)
            finite = compressor.decode_into(buffer[:used], own, self._scales[i], add=True)
            # the difference of two finite numbers can be infinite, and half precision overflows without telling
            if finite and (not compressor.can_overflow or np.isfinite(norm(own))):
                return used
        if own is not None:
            own[...] = x
        return _RAW.encode_into(x, None, buffer, 1, _NO_KEY)

    def encode_whole(self, i: int, x: Array, buffer: Bytes) -> int:
        """Write what the other receivers hold of tensor `i`, whose present value is `x`, into the start of `buffer`."""
        own = self.own[i]
        return _RAW.encode_into(x if own is None else own, None, buffer, 1, _NO_KEY)

    def open(self, i: int, payload: Bytes) -> tuple[wire.Header, wire.Sections]:
        """Check a payload of tensor `i`.

        Raises:
            WireError: a damaged payload.
        """
        try:
            return wire.open_payload(payload)
        except WireError as error:
            raise WireError(f"{self._tensors[i].name!r}: {error}") from error

    def decode(self, i: int, sender: int, header: wire.Header, body: wire.Sections) -> None:
        """Take over a payload of tensor `i` that `open` has opened.

        Raises:
            WireError: a payload of another compressor or size, or one that is not finite and does not say so.
        """
        copy = self.of_senders[i][sender]
        try:
            if header.codec == _RAW.codec:
                # brings values as they are, and replaces what was here
                _RAW.decode_opened(header, body, copy)
                return
            says_finite = self.compressors[i].decode_opened(header, body, copy, self._scales[i], add=True)
            # the sender's own copy is finite then, and later differences to it would never mend one that is not
            if says_finite and not all_finite(copy):
                raise WireError(NOT_FINITE_WITHOUT_A_WORD)
        except WireError as error:
            raise WireError(f"{self._tensors[i].name!r}: {error}") from error

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all copies by the names of the tensors."""
        names = [t.name for t in self._tensors]
        return {
            "needs_whole": self.needs_whole.copy(),
            "copies": {n: c.copy() for n, c in zip(names, self.of_senders, strict=True)},
            "own": {n: o.copy() for n, o in zip(names, self.own, strict=True) if o is not None},
        }

    def check(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Check a state with copies of these tensors and return what `load` takes over of it.

        Raises:
            StateError: it is another one, or damaged.
        """
        given = {kind: saved.record(f"{kind} of an event state", state[kind]) for kind in ("copies", "own")}
        for kind, i, _ in self._targets():
            if self._tensors[i].name not in given[kind]:
                raise StateError(f"event state is damaged: {kind} lack {self._tensors[i].name!r}")
        needs_whole = saved.flags("needs_whole of an event state", state["needs_whole"], self.needs_whole.shape)
        values = []
        for kind, i, target in self._targets():
            name = self._tensors[i].name
            # what this rank had of its own may have been anything when its receivers are to get it whole anyway
            finite = kind == "copies" or not needs_whole[i]
            what = f"event state: {kind} of {name!r}"
            values.append(saved.floats(what, given[kind][name], target.shape, target.dtype, finite=finite))
        return {"values": values, "needs_whole": needs_whole}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        for (_, _, target), values in zip(self._targets(), checked["values"], strict=True):
            target[...] = values
        self.needs_whole = checked["needs_whole"]

    def _targets(self) -> Iterator[tuple[str, int, Array]]:
        """List what is saved: its kind, the index of its tensor, and where it lies."""
        for i, (of_senders, own) in enumerate(zip(self.of_senders, self.own, strict=True)):
            yield "copies", i, of_senders
            if own is not None:
                yield "own", i, own


def smaller(compressor: Compressor, tensor: ParameterSpec) -> Compressor:
    """Return the compressor, or `NoCompression` where its payload can be as long as the tensor itself."""
    most = compressor.capacity(tensor.numel, compressor.group_numel(tensor.shape))
    return compressor if most < tensor.raw_bytes else _RAW
