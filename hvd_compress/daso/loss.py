"""Turn the loss of an epoch, whatever users have it as, into a number."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["number_of"]


def number_of(loss: Any) -> float | None:
    """Turn a loss into a float; None stays None.

    Args:
        loss: a number, or an array or a tensor of one element.

    Raises:
        TypeError: no number, or several.
    """
    if loss is None:
        return None
    # NumPy warns of a torch tensor that autograd tracks, and knows no bfloat16
    array = np.asarray(loss.detach().cpu().tolist() if hasattr(loss, "detach") else loss)
    if array.size == 1 and not np.iscomplexobj(array):
        try:
            return float(array.reshape(())[()])
        except (TypeError, ValueError):
            pass
    raise TypeError(
        f"epoch_end(loss={type(loss).__name__} of shape {array.shape} and dtype {array.dtype}): give one real number, "
        "such as the mean loss of the epoch, or None"
    )
