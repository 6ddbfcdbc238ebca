"""Values as JSON: what another rank sends is read as data, and can run no code here."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["Coder", "dumps", "loads"]

Tell = Callable[[Any, str], Any]
Read = Callable[[Any], Any]


class Coder:
    """Encodes numbers, text, bytes, None, NumPy's arrays, and containers of these.

    Args:
        writers: of further types: a name, and what makes JSON of a value, given where it is.
        readers: by these names, of what the writers have made.
    """

    def __init__(
        self, writers: Mapping[type, tuple[str, Tell]] | None = None, readers: Mapping[str, Read] | None = None
    ) -> None:
        self._writers: dict[type, tuple[str, Tell]] = {
            dict: ("dict", self._pairs),
            OrderedDict: ("OrderedDict", self._pairs),
            list: ("list", self.items),
            tuple: ("tuple", self.items),
            set: ("set", self.items),
            frozenset: ("frozenset", self.items),
            bytes: ("bytes", lambda value, where: value.hex()),
            complex: ("complex", lambda value, where: [value.real, value.imag]),
            **(writers or {}),
        }
        self._readers: dict[str, Read] = {
            "dict": lambda content: {self.read(k): self.read(v) for k, v in content},
            "OrderedDict": lambda content: OrderedDict((self.read(k), self.read(v)) for k, v in content),
            "list": lambda content: [self.read(inner) for inner in content],
            "tuple": lambda content: tuple(self.read(inner) for inner in content),
            "set": lambda content: {self.read(inner) for inner in content},
            "frozenset": lambda content: frozenset(self.read(inner) for inner in content),
            "bytes": bytes.fromhex,
            "complex": lambda content: complex(*content),
            "numpy": _array,
            **(readers or {}),
        }

    def dumps(self, value: Any) -> bytes:
        """Encode a value.

        Raises:
            TypeError: something else is among it; the message says where.
        """
        return json.dumps(self._told(value, "state")).encode()

    def loads(self, data: bytes) -> Any:
        """Decode what `dumps` made: every container is a list of its kind and its content."""
        return self.read(json.loads(data))

    def items(self, value: Any, where: str) -> list[Any]:
        """Write the content of a sequence or a set."""
        return [self._told(inner, f"{where}[{i}]") for i, inner in enumerate(value)]

    def read(self, value: Any) -> Any:
        """Read what was written of one value."""
        if not isinstance(value, list):
            return value
        kind, content = value
        return self._readers[kind](content)

    def _told(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in self._writers:
            name, write = self._writers[kind]
            return [name, write(value, where)]
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSU":
            return ["numpy", [value.dtype.str, list(value.shape), isinstance(value, np.generic), value.tobytes().hex()]]
        raise TypeError(
            f"broadcast_optimizer_state: {where} is of {kind.__module__}.{kind.__qualname__}, which is not sent: what "
            "comes from another rank is never unpickled. Let the optimizer keep numbers, text, tensors, and dicts, "
            "lists and tuples of these; or set this value on every rank yourself, and take it out of the state while "
            "this is called"
        )

    def _pairs(self, value: Any, where: str) -> list[Any]:
        return [[self._told(k, f"a key of {where}"), self._told(v, f"{where}[{k!r}]")] for k, v in value.items()]


def _array(content: Any) -> Any:
    kind, shape, is_scalar, data = content
    array = np.frombuffer(bytes.fromhex(data), np.dtype(kind)).reshape(shape).copy()
    return array[()] if is_scalar else array


_plain = Coder()
dumps, loads = _plain.dumps, _plain.loads
