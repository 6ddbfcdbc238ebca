"""Tell kernels where residuals lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvd_compress.exchange.account import GRADIENTS, INSIDE, SUMS, Account
from hvd_compress.exchange.narrow_account import ROOM, NarrowAccount

__all__ = ["Addresses"]


class Addresses:
    """Tells where the residuals of tensors lie; looks again only where there is another array than in the last step.

    Args:
        accounts: of the tensors.
        hop: `GRADIENTS` for what ranks owe as senders, `SUMS` as owners, `INSIDE` to other ranks of their host.
    """

    def __init__(self, accounts: Sequence[Account], hop: int) -> None:
        self._accounts = accounts
        self._of_owners, self._is_inside = hop == SUMS, hop == INSIDE
        self._keeps = [_keeps(account, hop) for account in accounts]
        self._resting = {i for i, a in enumerate(accounts) if a.rests and self._keeps[i] and not self._is_inside}
        """Those whose residuals are floats only while payloads are made."""
        self._open: dict[int, Any] = {}
        """Those of them that are so now."""
        self._arrays: list[Any] = [None] * len(accounts)
        self._kinds = [""] * len(accounts)
        self._at = np.zeros(len(accounts), np.int64)

    def of(self, numbers: Iterable[int], kind: str) -> npt.NDArray[np.int64]:
        """Return an array of addresses, right for those of these tensors that keep a residual; makes new ones.

        Call `rest` when kernels have renewed the residuals.
        """
        if self._resting:
            numbers = self._opened(numbers, kind)
        for i in numbers:
            if not self._keeps[i]:
                continue
            account = self._accounts[i]
            if self._is_inside:
                array = account.pending
            else:
                array = account.owner_residual if self._of_owners else account.residual
            if array is None or array is not self._arrays[i] or kind != self._kinds[i]:
                fitted = self._fitted(account, kind)
                self._arrays[i], self._kinds[i] = fitted, kind
                self._at[i] = account.memory.address(fitted)
        return self._at

    def _fitted(self, account: Account, kind: str) -> Any:
        if self._is_inside:
            return account.fit_pending(kind)
        return account.fit_owner_residual(kind) if self._of_owners else account.fit_residual(kind)

    def _opened(self, numbers: Iterable[int], kind: str) -> list[int]:
        """Make floats of the residuals that rest; returns the numbers of the others."""
        numbers = list(numbers)
        resting = [i for i in numbers if i in self._resting]
        accounts = [self._narrow(i) for i in resting]
        rooms = ROOM.cut([account.numel_of(self._of_owners) for account in accounts], np.dtype(kind))
        for i, account, room in zip(resting, accounts, rooms, strict=True):
            account.open(self._of_owners, room)
            self._open[i], self._at[i] = room, account.memory.address(room)
        return [i for i in numbers if i not in self._resting]

    def rest(self) -> None:
        """Round the residuals that were made floats."""
        while self._open:
            i, room = self._open.popitem()
            self._narrow(i).rest(self._of_owners, room)
        ROOM.rest()

    def go_back(self, numbers: Iterable[int]) -> None:
        """Make these tensors owe what they owed before this step, where `rest` has rounded since."""
        for i in self._resting.intersection(numbers):
            self._narrow(i).go_back(self._of_owners)

    def end_step(self) -> None:
        """Forget what was owed before this step."""
        for i in self._resting:
            self._narrow(i).end_step(self._of_owners)

    def _narrow(self, number: int) -> NarrowAccount:
        return cast(NarrowAccount, self._accounts[number])


def _keeps(account: Account, hop: int) -> bool:
    return {
        GRADIENTS: account.keeps_residual, SUMS: account.owner_keeps_residual, INSIDE: account.keeps_pending
    }[hop]  # fmt: skip
