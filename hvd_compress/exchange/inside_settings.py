"""Say which compressors may work inside of a host, and why others may not."""

from __future__ import annotations

from typing import Any

from hvd_compress.compressors import Compressor, NoCompression, check_registered, from_config, named
from hvd_compress.errors import UnsupportedError

__all__ = ["checked_inside"]

_ALLOWED = "Give a compressor that makes payloads of magnitudes, such as Blockwise(bits=8), or None for no compression"


def checked_inside(given: Any) -> Compressor | None:
    """Return what is to compress inside of hosts: a compressor, that of a name or of a configuration, or None.

    Raises:
        TypeError: no compressor.
        ValueError: an unknown name or setting.
        UnsupportedError: a compressor that cannot work there.
    """
    if isinstance(given, str):
        given = named(given)
    if isinstance(given, dict):
        given = from_config(given)
    if given is None:
        return None
    if not isinstance(given, Compressor):
        raise TypeError(f"Hierarchical(inside={given!r}): this is no compressor. {_ALLOWED}")
    check_registered(given)
    if (reason := _reason_against(given)) is not None:
        raise UnsupportedError(f"Hierarchical(inside={given!r}): {reason}. {_ALLOWED}")
    return given


def _reason_against(compressor: Compressor) -> str | None:
    if isinstance(compressor, NoCompression):
        return "values that are sent as they are need no compressor, and no payloads"
    if compressor.sums_factors:
        return "its factors are summed in two exchanges, one after the other, and inside of a host there is one"
    if compressor.votes:
        return "it sends signs without magnitudes, of which the ranks of a host cannot make the sum of their gradients"
    if compressor.has_narrow_residuals:
        return "what is owed inside of a host is kept as floats, so error_feedback must be True or False"
    return None
