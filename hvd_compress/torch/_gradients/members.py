"""The parameters of an optimizer that take gradients: their names, their hooks, and whether they have changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from typing import Any

import torch

from hvd_compress.torch._horovod import formed_groups

__all__ = ["Members"]


class Members:
    """The parameters that take gradients, as they were when `take` was last called.

    Args:
        names: of the parameters that were named when the optimizer was wrapped.
        on_gradient: called with a parameter's name and the parameter when a backward pass has computed its gradient;
            parameters keep it alive.
        grouped: parameters whose gradients go together, as Horovod takes `groups`.
    """

    def __init__(
        self, names: dict[torch.Tensor, str], on_gradient: Callable[[str, torch.Tensor], None], grouped: Any = None
    ) -> None:
        self.names = names
        self.by_name: dict[str, torch.Tensor] = {}
        """Those that take gradients, in their order."""
        self.resting: dict[str, torch.Tensor] = {}
        """Those that took gradients once, or may, and do not now."""
        self.groups: list[tuple[str, ...]] | None = None
        """The names of those that go together; None where each goes by itself."""
        self.group_of: dict[str, tuple[str, ...]] = {}
        self._grouped = grouped
        self._list: list[torch.Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._group_count = 0
        self._on_gradient = on_gradient
        self._hooks: dict[torch.Tensor, Any] = {}

    def have_changed(self, groups: Iterable[dict[str, Any]]) -> bool:
        """Whether parameters were frozen, unfrozen, added or converted since; called in every step."""
        now = [p for group in groups for p in group["params"] if p.requires_grad]
        if len(now) != len(self._list) or not all(map(is_, now, self._list)):
            return True
        return [p.dtype for p in now] != self._dtypes

    def is_of(self, name: str, p: torch.Tensor, groups: list[dict[str, Any]]) -> bool:
        """Whether a parameter is in `groups`, of which the user may have removed some since."""
        if name in self.by_name and len(groups) == self._group_count:
            return True
        return any(p is other for group in groups for other in group["params"])

    def take(self, groups: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Take over which parameters of `groups` take gradients, name those that have none, and set their hooks.

        Returns:
            Those that had no hook yet, by name.
        """
        hooked = set(self._hooks)
        known = dict(self.by_name)
        self._group_count = len(groups)
        self.by_name, self.resting = {}, dict(self.resting)
        for i, group in enumerate(groups):
            for j, p in enumerate(group["params"]):
                name = self.names.get(p)
                if name is None:
                    name = self.names[p] = self._free_name(i, j)
                if p.requires_grad:
                    self.by_name[name] = p
                    self._hook(name, p)
                else:
                    self.resting[name] = p
        self.resting = {n: p for n, p in {**self.resting, **known}.items() if n not in self.by_name}
        self._list = list(self.by_name.values())
        self._dtypes = [p.dtype for p in self._list]
        if self._grouped is not None:
            self.groups = [tuple(self.names[p] for p in group) for group in formed_groups(self._list, self._grouped)]
            self.group_of = {name: group for group in self.groups for name in group}
        return {name: p for name, p in self.by_name.items() if p not in hooked}

    def release(self) -> None:
        """Remove all hooks: this optimizer takes no more gradients."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}

    def _free_name(self, group: int, position: int) -> str:
        # as Horovod names parameters that were given without names (optimizer.py l. 44)
        name = f"allreduce.noname.{group}.{position}"
        taken = set(self.names.values())
        return name if name not in taken else f"{name}.added.{len(taken)}"

    def _hook(self, name: str, p: torch.Tensor) -> None:
        if p in self._hooks:
            return
        # Horovod hooks the node that accumulates (l. 171-174), for which torch had no public call then
        self._hooks[p] = p.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
        # parameters may outlive their optimizer, and be given to another one
        weakref.finalize(self, self._hooks[p].remove).atexit = False
