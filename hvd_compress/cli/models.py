"""Read the shapes of a model's gradients: typed, from a file, or from the model itself."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["parse_shapes", "read_shapes", "shapes_of_model"]

# more would be a slip of the keyboard, and predictions for them would take minutes
_MOST_TENSORS, _MOST_NUMEL = 10**4, 10**12

Shape = tuple[int, ...]


def parse_shapes(text: str) -> list[Shape]:
    """Read shapes from text such as "4096x4096,4096", in the order of the forward pass; "*3" after one repeats it.

    Raises:
        ValueError: another form, none at all, or more than fit any machine.

    Example:
        >>> from hvd_compress.cli.models import parse_shapes
        >>> parse_shapes("784x10, 10, 8x8*2")
        [(784, 10), (10,), (8, 8), (8, 8)]
    """
    shapes: list[Shape] = []
    for item in filter(None, re.split(r"[,\s]+", text)):
        # more digits than any size has: Python refuses to read thousands of them
        found = re.fullmatch(r"([1-9][0-9]{0,14}(?:x[1-9][0-9]{0,14})*)(?:\*([1-9][0-9]{0,14}))?", item.lower())
        if found is None:
            raise ValueError(
                f"shape {_short(item)}: give sizes of 1 and more joined by x, such as 4096x4096, and *3 to repeat it"
            )
        shape, times = tuple(map(int, found.group(1).split("x"))), int(found.group(2) or 1)
        if len(shapes) + times > _MOST_TENSORS or math.prod(shape) > _MOST_NUMEL:
            raise ValueError(
                f"shape {_short(item)}: at most {_MOST_TENSORS:,} tensors of {_MOST_NUMEL:,} elements are allowed"
            )
        shapes += [shape] * times
    if not shapes:
        raise ValueError(f"no shape in {_short(text)}: give some, such as 784x4096,4096x4096*2,4096x10")
    return shapes


def read_shapes(path: str) -> list[Shape]:
    """Read shapes from a file, any number in a line; what follows a # is a comment.

    Raises:
        ValueError: the file cannot be read, or as `parse_shapes`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"shapes file {path!r}: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are no text, or a name that no file can have
        raise ValueError(f"shapes file {path!r}: not a text of shapes ({error})") from None
    try:
        return parse_shapes("\n".join(line.partition("#")[0] for line in text.splitlines()))
    except ValueError as error:
        raise ValueError(f"shapes file {path!r}: {error}") from None


def shapes_of_model(place: str) -> list[Shape]:
    """Return the shapes of the trainable tensors of a torch module or built Keras model, named `module:function`.

    Raises:
        ValueError: there is no such function, it failed, or what it returned is no model.
    """
    shapes = [shape for shape in _trainable(_made(place), place) if math.prod(shape)]
    if not shapes:
        raise ValueError(
            f"--model {place!r}: the model has no trainable tensor with elements; a Keras model must be built first"
        )
    return shapes


def _made(place: str) -> Any:
    """Return what the function of that name returns, or the model of that name."""
    module_name, _, name = place.partition(":")
    # as `python -m` does, which a command in a `bin` folder does not
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # scripts may do anything when they are imported
        raise ValueError(f"--model {place!r}: {_why_not_imported(module_name, error)}") from error
    if not isinstance(function, type) and _is_model(function):
        return function
    if not callable(function):
        raise ValueError(f"--model {place!r} is {type(function).__name__}: must be a function that returns a model")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--model {place!r}: it was called without arguments and raised {_kind(error)}") from error


def _why_not_imported(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and module and not f"{module}.".startswith(f"{error.name}."):
        return f"{module} needs {error.name}, which is not installed in this Python; install it, and start this again"
    return f"give module:function of something importable from here; {_kind(error)}"


def _is_model(candidate: Any) -> bool:
    variables = getattr(candidate, "trainable_variables", None)
    return isinstance(variables, (list, tuple)) or callable(getattr(candidate, "named_parameters", None))


def _trainable(model: Any, place: str) -> list[Shape]:
    try:
        # a Keras model on the torch backend is a torch module as well
        if hasattr(model, "trainable_variables"):
            return [tuple(map(int, variable.shape)) for variable in model.trainable_variables]
        if hasattr(model, "named_parameters"):
            return [tuple(map(int, p.shape)) for _, p in model.named_parameters() if p.requires_grad]
    except Exception as error:  # some parameters and variables get their shape with the first batch
        raise ValueError(
            f"--model {place!r}: a tensor has no shape yet ({_kind(error)}); show the model a batch in that function"
        ) from error
    raise ValueError(f"--model {place!r} returned {type(model).__name__}: must be a torch module or a Keras model")


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _short(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")
