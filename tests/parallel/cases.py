"""The list of named cases of a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

Case = Callable[..., None]


class Thorough(str):
    """The name of a case that `make test` leaves out. Starts that `make test-rest` alone makes have it.

    For what another case shows too, and for what differs from another case with MPI only.
    """

    __slots__ = ()


class Cases(dict[str, Case]):
    """Cases by name, in the order of their definition.

    Example:
        >>> cases = Cases()
        >>> @cases.add
        ... def sum_is_sum(): ...
        >>> @cases.each({"a": 1, "b": 2})
        ... def holds_for(value): ...
        >>> list(cases)
        ['sum_is_sum', 'holds_for[a]', 'holds_for[b]']
    """

    def add(self, case: Case) -> Case:
        """Decorator: a case of its function's name."""
        self[case.__name__] = case
        return case

    def add_thorough(self, case: Case) -> Case:
        """Decorator: the same, `Thorough`."""
        self[Thorough(case.__name__)] = case
        return case

    def each(
        self, values: Mapping[str, Any], thorough: str = "", witnesses: Sequence[str] = ()
    ) -> Callable[[Case], Case]:
        """Decorator: one case for each named value, which the function gets as its argument.

        Those with `thorough` in their names are `Thorough`, and where `witnesses` are named, all others.
        """
        if unknown := [label for label in witnesses if label not in values]:
            raise ValueError(f"no case is named {unknown[0]!r}: must be one of {list(values)}")

        def decorate(case: Case) -> Case:
            for label, value in values.items():
                name = f"{case.__name__}[{label}]"
                is_thorough = label not in witnesses if witnesses else bool(thorough) and thorough in label
                self[Thorough(name) if is_thorough else name] = functools.partial(case, value)
            return case

        return decorate


def of_tensorflow(worker: str) -> Any:
    """Import a worker that needs TensorFlow; returns one without cases where that is not installed.

    pytest shows a test without cases as skipped, and the file has others.
    """
    if find_spec("tensorflow") is None:
        return SimpleNamespace(cases=Cases())
    return import_module(f"tests.parallel.workers.{worker}")
