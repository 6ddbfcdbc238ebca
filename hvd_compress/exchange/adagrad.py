"""AdaGrad within an exchange: the rank that owns the sum of an element divides it before it encodes it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors import Compressor
from hvd_compress.compressors.settings import check_real
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange.kinds import Exchange
from hvd_compress.kernels import adagrad as kernels
from hvd_compress.memory import aligned_empty

__all__ = ["Accumulator", "AdaGrad", "exchange_with"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class AdaGrad:
    """Turns combined gradients into AdaGrad's updates, g / (sqrt(sum of g² so far) + epsilon), within the exchange.

    The owner of a chunk, which is the rank that sums it, applies AdaGrad to the combined gradient before it compresses
    this again. So the second hop compresses values of similar magnitude, and the work is divided among the ranks.
    AdaGrad applies to every element of the model, compressed or not: wrap plain SGD, whose learning rate becomes
    AdaGrad's. An owner's residual counts in updates. Source: Seide et al. 2014; Dryden et al. 2016, section 3.1. These
    papers do so with one-bit quantization only; here it works with all compressors but `SignSGD` and `PowerSGD`.

    Args:
        epsilon: added to the root.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import AdaGrad, TopK
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(2, TopK(ratio=1.0), adagrad=AdaGrad())
        >>> gradients = [np.array([3e-4, -50.0], np.float32)] * 2
        >>> first, second = (ranks.allreduce(gradients)[0] for _ in range(2))
        >>> second.round(3)
        array([ 0.707, -0.707], dtype=float32)
    """

    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        # below, float32 has 0: an element without a gradient so far would be 0 / 0
        check_real(self, "epsilon", self.epsilon, above=1e-37, most=1.0)

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return {"id": "adagrad", **asdict(self)}


class Accumulator:
    """Holds the squares of some elements' gradients so far, and what they become if the step under way is kept.

    Args:
        adagrad: settings.
        scale: factor that makes what `precondition` is given the gradient, such as 1 / ranks for a sum.
    """

    def __init__(self, adagrad: AdaGrad, scale: float) -> None:
        self.adagrad = adagrad
        self.values: Array | None = None
        """Sums of squares, whatever the loss scale; None before the first step."""
        self.loss_scale = 1.0
        """What gradients come multiplied by, and updates are to be, since the user divides both by it."""
        self._scale = scale
        self._after: Array = np.empty(0, np.float32)
        self._is_ahead = False

    def precondition(self, x: Array) -> bool:
        """Turn flat gradients (float32 or float64) into updates, in place; returns whether they are finite.

        Updates do not have the loss scale yet. Nothing is final before `settle`.
        """
        if self.values is None:
            self.values = aligned_empty(x.size, x.dtype)
            self.values[...] = 0
        # the model was converted to another type since
        self.values = self.values.astype(x.dtype, copy=False)
        if self._after.size != x.size or self._after.dtype != x.dtype:
            self._after = aligned_empty(x.size, x.dtype)
        self._is_ahead = True
        factor, epsilon = x.dtype.type(self._scale / self.loss_scale), x.dtype.type(self.adagrad.epsilon)
        return bool(kernels.precondition(x, self.values, factor, epsilon, self._after))

    def settle(self, keep: bool) -> None:
        """End the step: keep its squares, or make the accumulator what it was before."""
        if keep and self._is_ahead and self.values is not None:
            self.values, self._after = self._after, self.values
        self._is_ahead = False


def exchange_with(adagrad: AdaGrad | None, exchange: Exchange, compressors: Sequence[Compressor] = ()) -> Exchange:
    """Return the exchange for these compressors to use with `adagrad`: "auto" becomes "two_phase".

    Raises:
        TypeError: `adagrad` is something else.
        UnsupportedError: an exchange without owners, `PowerSGD` or `SignSGD`.
    """
    if adagrad is None:
        return exchange
    if not isinstance(adagrad, AdaGrad):
        raise TypeError(f"adagrad={adagrad!r}: give an AdaGrad, such as AdaGrad(), or None")
    for compressor in compressors:
        if compressor.sums_factors:
            raise UnsupportedError(
                f"{adagrad!r} with {compressor!r}: it divides sums of gradients where ranks own them, and here ranks "
                "sum factors, of which nobody knows a gradient before all do. Use torch's or Keras' Adagrad on the "
                "result"
            )
        if compressor.votes:
            raise UnsupportedError(
                f"{adagrad!r} with {compressor!r}: an update that is a vote has no size that AdaGrad could give it. "
                "Use EFSignSGD() or OneBit(), which keep magnitudes"
            )
    if not exchange.has_owners:
        raise UnsupportedError(
            f"{adagrad!r} with exchange={exchange.id!r}: it is applied by the owner of a sum, and there is none; use "
            "exchange='two_phase', 'hierarchical' or 'parameter_server'"
        )
    return exchange.with_owners()
