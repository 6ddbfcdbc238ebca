"""Values of an optimizer's state as JSON: what another rank sends is read as data, and can run no code here."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Sent", "dumps", "loads"]


class Sent(NamedTuple):
    """Stands for a tensor that is broadcast by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


def dumps(value: Any) -> bytes:
    """Encode numbers, text, bytes, None, NumPy's arrays, types of torch, `Sent`, and containers of these.

    Raises:
        TypeError: something else is among them; the message says where.
    """
    return json.dumps(_told(value, "state")).encode()


def loads(data: bytes) -> Any:
    """Decode what `dumps` made: every container is a list of its kind and its content."""
    return _read(json.loads(data))


# -- writing ----------------------------------------------------------------------------------------------------------


def _told(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _WRITERS:
        name, write = _WRITERS[kind]
        return [name, write(value, where)]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSU":
        return ["numpy", [value.dtype.str, list(value.shape), isinstance(value, np.generic), value.tobytes().hex()]]
    raise TypeError(
        f"broadcast_optimizer_state: {where} is of {kind.__module__}.{kind.__qualname__}, which is not sent: what "
        "comes from another rank is never unpickled. Let the optimizer keep numbers, text, tensors, and dicts, lists "
        "and tuples of these; or set this value on every rank yourself, and take it out of the state while this is "
        "called"
    )


def _items(value: Any, where: str) -> list[Any]:
    return [_told(inner, f"{where}[{i}]") for i, inner in enumerate(value)]


def _pairs(value: Any, where: str) -> list[Any]:
    return [[_told(k, f"a key of {where}"), _told(v, f"{where}[{k!r}]")] for k, v in value.items()]


def _name(value: Any, where: str) -> str:
    return str(value).removeprefix("torch.")


_WRITERS: dict[type, tuple[str, Callable[[Any, str], Any]]] = {
    dict: ("dict", _pairs),
    OrderedDict: ("OrderedDict", _pairs),
    list: ("list", _items),
    tuple: ("tuple", _items),
    set: ("set", _items),
    frozenset: ("frozenset", _items),
    torch.Size: ("Size", _items),
    bytes: ("bytes", lambda value, where: value.hex()),
    complex: ("complex", lambda value, where: [value.real, value.imag]),
    torch.dtype: ("dtype", _name),
    torch.layout: ("layout", _name),
    torch.device: ("device", _name),
    Sent: ("Sent", lambda value, where: [list(value.shape), _name(value.dtype, where), value.is_on_host]),
}

# -- reading ----------------------------------------------------------------------------------------------------------


def _read(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    return _READERS[kind](content)


def _array(content: Any) -> Any:
    kind, shape, is_scalar, data = content
    array = np.frombuffer(bytes.fromhex(data), np.dtype(kind)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _of_torch(kind: type) -> Callable[[Any], Any]:
    def read(name: Any) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, kind):
            raise TypeError(f"torch.{name} is no {kind.__name__}")
        return found

    return read


_dtype = _of_torch(torch.dtype)
_READERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda content: {_read(k): _read(v) for k, v in content},
    "OrderedDict": lambda content: OrderedDict((_read(k), _read(v)) for k, v in content),
    "list": lambda content: [_read(inner) for inner in content],
    "tuple": lambda content: tuple(_read(inner) for inner in content),
    "set": lambda content: {_read(inner) for inner in content},
    "frozenset": lambda content: frozenset(_read(inner) for inner in content),
    "Size": lambda content: torch.Size(_read(inner) for inner in content),
    "bytes": bytes.fromhex,
    "complex": lambda content: complex(*content),
    "dtype": _dtype,
    "layout": _of_torch(torch.layout),
    "device": torch.device,
    "Sent": lambda content: Sent(tuple(content[0]), _dtype(content[1]), content[2]),
    "numpy": _array,
}
