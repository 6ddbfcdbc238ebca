"""Choose an exchange for each bucket by predictions, and correct predictions by what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvd_compress.cost.predict import Stage
from hvd_compress.cost.step import PlannedExchange, step_seconds

__all__ = ["Configuration", "Corrector", "configurations", "pick"]

_MARGIN = 0.05
# a label that gains nowhere by prediction may still gain, if it is predicted to take at most this times dense
_DOUBT = 1.5


@dataclass(frozen=True)
class Configuration:
    """Describes one way to exchange all buckets of a step.

    Args:
        name: unique; that of the one compressor that its buckets use, or "mixed".
        labels: what each bucket uses.
        seconds: predicted, of a step.
    """

    name: str
    labels: tuple[str, ...]
    seconds: float


def pick(seconds: Mapping[str, float], dense: str, margin: float = _MARGIN) -> str:
    """Pick the fastest candidate, or `dense` where that gains too little; the first one on a tie.

    Args:
        seconds: of each candidate, predicted or measured.
        dense: the candidate that loses nothing: another must be faster by more than `margin`.
        margin: share of the seconds of `dense`.

    Raises:
        ValueError: `dense` is not among the candidates.

    Example:
        >>> from hvd_compress.cost import pick
        >>> pick({"none": 1.0, "onebit": 0.97}, dense="none")
        'none'
        >>> pick({"none": 1.0, "onebit": 0.8}, dense="none")
        'onebit'
    """
    if dense not in seconds:
        raise ValueError(f"dense={dense!r} is not among the candidates {', '.join(map(repr, seconds))}")
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < seconds[dense] * (1 - margin) else dense


def configurations(
    buckets: Sequence[Mapping[str, tuple[Stage, ...]]],
    dense: str,
    backward: Sequence[float] | None = None,
    forward: float = 0.0,
    margin: float = _MARGIN,
) -> list[Configuration]:
    """List all configurations worth a thought, the one of the shortest predicted step first.

    They are: `dense` everywhere; each other label where a bucket gains by it, with `dense` elsewhere; and under the
    name "mixed" the best of each bucket. Where no bucket gains by a label, it is used where it is predicted to take
    at most half as long again as `dense`: predictions of short exchanges are not that exact.

    Args:
        buckets: in backward order, the stages of each label for each of them.
        dense: the label that all buckets have.
        backward: seconds of backward for each bucket; 0 if None.
        forward: seconds of the rest of a step.
        margin: what a bucket must gain at least, as a share of its dense seconds.

    Raises:
        ValueError: a bucket without `dense`, or not one number of `backward` for each bucket.
    """
    backward = [0.0] * len(buckets) if backward is None else backward
    if len(backward) != len(buckets):
        raise ValueError(f"{len(backward)} backward times for {len(buckets)} buckets; give one for each")
    alone = [{label: sum(s.seconds for s in stages) for label, stages in b.items()} for b in buckets]

    def choose(allowed: set[str] | None) -> tuple[str, ...]:
        kept = ({k: v for k, v in a.items() if allowed is None or k in allowed} for a in alone)
        return tuple(pick(seconds, dense, margin=margin) for seconds in kept)

    def near(name: str) -> tuple[str, ...]:
        return tuple(name if a.get(name, math.inf) <= _DOUBT * a[dense] else dense for a in alone)

    names = dict.fromkeys(label for bucket in buckets for label in bucket if label != dense)
    # a choice that another name has already is not worth a trial
    everywhere = choose({dense})
    found = {everywhere: dense}
    for name in names:
        labels = choose({dense, name})
        found.setdefault(near(name) if labels == everywhere else labels, name)
    found.setdefault(choose(None), "mixed")

    def predicted(labels: tuple[str, ...]) -> float:
        jobs = [PlannedExchange(b[label], back) for b, label, back in zip(buckets, labels, backward, strict=True)]
        return step_seconds(jobs, forward)

    made = [Configuration(name, labels, predicted(labels)) for labels, name in found.items()]
    return sorted(made, key=lambda c: c.seconds)


class Corrector:
    """Learns by what factor a prediction is wrong: the median of measured / predicted, by name.

    A name that was never measured gets the least of the others' factors. Most of an error has a common cause, such as
    another program on the machine or a shared link; what has not is found out only if the name looks worth a trial. The
    same observations give the same factors.

    Example:
        >>> from hvd_compress.cost import Corrector
        >>> corrector = Corrector()
        >>> corrector.observe("onebit", predicted=0.1, measured=0.15)
        >>> corrector.factor("onebit") == corrector.factor("adaptive") == 0.15 / 0.1
        True
    """

    def __init__(self, window: int = 5) -> None:
        self._window = window
        self._ratios: dict[str, list[float]] = {}

    def observe(self, name: str, predicted: float, measured: float) -> None:
        """Take a measurement; only the last `window` of a name count.

        Raises:
            ValueError: seconds that are not above 0.
        """
        if not (predicted > 0 and measured > 0):
            raise ValueError(f"predicted={predicted!r}, measured={measured!r}: seconds must be above 0")
        self._ratios[name] = [*self._ratios.get(name, []), measured / predicted][-self._window :]

    def factor(self, name: str) -> float:
        """Return the factor to multiply a prediction with."""
        if name in self._ratios:
            return median(self._ratios[name])
        return min((median(r) for r in self._ratios.values()), default=1.0)
