"""Check what the user asks of DiLoCo, cut parameters into fragments, and describe it all for ranks to compare."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from hvd_compress import wire
from hvd_compress.compressors import Compressor, NoCompression
from hvd_compress.policy import Policy, given_compression
from hvd_compress.schedules import DiLoCoSchedule
from hvd_compress.tensors import ParameterSpec

__all__ = ["DiLoCoSettings"]


@dataclass(frozen=True)
class DiLoCoSettings:
    """Holds the arguments of `DiLoCo` that do not depend on a framework.

    Raises:
        TypeError: an argument of another type.
        ValueError: a setting out of its range.

    Example:
        >>> from hvd_compress.diloco import DiLoCoSettings
        >>> from hvd_compress.tensors import ParameterSpec
        >>> tensors = [ParameterSpec("a", (4, 2)), ParameterSpec("b", (4,)), ParameterSpec("c", (3,))]
        >>> DiLoCoSettings(sync_every=6, fragments=2).cut(tensors)
        [(0,), (1, 2)]
        >>> DiLoCoSettings(sync_every=6, fragments=[["c", "a"], ["b"]]).cut(tensors)
        [(0, 2), (1,)]
    """

    sync_every: int = 30
    fragments: int | Sequence[Sequence[str]] = 1
    delay: int = 0
    alpha: float = 0.0
    compression: Any = None
    feedback_decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fragments", _checked_fragments(self.fragments))
        # which checks what it is given
        schedule = self.schedule
        object.__setattr__(self, "sync_every", schedule.sync_every)
        object.__setattr__(self, "delay", schedule.delay)
        for name in ("alpha", "feedback_decay"):
            object.__setattr__(self, name, _checked_share(name, getattr(self, name)))
        chosen = NoCompression() if self.compression is None else given_compression("compression", self.compression)
        object.__setattr__(self, "compression", chosen)

    @cached_property
    def schedule(self) -> DiLoCoSchedule:
        """When fragments are sent and arrive."""
        count = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return DiLoCoSchedule(self.sync_every, count, self.delay)

    def cut(self, tensors: Sequence[ParameterSpec], others: Collection[str] = ()) -> list[tuple[int, ...]]:
        """Return the tensors of each fragment, by their numbers.

        A number of fragments cuts the list where they become about equally large; no tensor is divided.

        Args:
            tensors: that are exchanged.
            others: names that may stand in fragments and are not exchanged, as they are frozen.

        Raises:
            ValueError: more fragments than tensors; a name that is unknown, missing, or in two fragments.
        """
        if isinstance(self.fragments, int):
            if self.fragments > len(tensors):
                raise ValueError(
                    f"fragments={self.fragments} of {len(tensors)} parameters that take gradients: a fragment has at "
                    "least one"
                )
            return _even_runs([t.numel for t in tensors], self.fragments)
        numbers_by_name = {t.name: i for i, t in enumerate(tensors)}
        lists: Any = self.fragments
        _check_names(lists, numbers_by_name, others)
        cut = [tuple(sorted(numbers_by_name[n] for n in names if n in numbers_by_name)) for names in lists]
        if (empty := next((i for i, found in enumerate(cut) if not found), None)) is not None:
            raise ValueError(
                f"fragments[{empty}] has no parameter that takes gradients: {list(lists[empty])}. Leave it out"
            )
        return cut

    def description(self, tensors: Sequence[ParameterSpec], cut: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """Describe the settings for ranks to compare."""
        chosen: Compressor | Policy = self.compression
        return {
            "wire version": wire.VERSION,
            "schedule": self.schedule.get_config(),
            "alpha": self.alpha,
            "compression": chosen.get_config(),
            "feedback_decay": self.feedback_decay,
            "fragments": [[tensors[i].name for i in indices] for indices in cut],
            "parameters": [[t.name, list(t.shape), t.dtype] for t in tensors],
        }


def _checked_share(name: str, value: Any) -> float:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: {name} must be a number from 0 to 1")
    return float(value)


def _checked_fragments(fragments: Any) -> Any:
    if not isinstance(fragments, bool) and isinstance(fragments, numbers.Integral):
        if fragments < 1:
            raise ValueError(f"fragments={fragments!r}: give at least 1, which synchronizes all parameters together")
        return int(fragments)
    lists: Any = fragments
    if not isinstance(lists, list | tuple) or not all(_are_names(names) for names in lists):
        raise TypeError(
            f"fragments={fragments!r}: give their number, or a list of lists of parameter names, such as "
            '[["0.weight", "0.bias"], ["2.weight", "2.bias"]]'
        )
    if not lists:
        raise ValueError("fragments=[]: give at least one fragment")
    return tuple(tuple(names) for names in lists)


def _are_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _check_names(fragments: Sequence[Sequence[str]], known: Collection[str], others: Collection[str]) -> None:
    seen: set[str] = set()
    for i, names in enumerate(fragments):
        for name in names:
            if name not in known and name not in others:
                raise ValueError(f"fragments[{i}] names {name!r}, which is no parameter here: {_some(known)}")
            if name in seen:
                raise ValueError(f"fragments[{i}] names {name!r}, which is in a fragment already: it must be in one")
            seen.add(name)
    if missing := [name for name in known if name not in seen]:
        raise ValueError(
            f"fragments leave out {missing[0]!r}, {len(missing)} of {len(known)} parameters: each that takes gradients "
            "must be in one fragment, or ranks would never exchange it"
        )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)[:8]))
    return f"there are {shown}" + (", ..." if len(names) > 8 else "")


def _even_runs(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut a list into runs of about equal sums, each of one entry at least."""
    sums = list(accumulate(sizes))
    ends = [0]
    for i in range(1, count):
        wanted = sums[-1] * i / count
        # what is left must do for the runs that follow
        choices = range(ends[-1] + 1, len(sizes) - (count - i) + 1)
        ends.append(min(choices, key=lambda end: abs(sums[end - 1] - wanted)))
    ends.append(len(sizes))
    return [tuple(range(a, b)) for a, b in pairwise(ends)]
