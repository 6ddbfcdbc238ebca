"""Encode the gradients of a worker for the server, with what was left out of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import saved
from hvd_compress.compressors import Compressor, Key
from hvd_compress.errors import StateError
from hvd_compress.kernels.common import all_finite
from hvd_compress.tensors import ParameterSpec
from hvd_compress.wire import open_payload

__all__ = ["GradientEncoder"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class GradientEncoder:
    """Encodes gradients with error feedback; the last ones can be taken back until the next ones are encoded.

    Residuals take two arrays for each tensor whose compressor keeps one: as it is, and as it was before.

    Args:
        tensors: the same on all ranks.
        compressors: of each tensor.
        position: of this rank, which keys randomness.
    """

    def __init__(self, tensors: Sequence[ParameterSpec], compressors: Sequence[Compressor], position: int) -> None:
        self._tensors = tensors
        self._compressors = compressors
        self._position = position
        self._residuals = [
            np.zeros(t.numel, t.dtype) if c.feedback else None for t, c in zip(tensors, compressors, strict=True)
        ]
        self._before = [None if r is None else np.zeros_like(r) for r in self._residuals]
        self.steps = 0
        """The number of gradients encoded so far, which keys randomness."""
        self._payloads: dict[int, Bytes] = {}
        """The payloads of the last gradients, in the caller's buffer."""

    def encode(self, gradients: Sequence[Array | None], buffer: Bytes) -> int | None:
        """Write the payloads of all tensors into the start of `buffer`.

        Args:
            gradients: flat, not changed; None where there is none, whose residual stays as it is.
            buffer: with room for the longest payloads; must not change while the gradients may be taken back.

        Returns:
            The number of bytes used; None if a value is not finite, and then residuals are as before.
        """
        self.steps += 1
        # a tensor that is not sent is not taken back
        self._payloads = {}
        at = 0
        for i, gradient in enumerate(gradients):
            used = self._encode_one(i, gradient, buffer[at:])
            if gradient is not None:
                self._payloads[i] = buffer[at : at + (used or 0)]
            if used is None:
                self.take_back()
                return None
            at += used
        return at

    def _encode_one(self, i: int, gradient: Array | None, buffer: Bytes) -> int | None:
        tensor, compressor = self._tensors[i], self._compressors[i]
        group = compressor.group_numel(tensor.shape)
        if gradient is None:
            return compressor.say_absent(buffer, tensor.numel, group)
        residual, before = self._residuals[i], self._before[i]
        if residual is not None and before is not None:
            before[...] = residual
        key = Key(compressor.seed, tensor.name, self.steps, self._position)
        used = compressor.encode_into(gradient, residual, buffer, group, key)
        # no compression and casts to float16 do not report values that are not finite
        is_finite = all_finite(gradient) if compressor.reducible else not open_payload(buffer[:used])[0].nonfinite
        return used if is_finite else None

    def take_back(self) -> None:
        """Make residuals what they were before the last gradients, which count for nothing."""
        for i in self._payloads:
            self._residuals[i], self._before[i] = self._before[i], self._residuals[i]
        self._payloads = {}

    def owe(self) -> None:
        """Add the last gradients, which were not applied, to the next ones where there is error feedback."""
        for i, payload in self._payloads.items():
            residual = self._residuals[i]
            if residual is not None:
                self._compressors[i].decode_into(payload, residual, add=True)
        self._payloads = {}

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return residuals by the names of the tensors, as `feedback` describes them."""
        return {
            t.name: {"shape": list(t.shape), "values": r.copy()}
            for t, r in zip(self._tensors, self._residuals, strict=True)
            if r is not None
        }

    def load_state_dict(self, residuals: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, as `feedback.check_state` returns it.

        Raises:
            StateError: of other tensors or shapes, or a value is too large for the type here.
        """
        mine = {t.name: (t, r) for t, r in zip(self._tensors, self._residuals, strict=True) if r is not None}
        if different := sorted(mine.keys() ^ residuals.keys()):
            raise StateError(
                f"the state has residuals of {sorted(residuals)}, and here {sorted(mine)} keep one: {different[0]!r} "
                "differs. Load it with the parameters and the compression that it was saved with"
            )
        fitted = {}
        for name, (tensor, residual) in mine.items():
            shape = tuple(residuals[name]["shape"])
            if shape != tensor.shape:
                raise StateError(
                    f"residual of {name!r} has shape {shape}: it must have the parameter's, {tensor.shape}"
                )
            fitted[name] = saved.floats(
                f"residual of {name!r}", residuals[name]["values"], residual.shape, residual.dtype
            )
        for name, (_, residual) in mine.items():
            residual[...] = fitted[name]
        self._payloads = {}
