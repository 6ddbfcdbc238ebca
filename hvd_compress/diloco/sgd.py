"""SGD as the outer optimizer, for edges that bring none of their own."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import Array
from hvd_compress.compressors.settings import check_flag, check_real
from hvd_compress.tensors import ParameterSpec

__all__ = ["OuterSGD"]

_MOST = 1e30


@dataclass(frozen=True)
class OuterSGD:
    """Makes SGD with momentum, which is that of torch: the first gradient is the first momentum.

    Args:
        learning_rate: greater than 0.
        momentum: from 0 on, less than 1.
        nesterov: step along the gradient and the momentum that follows, not along the momentum alone.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.diloco import OuterSGD
        >>> from hvd_compress.tensors import ParameterSpec
        >>> agreed = np.ones(2, np.float32)
        >>> sgd = OuterSGD(learning_rate=0.5, momentum=0.5)([ParameterSpec("w", (2,))], [agreed])
        >>> sgd.step([np.ones(2, np.float32)])
        >>> agreed
        array([0.25, 0.25], dtype=float32)
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_real(self, "learning_rate", self.learning_rate, above=0.0, most=_MOST)
        momentum: Any = self.momentum
        if isinstance(momentum, bool) or not isinstance(momentum, numbers.Real) or not 0 <= float(momentum) < 1:
            raise ValueError(f"OuterSGD(momentum={momentum!r}): momentum must be a number from 0 on, less than 1")
        object.__setattr__(self, "momentum", float(momentum))
        check_flag(self, "nesterov", self.nesterov)

    def __call__(self, tensors: Sequence[ParameterSpec], arrays: Sequence[Array]) -> _Sgd:
        """Make the outer optimizer of a fragment; see `hvd_compress.diloco.MakeOuter`."""
        return _Sgd(self, arrays)


class _Sgd:
    """See `Outer`."""

    def __init__(self, settings: OuterSGD, arrays: Sequence[Array]) -> None:
        self._settings = settings
        self._arrays = arrays
        self._momenta: list[Array | None] = [None] * len(arrays)

    def step(self, gradients: Sequence[Array | None]) -> None:
        settings = self._settings
        for i, (x, gradient) in enumerate(zip(self._arrays, gradients, strict=True)):
            if gradient is None:
                continue
            number = x.dtype.type
            direction = gradient
            if settings.momentum:
                momentum = self._momenta[i]
                if momentum is None:
                    momentum = self._momenta[i] = gradient.copy()
                else:
                    momentum *= number(settings.momentum)
                    momentum += gradient
                direction = gradient + number(settings.momentum) * momentum if settings.nesterov else momentum
            x -= number(settings.learning_rate) * direction

    def describe(self) -> Any:
        return ["SGD", asdict(self._settings)]

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": [None if m is None else m.copy() for m in self._momenta]}

    def check(self, state: Any) -> list[Array | None]:
        what = "of the outer optimizer in a DiLoCo state"
        given = saved.record(f"state {what}", state, ["momenta"])
        momenta = saved.sequence(f"momenta {what}", given["momenta"], len(self._arrays))
        return [
            None if m is None else saved.floats(f"momentum {what}", m, x.shape, x.dtype)
            for m, x in zip(momenta, self._arrays, strict=True)
        ]

    def load(self, checked: Any) -> None:
        self._momenta = [None if m is None else np.array(m) for m in checked]
