"""Errors of hvd_compress; each also derives from the builtin that a caller would expect.

Example:
    >>> import numpy as np
    >>> from hvd_compress import decode, errors
    >>> try:
    ...     decode(np.zeros(8, np.uint8))
    ... except errors.WireError as error:
    ...     print(isinstance(error, ValueError))
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ContractError",
    "GradientError",
    "HvdCompressError",
    "LostRankError",
    "MismatchError",
    "MissingError",
    "StateError",
    "UnsupportedError",
    "WireError",
]


class HvdCompressError(Exception):
    """Base class of the errors that hvd_compress itself raises."""


class WireError(HvdCompressError, ValueError):
    """A payload is truncated, corrupted, of another version, or not a payload at all."""


class MismatchError(HvdCompressError, RuntimeError):
    """The ranks disagree on settings, names, shapes or versions; raised on every rank.

    Example:
        >>> from hvd_compress.errors import MismatchError
        >>> MismatchError("the ranks disagree on op").descriptions
        ()
    """

    descriptions: Sequence[dict[str, Any]] = ()
    """What each rank has said, where they compared descriptions."""


class MissingError(HvdCompressError, ImportError):
    """A framework, Horovod or MPI is not installed or cannot be loaded; the message names the command that fixes it."""


class UnsupportedError(HvdCompressError, NotImplementedError):
    """A combination that is not supported; the message names the remedy."""


class LostRankError(HvdCompressError, RuntimeError):
    """A rank has ended, or has not answered in time, while others waited for it in an exchange."""


class ContractError(HvdCompressError, AssertionError):
    """A compressor or an exchange, perhaps one of your own, does not do what its base class asks of it."""


class GradientError(HvdCompressError, AssertionError):
    """A gradient was computed, changed or cleared at a time when its exchange forbids it; the message says what to do.

    Horovod raises AssertionError in such cases, so this is one, too.
    """


class StateError(HvdCompressError, ValueError):
    """A saved compressor state does not fit the optimizer that it is loaded into."""
