"""The steps of Adam with compressed momentum, over the exchanges of `DistributedOptimizer`, in a graph or outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_compress._keras.edge import Edge
from hvd_compress._keras.moments import Betas, Moments
from hvd_compress._keras.names import exchanged_name, unique
from hvd_compress._keras.optimizer import Distribution
from hvd_compress.engine.momentum import COMPRESSED, LATE, RENEWAL, TAKEN_BACK, WARM_UP, take_own
from hvd_compress.errors import StateError
from hvd_compress.schedules import Renewals

__all__ = ["AdamSettings", "AdamSteps", "AdamVariables"]

Tensor = Any
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AdamSettings:
    """What all ranks must have alike.

    Args:
        betas: of Adam.
        weight_decay: AdamW's.
        schedule: of the warm-up and the renewals.
        is_renewed: whether renewals take place in any case.
    """

    betas: Betas
    weight_decay: float
    schedule: Renewals
    is_renewed: bool


@dataclass(frozen=True)
class AdamVariables:
    """What Keras keeps, saves and broadcasts: the same on all ranks.

    Args:
        trained: the model's.
        momenta: first moments.
        variances: second moments.
        steps: how many were made.
        seen: how many gradients the variances have seen.
    """

    trained: Sequence[Any]
    momenta: Sequence[Any]
    variances: Sequence[Any]
    steps: Any
    seen: Any

    @property
    def names(self) -> list[str]:
        """Of the trained variables, as exchanges call them."""
        return unique([exchanged_name(v) for v in self.trained])


class AdamSteps:
    """Averages gradients in a warm-up and at renewals, else momentum; then steps alike on all ranks.

    Args:
        edge: of the framework.
        settings: of Adam.
        plain: exchanges gradients, uncompressed.
        compressed: exchanges momentum.
        variables: of Keras.
    """

    def __init__(
        self,
        edge: Edge,
        settings: AdamSettings,
        plain: Distribution,
        compressed: Distribution,
        variables: AdamVariables,
    ) -> None:
        self._edge, self._using = edge, edge.arithmetic
        self._settings = settings
        self._plain, self._compressed = plain, compressed
        self._variables = variables
        self._late = [self._using.zeros(v) for v in variables.trained]
        """Gradients of elements without a variance that ranks have not averaged: of this rank alone."""
        self._counts = {way: self._using.counter() for way in (WARM_UP, RENEWAL, COMPRESSED)}
        self._taken_back = self._using.counter()
        self._has_met = False
        self._places = {edge.key(v): i for i, v in enumerate(variables.trained)}
        self._moving = list(range(len(variables.trained)))
        """Which variables this step is of: those that are frozen now stay as they are."""
        self._step_in_one_piece = self._using.one_piece(self._step)
        self._asks = ""
        """The name of what ranks ask each other."""

    def apply(
        self, gradients: Sequence[Tensor], variables: Sequence[Any], decays: Sequence[float], learning_rate: Any
    ) -> None:
        """Exchange and update.

        Args:
            gradients: dense.
            variables: what they are of, the same ones on all ranks; others stay as they are.
            decays: the weight decay of each.
            learning_rate: of this step.
        """
        places = [self._places[self._edge.key(v)] for v in variables]
        of_place = {place: (g, decay) for place, g, decay in zip(places, gradients, decays, strict=True)}
        self._moving = sorted(of_place)
        self._step_in_one_piece(
            [of_place[i][0] for i in self._moving], [of_place[i][1] for i in self._moving], learning_rate
        )

    def _of_moving(self, each: Sequence[Any]) -> list[Any]:
        return [each[i] for i in self._moving]

    # -- which way a step goes ---------------------------------------------------------------------------------------

    def _step(self, gradients: Sequence[Tensor], decays: Sequence[float], learning_rate: Any) -> Any:
        self._meet()
        steps = self._using.read(self._variables.steps)
        warms = steps < self._settings.schedule.warmup_steps
        renews = self._renews(steps)
        return self._using.choose(
            warms | renews,
            lambda: self._with_gradients(gradients, decays, learning_rate, warms),
            lambda: self._with_momentum(gradients, decays, learning_rate),
        )

    def _renews(self, steps: Any) -> Any:
        due = self._using.decided(self._settings.schedule.is_due, steps)
        if self._settings.is_renewed:
            return due
        process_set = self._compressed.settings["process_set"]
        exchanges = self._edge.ranks_of(process_set) > 1

        def ask() -> Any:
            mine = self._using.any_nonzero([self._using.read(late) for late in self._of_moving(self._late)])
            return self._using.any_rank(mine, self._asks, process_set) if exchanges else mine

        return self._using.choose(due, ask, lambda: False)

    def _meet(self) -> None:
        """Before the first step, compare with the other ranks, who go the same ways from there on."""
        if self._has_met:
            return
        process_set = self._compressed.settings["process_set"]
        if self._edge.ranks_of(process_set) > 1:
            # a variable that a function makes while TensorFlow traces it has no value yet: an empty array
            schedule, steps = self._settings.schedule, int(self._edge.values(self._variables.steps).sum())
            told = {**vars(self._settings), "betas": vars(self._settings.betas), "schedule": vars(schedule)}
            # here, where all ranks come: one alone may make an optimizer, as to load a model
            self._asks = self._using.claimed("hvd_compress.late", process_set)
            told = {"optimizer": "CompressedAdam", "steps made": steps, "asks under": self._asks, **told}
            self._edge.ranks(process_set).agree(told)
        self._plain.is_broadcast = self._compressed.is_broadcast
        for distribution in (self._plain, self._compressed):
            distribution.prepare(self._variables.trained)
        self._has_met = True

    # -- steps -------------------------------------------------------------------------------------------------------

    def _with_gradients(
        self, gradients: Sequence[Tensor], decays: Sequence[float], learning_rate: Any, warms: Any
    ) -> Any:
        """A step with uncompressed gradients."""
        lates = self._of_moving(self._late)
        given = [g + self._using.read(late) for g, late in zip(gradients, lates, strict=True)]
        averages = self._combined(self._plain, given)

        def take() -> Any:
            seen = self._using.read(self._variables.seen)
            grown = [m.with_gradient(g) for m, g in zip(self._moments(seen), averages, strict=True)]
            if not self._settings.is_renewed:
                late = [m.with_late_gradient(g) for m, g in zip(self._moments(seen), averages, strict=True)]
                grown = [self._either(warms, one, other) for one, other in zip(grown, late, strict=True)]
            self._using.write(self._variables.seen, grown[0].seen)
            for late_of_one in lates:
                self._using.write(late_of_one, self._using.nothing(self._using.read(late_of_one)))
            for variable, m in zip(self._of_moving(self._variables.variances), grown, strict=True):
                self._using.write(variable, m.variance)
            self._count(WARM_UP, self._using.where(warms, 1, 0))
            self._count(RENEWAL, self._using.where(warms, 0, 1))
            momenta = [m.momentum for m in grown]
            return self._move(momenta, [m.momentum / m.scale() for m in grown], decays, learning_rate)

        return self._using.choose(self._using.all_finite(averages), take, self._take_back)

    def _with_momentum(self, gradients: Sequence[Tensor], decays: Sequence[float], learning_rate: Any) -> Any:
        """A step with compressed momentum."""
        moments = self._moments(self._using.read(self._variables.seen))
        given = [m.direction(g) for m, g in zip(moments, gradients, strict=True)]
        averages = self._combined(self._compressed, given)

        def take() -> Any:
            updates = [m.masked(average) for m, average in zip(moments, averages, strict=True)]
            for m, late, g in zip(moments, self._of_moving(self._late), gradients, strict=True):
                kept = self._using.where(m.unseen(), g, self._using.nothing(g))
                self._using.write(late, self._using.read(late) + kept)
            self._count(COMPRESSED, 1)
            momenta = [update * m.scale() for m, update in zip(moments, updates, strict=True)]
            return self._move(momenta, updates, decays, learning_rate)

        return self._using.choose(self._using.all_finite(averages), take, self._take_back)

    def _combined(self, distribution: Distribution, given: Sequence[Tensor]) -> list[Tensor]:
        return distribution.combine(given, self._of_moving(self._variables.trained), self._variables.trained)

    def _moments(self, seen: Any) -> list[Moments]:
        read, betas = self._using.read, self._settings.betas
        pairs = zip(self._of_moving(self._variables.momenta), self._of_moving(self._variables.variances), strict=True)
        return [Moments(self._using, betas, read(momentum), read(variance), seen) for momentum, variance in pairs]

    def _either(self, flag: Any, one: Moments, other: Moments) -> Moments:
        where = self._using.where
        return one._replace(variance=where(flag, one.variance, other.variance), seen=where(flag, one.seen, other.seen))

    def _move(
        self, momenta: Sequence[Tensor], updates: Sequence[Tensor], decays: Sequence[float], learning_rate: Any
    ) -> bool:
        """Keep momentum, count the step, and move variables against the updates, with AdamW's decay before."""
        using, settings = self._using, self._settings
        steps = using.read(self._variables.steps) + 1
        using.write(self._variables.steps, steps)
        for variable, momentum in zip(self._of_moving(self._variables.momenta), momenta, strict=True):
            using.write(variable, momentum)
        for variable, decay, update in zip(self._of_moving(self._variables.trained), decays, updates, strict=True):
            value, rate = using.read(variable), using.rate(learning_rate, update)
            if decay:
                value = value * (1.0 - rate * decay)
            divisor = using.correction(settings.betas.first, steps, update)
            using.write(variable, value - update * (rate / divisor))
        return True

    def _take_back(self) -> Any:
        self._using.write(self._taken_back, self._using.read(self._taken_back) + 1)
        return self._using.warned(TAKEN_BACK.format(kind="CompressedAdam"))

    def _count(self, way: str, number: Any) -> None:
        self._using.write(self._counts[way], self._using.read(self._counts[way]) + self._using.number(number))

    # -- what this rank keeps ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What `compression_stats` has beside the counters of the compressed exchange."""
        plain = self._plain.latest
        return {
            "uncompressed": {} if plain is None else plain.stats()["total"],
            "steps_by_way": {way: int(self._using.read(count)) for way, count in self._counts.items()},
            "steps_taken_back": int(self._using.read(self._taken_back)),
        }

    def own_entries(self) -> dict[str, Any]:
        """Entries of a state's residuals, of variables that have late gradients."""
        found = {}
        for name, late in zip(self._variables.names, self._late, strict=True):
            values = self._using.array(late).reshape(-1)
            if values.any():
                found[f"{LATE} of {name}"] = {"shape": list(late.shape), "values": values}
        return found

    def checked_own(self, entries: dict[str, Any]) -> list[Array]:
        """What `own_entries` has returned on this rank, as an array for each variable.

        Raises:
            StateError: of other variables, or shapes.
        """
        left = dict(entries)
        found = [
            take_own(left, f"{LATE} of {name}", tuple(v.shape), str(self._edge.values(v).dtype))
            for name, v in zip(self._variables.names, self._variables.trained, strict=True)
        ]
        if left:
            raise StateError(
                f"{next(iter(left))!r} of the state: this optimizer has no such variable, but "
                f"{', '.join(map(repr, self._variables.names))}"
            )
        return [
            np.zeros_like(self._edge.values(v)) if values is None else values.reshape(tuple(v.shape))
            for v, values in zip(self._variables.trained, found, strict=True)
        ]

    def load_own(self, late: Sequence[Array]) -> None:
        """Take over what `checked_own` has returned."""
        for variable, values in zip(self._late, late, strict=True):
            self._using.write(variable, values)
