"""The shapes of a model's gradients: typed, from a file, or asked of the model itself."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["parse_shapes", "read_shapes", "shapes_of_model"]

Shape = tuple[int, ...]


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of a text such as "4096x4096,4096", in the order of the forward pass; "*3" after a shape repeats it.

    Raises:
        ValueError: another form, or none at all.

    Example:
        >>> from hvd_compress.cli.models import parse_shapes
        >>> parse_shapes("784x10, 10, 8x8*2")
        [(784, 10), (10,), (8, 8), (8, 8)]
    """
    shapes: list[Shape] = []
    for item in filter(None, re.split(r"[,\s]+", text)):
        found = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*)*)(?:\*(\d+))?", item.lower())
        if found is None:
            raise ValueError(f"shape {item!r}: give sizes joined by x, such as 4096x4096, and *3 to repeat it")
        shapes += [tuple(map(int, found.group(1).split("x")))] * int(found.group(2) or 1)
    if not shapes:
        raise ValueError(f"no shape in {text!r}")
    return shapes


def read_shapes(path: str) -> list[Shape]:
    """Shapes of a file, any number in a line; what follows a # is a comment.

    Raises:
        ValueError: the file cannot be read, or as `parse_shapes`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"shapes file {path!r}: {error}") from None
    return parse_shapes("\n".join(line.partition("#")[0] for line in text.splitlines()))


def shapes_of_model(place: str) -> list[Shape]:
    """Shapes of the trainable tensors of what `module:function` returns, a torch module or a built Keras model.

    Raises:
        ValueError: there is no such function, it failed, or what it returned is no model.
    """
    module_name, _, function_name = place.partition(":")
    # as `python -m` does, which a command in a `bin` folder does not
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--model {place!r}: give module:function of something importable from here; {error}"
        ) from None
    shapes = [tuple(map(int, shape)) for shape in _trainable(function(), place)]
    if not shapes:
        raise ValueError(f"--model {place!r}: the model has no trainable tensor; a Keras model must be built first")
    return [shape for shape in shapes if math.prod(shape)]


def _trainable(model: Any, place: str) -> list[Any]:
    # a Keras model on the torch backend is a torch module as well
    if hasattr(model, "trainable_variables"):
        return [variable.shape for variable in model.trainable_variables]
    if hasattr(model, "named_parameters"):
        return [parameter.shape for _, parameter in model.named_parameters() if parameter.requires_grad]
    raise ValueError(f"--model {place!r} returned {type(model)!r}: must be a torch module or a Keras model")
