"""Say what an edge provides: the parameters of a rank as flat arrays, and on the server what an update is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["Array", "Values"]

Array = npt.NDArray[Any]


class Values(Protocol):
    """Gives flat arrays, float32 or float64, in the order of the tensors."""

    has_update: bool
    """Whether `update` can be called here."""

    def arrays(self) -> Sequence[Array]:
        """Return the present values, which may share memory with the parameters."""

    def take(self, arrays: Sequence[Array]) -> None:
        """Give the parameters the values that were written into what `arrays` has returned."""

    def update(self, gradients: Sequence[Array | None]) -> None:
        """Apply the gradient of one worker, on the server; None where that has none.

        The arrays hold another gradient as soon as this has returned.
        """
