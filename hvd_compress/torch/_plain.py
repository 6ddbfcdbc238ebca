"""Values of an optimizer's state as JSON, those of torch among them; see `hvd_compress.plain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hvd_compress.plain import Coder

__all__ = ["Sent", "dumps", "loads"]


class Sent(NamedTuple):
    """Stands for a tensor that is broadcast by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


def _name(value: Any, where: str) -> str:
    return str(value).removeprefix("torch.")


def _size(value: Any, where: str) -> list[int]:
    return list(value)


def _of_torch(kind: type) -> Callable[[Any], Any]:
    def read(name: Any) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, kind):
            raise TypeError(f"torch.{name} is no {kind.__name__}")
        return found

    return read


_dtype = _of_torch(torch.dtype)
_coder = Coder(
    {
        torch.Size: ("Size", _size),
        torch.dtype: ("dtype", _name),
        torch.layout: ("layout", _name),
        torch.device: ("device", _name),
        Sent: ("Sent", lambda value, where: [list(value.shape), _name(value.dtype, where), value.is_on_host]),
    },
    {
        "Size": torch.Size,
        "dtype": _dtype,
        "layout": _of_torch(torch.layout),
        "device": torch.device,
        "Sent": lambda content: Sent(tuple(content[0]), _dtype(content[1]), content[2]),
    },
)
dumps, loads = _coder.dumps, _coder.loads
