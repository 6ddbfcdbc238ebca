"""Choose a compressor for each tensor: by its name, or by what the network and the machine turn out to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from hvd_compress.compressors import (
    FP16,
    Adaptive,
    Compressor,
    NoCompression,
    OneBit,
    Threshold,
    check_registered,
    named,
)
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange

__all__ = [
    "Assigned",
    "Auto",
    "Policy",
    "check_patterns",
    "compressor_for",
    "compressors_in",
    "given_compression",
    "horovods_own",
    "meant",
    "refuse_class",
]

_UNCOMPRESSED = NoCompression()

# Horovod's own compressors are classes of these names, in each of its frameworks
_HOROVODS = {"NoneCompressor": _UNCOMPRESSED, "FP16Compressor": FP16()}


@dataclass(frozen=True)
class Policy:
    """Chooses a compressor for each tensor by its name: the first rule whose pattern matches decides.

    Tensors with different compressors can still share an exchange; those with NoCompression or FP16 go through
    Horovod's allreduce.

    Args:
        rules: (pattern, compressor) pairs, or a dict of them; `*`, `?` and `[...]` in a pattern mean what they do for
            file names. A compressor may be given by its name, see `compressors.named`, or be one of Horovod's own.
        default: the compressor of tensors that no rule matches.

    Raises:
        TypeError: a rule is not a pair of a pattern and a compressor.
        ValueError: a name of no compressor.

    Example:
        >>> from hvd_compress import Adaptive, NoCompression, Policy, TopK
        >>> policy = Policy([("embedding*", TopK(0.01)), ("*.head.*", NoCompression())], default=Adaptive(pi=64))
        >>> policy.for_tensor("embedding.weight")
        TopK(ratio=0.01, k=None, error_feedback=True, coding=None)
    """

    rules: Any
    default: Any = _UNCOMPRESSED

    def __post_init__(self) -> None:
        given: Any = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"Policy(rules={given!r}): give pairs of a pattern and a compressor")
        rules = tuple(_checked_rule(rule) for rule in given)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", _checked_rule(("*", self.default))[1])

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError if a rule matches none of these tensors, or only tensors that an earlier rule matches."""
        known = list(names)
        matched: list[tuple[str, set[str]]] = []
        for pattern, _ in self.rules:
            matches = {name for name in known if fnmatchcase(name, pattern)}
            if hides := next((before for before, all_ in matched if matches and matches < all_), None):
                raise ValueError(
                    f"Policy: the pattern {pattern!r} never applies, since {hides!r} stands before it and matches the "
                    "same tensors, and others: the first rule that matches counts. Put the special rule first"
                )
            matched.append((pattern, matches))
            if not matches:
                near = get_close_matches(pattern, known, 3)
                some = ", ".join(map(repr, near or known[:3])) or "none"
                raise ValueError(
                    f"Policy: the pattern {pattern!r} matches none of the {len(known)} tensors, such as {some}. "
                    "Correct it, or leave the rule out; `*`, `?` and `[...]` mean what they do for file names"
                )

    def for_tensor(self, name: str) -> Compressor:
        """Return the compressor of a tensor."""
        return next((c for pattern, c in self.rules if fnmatchcase(name, pattern)), self.default)

    def get_config(self) -> dict[str, Any]:
        """Return the rules as a JSON-able dict, which ranks compare."""
        rules = [[pattern, compressor.get_config()] for pattern, compressor in self.rules]
        return {"id": "policy", "rules": rules, "default": self.default.get_config()}


@dataclass(frozen=True)
class Auto:
    """Measures the network and the machine, predicts how long each way of exchanging takes, and picks one per bucket.

    A bucket is a group of gradients that share an exchange. Uncompressed float32 and float16 are always among the ways.
    On PyTorch (and Keras on it) the few best are then tried for some steps each, the fastest is kept, and all are
    considered again when steps become slower or faster. If a tensor goes uncompressed from then on, its residual (what
    compression has left out) travels with its next gradient. On TensorFlow, whose graphs are fixed, the choice is made
    once, by prediction. All ranks make the same choice, from what the slowest rank has measured beforehand and from the
    mean of their steps. A compressor changes how a training converges: list only `candidates` that you would accept.

    Args:
        candidates: compressors with error feedback to choose from, or their names.

    Raises:
        TypeError: a candidate is no compressor.
        ValueError: there is no candidate, or one without error feedback, or one that is always among the ways.

    Example:
        >>> from hvd_compress import Auto, OneBit
        >>> Auto([OneBit()]).get_config()["candidates"][0]["id"]
        'onebit'
    """

    candidates: Sequence[Any] = (OneBit(), Adaptive(pi=64))

    def __post_init__(self) -> None:
        if isinstance(self.candidates, str | Compressor) or not isinstance(self.candidates, Iterable):
            raise TypeError(f"Auto(candidates={self.candidates!r}): give a list of compressors")
        object.__setattr__(self, "candidates", tuple(map(meant, self.candidates)))
        for compressor in self.candidates:
            if not isinstance(compressor, Compressor):
                raise TypeError(f"Auto: candidates are compressors, such as OneBit(), got {compressor!r}")
            if compressor.sums_factors:
                raise ValueError(
                    f"Auto: {compressor!r} is no candidate: what its exchange takes is not predicted. Give it as "
                    "compression= alone"
                )
            if compressor.reducible or not compressor.feedback:
                raise ValueError(
                    f"Auto: {compressor!r} is no candidate: give compressors with error feedback; uncompressed and "
                    "fp16 are considered anyway"
                )
        if not self.candidates:
            raise ValueError("Auto: give at least one candidate, or use compression=Compression.none")

    def __call__(self, *args: Any, **settings: Any) -> Auto:
        """Return another `Auto` with the given settings, as compressors do."""
        return Auto(*args, **settings)

    def get_config(self) -> dict[str, Any]:
        """Return the candidates as a JSON-able dict, which ranks compare."""
        return {"id": "auto", "candidates": [compressor.get_config() for compressor in self.candidates]}


@dataclass(frozen=True)
class Assigned:
    """Holds the compressor of each tensor by its exact name, as `Auto` has chosen it.

    Args:
        compressors: by tensor name; tensors without one stay uncompressed.
        exchanges: by tensor name, where another exchange than that of "auto" is expected to be faster.
    """

    compressors: Mapping[str, Compressor]
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)

    def for_tensor(self, name: str) -> Compressor:
        """Return the compressor of a tensor."""
        return self.compressors.get(name, _UNCOMPRESSED)

    def get_config(self) -> dict[str, Any]:
        """Return the assignment as a JSON-able dict."""
        compressors = {name: c.get_config() for name, c in self.compressors.items()}
        exchanges = {name: exchange.get_config() for name, exchange in self.exchanges.items()}
        return {"id": "assigned", "compressors": compressors, "exchanges": exchanges}


def check_patterns(compression: Any, names: Iterable[str]) -> None:
    """Check, after all ranks have compared the settings, that each pattern of a `Policy` matches some tensor.

    Raises:
        ValueError: one matches none; on all ranks, since their settings and tensors are equal.
    """
    if isinstance(compression, Policy):
        compression.check_names(names)


def compressor_for(compression: Compressor | Policy, name: str) -> Compressor:
    """Return the compressor that a tensor of this name gets."""
    return compression.for_tensor(name) if isinstance(compression, Policy) else compression


def compressors_in(compression: Compressor | Policy) -> list[Compressor]:
    """List all compressors that some tensor may get."""
    if isinstance(compression, Policy):
        return [*(compressor for _, compressor in compression.rules), compression.default]
    return [compression]


def meant(compression: Any) -> Any:
    """Replace a name, "auto" or that of a compressor (see `compressors.named`), by what it stands for.

    Raises:
        ValueError: the name stands for nothing.
        TypeError: a compressor of a class that was not registered.
    """
    if isinstance(compression, Compressor):
        check_registered(compression)
    if not isinstance(compression, str):
        return compression
    return Auto() if compression.strip().lower() == "auto" else named(compression)


def refuse_class(argument: str, compression: Any) -> None:
    """Raise TypeError if a class is given instead of a compressor."""
    if isinstance(compression, type) and issubclass(compression, Compressor | Policy | Auto):
        name = compression.__name__
        needed = "1e-3" if compression is Threshold else "..."
        raise TypeError(f"{argument}={name} is a class; give a compressor, such as {name}({needed})")


def horovods_own(compression: Any) -> Any:
    """Replace a compressor that comes with Horovod by ours of the same meaning; return all else as it is."""
    kind = compression if isinstance(compression, type) else type(compression)
    # a user's own class may have the same name
    is_horovods = kind.__module__.partition(".")[0] == "horovod"
    return _HOROVODS.get(kind.__name__, compression) if is_horovods else compression


def _checked_rule(rule: Any) -> tuple[str, Compressor]:
    if isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str):
        refuse_class(f"Policy: rule {rule[0]!r}", rule[1])
        ours = horovods_own(meant(rule[1]))
        if isinstance(ours, Compressor):
            return rule[0], ours
    raise TypeError(f"Policy: a rule is a pattern and a compressor, such as ('*.bias', NoCompression()), got {rule!r}")


def given_compression(argument: str, compression: Any) -> Compressor | Policy:
    """Check the compressor given to an optimizer that averages parameters; returns ours in place of Horovod's.

    Raises:
        TypeError: no compressor, or `Auto`.
        ValueError: a name of no compressor.
        UnsupportedError: `PowerSGD`, or `SignSGD`.
    """
    refuse_class(argument, compression)
    ours = horovods_own(meant(compression))
    if isinstance(ours, Compressor | Policy):
        for compressor in compressors_in(ours):
            if compressor.sums_factors:
                raise UnsupportedError(
                    f"{argument}={compression!r}: ranks sum factors of {compressor!r} in an exchange of gradients, "
                    "which there is none of here. Give a compressor with payloads, such as TopK(0.01)"
                )
            if compressor.votes:
                raise UnsupportedError(
                    f"{argument}={compression!r}: {compressor!r} makes ranks vote on the sign of an update, and "
                    "what is sent here are parameters or their changes, whose size counts. Give EFSignSGD() or OneBit()"
                )
        return ours
    raise TypeError(
        f"{argument}={compression!r}: give a compressor of hvd_compress, such as TopK(0.01), or a Policy; Auto "
        "chooses exchanges of gradients, which there are none of here"
    )
