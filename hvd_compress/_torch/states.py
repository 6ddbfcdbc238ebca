"""Saved states with torch tensors, which `torch.load` takes without trust."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["with_tensors"]


def with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """A state of a ledger with its NumPy arrays as torch tensors, in place."""
    for kind in ("residuals", "owner_residuals", "accumulators", "factors"):
        for entry in state.get(kind, {}).values():
            entry["values"] = torch.from_numpy(entry["values"])
    return state
