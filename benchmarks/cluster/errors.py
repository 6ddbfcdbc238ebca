"""Errors of the virtual cluster."""

from __future__ import annotations

__all__ = ["ClusterError", "RunError", "UnavailableError"]


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked; the message says what stands in the way."""


class UnavailableError(ClusterError):
    """This machine or this user cannot have a virtual cluster at all."""


class RunError(ClusterError):
    """A rank failed, or the time limit came first; the message holds what the ranks wrote last."""
