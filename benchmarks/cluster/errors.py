"""Errors of the virtual cluster."""

from __future__ import annotations

__all__ = ["ClusterError", "RunError", "UnavailableError"]


class ClusterError(RuntimeError):
    """Raised when the cluster cannot do what was asked; the message says what stands in the way."""


class UnavailableError(ClusterError):
    """Raised when this machine or this user cannot have a virtual cluster at all."""


class RunError(ClusterError):
    """Raised when a rank failed, or the time limit came first; the message holds what the ranks wrote last."""
