"""Tell kernels where residuals lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hvd_compress.exchange.account import Account

__all__ = ["Addresses"]


class Addresses:
    """Tells where the residuals of tensors lie; looks again only where there is another array than in the last step.

    Args:
        accounts: of the tensors.
        of_owners: look at what ranks owe as owners of sums, and not as senders.
    """

    def __init__(self, accounts: Sequence[Account], of_owners: bool) -> None:
        self._accounts = accounts
        self._of_owners = of_owners
        self._keeps = [a.owner_keeps_residual if of_owners else a.keeps_residual for a in accounts]
        self._arrays: list[Any] = [None] * len(accounts)
        self._kinds = [""] * len(accounts)
        self._at = np.zeros(len(accounts), np.int64)

    def of(self, numbers: Iterable[int], kind: str) -> npt.NDArray[np.int64]:
        """Return an array of addresses, right for those of these tensors that keep a residual; makes new ones."""
        for i in numbers:
            if not self._keeps[i]:
                continue
            account = self._accounts[i]
            array = account.owner_residual if self._of_owners else account.residual
            if array is None or array is not self._arrays[i] or kind != self._kinds[i]:
                fitted = account.fit_owner_residual(kind) if self._of_owners else account.fit_residual(kind)
                self._arrays[i], self._kinds[i] = fitted, kind
                self._at[i] = account.memory.address(fitted)
        return self._at
