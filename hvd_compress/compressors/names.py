"""Find compressors by name, as users write them in scripts and on command lines."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hvd_compress.compressors.base import Compressor
from hvd_compress.compressors.registry import class_of, known_ids

__all__ = ["named"]


def named(text: str) -> Compressor:
    """Create the compressor that a text such as "onebit", "adaptive:32" or "topk:0.01,coding=golomb" names.

    Settings follow the colon as in a call: by position first, then by name; words need no quotes.

    Raises:
        ValueError: an unknown name or setting, or a setting out of its range.

    Example:
        >>> from hvd_compress.compressors import named
        >>> named("adaptive:pi=32")
        Adaptive(pi=32, group='row', sample=1024, error_feedback=True, coding=None)
        >>> named("threshold:1e-3").tau
        0.001
    """
    name, _, rest = text.partition(":")
    name = name.strip().lower().replace("-", "").replace("_", "")
    kind = class_of(name)
    if kind is None:
        known = [*known_ids(), "auto"]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{text!r} names no compression: {hint}Known are {', '.join(map(repr, known))}; settings follow a colon, "
            "as in 'adaptive:32', 'topk:0.01' or 'qsgd:bits=2,norm=max'"
        )
    settings = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals and not by_name:
            positional.append(_value(part))
        elif equals and key.strip() in settings[len(positional) :] and key.strip() not in by_name:
            by_name[key.strip()] = _value(value.strip())
        else:
            raise ValueError(f"{text!r}: {part!r} is no setting; those of {name} are {', '.join(settings) or 'none'}")
    try:
        return kind(*positional, **by_name)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}; the settings of {name} are {', '.join(settings) or 'none'}") from None


def _value(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text.strip("'\"")
