"""Keep the books of one rank that exchanges nothing: what a loaded state owes goes with the next gradients."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_compress.engine.ledger import Ledger
from hvd_compress.engine.routing import Routing, Tensor
from hvd_compress.exchange import AdaGrad, Bucket

__all__ = ["LedgerAlone"]


class LedgerAlone(Ledger[Bucket]):
    """Holds what one rank owes, as the last rank of an elastic run does; the edge adds what is `due` to gradients.

    Args:
        tensors: that take gradients.
        adagrad: see `Ledger`. What owners owe then counts in updates, and waits for owners: for more ranks.
        resting: see `Ledger`.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.engine import LedgerAlone, Tensor
        >>> ledger = LedgerAlone([Tensor("w", (2,))])
        >>> owed = {"w": {"shape": [2], "values": np.array([1.0, 2.0], np.float32)}}
        >>> state = {"format": 1, "size": 1, "rank": 0, "steps": 3, "residuals": owed, "owner_residuals": {}}
        >>> ledger.load_state_dict(state)
        >>> ledger.due("w")
        array([1., 2.], dtype=float32)
        >>> ledger.settle(keep=True)  # the gradient that it was added to was finite
        >>> ledger.debts
        {}
    """

    def __init__(
        self, tensors: Iterable[Tensor], adagrad: AdaGrad | None = None, resting: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(Routing(None), 1, 0, tensors, Bucket, pays_debts=True, adagrad=adagrad, resting=resting)
