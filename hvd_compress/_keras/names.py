"""Names of Keras variables that a saved and loaded model has, too."""

from __future__ import annotations

__all__ = ["stable_name"]


def stable_name(path: str) -> str:
    """Layer and variable of a path, without the models around them, whose names change when a model is loaded.

    Example:
        >>> stable_name("sequential_20/first/kernel")
        'first/kernel'
    """
    return "/".join(path.split("/")[-2:])
