"""Exchanges of elastic runs that programs make while they train, and that are made anew among other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from hvd_compress.elastic import are_together, is_elastic
from hvd_compress.engine.carrying import CarriedStates, Owed, State
from hvd_compress.engine.choice import exchanged
from hvd_compress.engine.states import empty_state
from hvd_compress.engine.survival import Lost, taken_up
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.feedback import check_state
from hvd_compress.fingerprint import serialize
from hvd_compress.ranks import Ranks

__all__ = [
    "CarriedExchange",
    "CarriedExchanges",
    "Renewable",
    "is_carried",
    "refuse_loading_apart",
    "refuse_what_stays",
]


def is_carried(compression: Any, adagrad: Any) -> bool:
    """Whether this is an elastic run, where ranks keep something from step to step: residuals, or accumulators."""
    return is_elastic() and (exchanged(compression) is not None or adagrad is not None)


def refuse_what_stays(what: Any, exchange: Any, process_set: Any) -> None:
    """Raise UnsupportedError for what does not come through a change of ranks in an elastic run.

    Args:
        what: a setting of the user's, as errors show it.
        exchange: of `hvd_compress.exchange`.
        process_set: of Horovod.
    """
    if process_set.process_set_id != 0:
        raise UnsupportedError(
            f"{what} with a process set in an elastic run: Horovod forgets process sets when ranks come or "
            "go. Leave process_set out, or start with a fixed number of ranks"
        )
    if exchange.sends_by_mpi:
        raise UnsupportedError(
            f"{exchange!r} in an elastic run: Horovod runs these with Gloo only, and MPI does not outlive a "
            'rank. Use transport="horovod"'
        )


class Renewable(Protocol):
    """What is asked of an exchange."""

    def rest(self) -> None:
        """Let nothing run any more; what is in flight is for whoever ends it."""

    def inherit_counters(self, other: Any) -> None:
        """Take over what another one, of the same tensors, has counted."""

    def inherit(self, other: Any) -> None:
        """Take over what another one, of the same tensors, owes, and its counters."""

    def stats(self) -> dict[str, Any]:
        """See `Ledger.stats`."""

    def state_dict(self) -> State:
        """See `hvd_compress.feedback`; arrays of NumPy."""

    def load_state_dict(self, state: State) -> None:
        """Take over a state of this rank."""


Of = TypeVar("Of", bound=Renewable)


class CarriedExchange(Generic[Of]):
    """Stands for one exchange, which is made in the first step after ranks have met.

    Args:
        make: the exchange for the ranks that there are; a collective call.
        told: what tells it from others, the same on all ranks; JSON-able.
        sources: what its tensors are of; see `CarriedExchanges.places`.
        averages: over ranks, rather than summing up.
        book: of all exchanges of the edge.
    """

    def __init__(
        self,
        make: Callable[[], Of],
        told: dict[str, Any],
        sources: Sequence[Hashable],
        averages: bool,
        book: CarriedExchanges,
    ) -> None:
        self._make = make
        self.told = serialize(told).decode()
        self.sources = tuple(sources)
        self.number: int | None = None
        """Among those of the same key."""
        self._averages = averages
        self._book = book
        self._made: Of | None = None
        self._former: Of | None = None
        """The one among other ranks, for its counters."""
        self._replaces: CarriedExchange[Of] | None = None
        book.add(self)

    @property
    def made(self) -> Of | None:
        """The exchange, if it was made for the ranks that there are."""
        return self._made

    def exchange(self) -> Of:
        """The exchange for the ranks that there are; the first time after these have met, a collective call.

        Raises:
            UnsupportedError: ranks have not met, so that others may do something else.
            MismatchError: ranks have not made the same exchange; raised on all of them.
        """
        if self._made is None:
            if not are_together():
                raise UnsupportedError(
                    "a step with compression in an elastic run, and no state has synced the ranks: exchanges are made "
                    "for the ranks that there are then. Give model and optimizer, or the variables, to a state of "
                    "hvd.elastic (KerasState, TensorFlowState or TensorFlowKerasState) of hvd_compress, and train "
                    "inside of a function that is decorated with hvd.elastic.run"
                )
            self._made = self._begun()
            self._former = None
        return self._made

    def _begun(self) -> Of:
        ranks, owed = self._book.all_ranks(), self._book.take(self)
        new = self._make()
        # exchanges of tensors of the same names might be taken for each other
        steps = 0 if owed is None else owed.state["steps"]
        ranks.agree({"number of the exchange": self.number, "steps made before": steps})
        if self._former is not None:
            new.inherit_counters(self._former)
        if owed is not None:
            new.load_state_dict(self._taken_up(owed, ranks))
        elif self._replaces is not None:
            new.inherit(self._replaces.exchange())
            self._replaces.retire(self)
        self._replaces = None
        return new

    def _taken_up(self, owed: Owed, ranks: Ranks) -> State:
        """What this rank goes on with among the ranks that there are."""
        if owed.is_as_saved:
            return owed.state
        # of Average and Sum, only one is divided
        factor = ranks.size / owed.state["size"] if self._averages else 1.0
        return taken_up(owed.state, owed.united, ranks.size, ranks.position, factor)

    def give_up(self) -> None:
        """Ranks have come or gone: the exchange is not used any more."""
        if self._made is not None:
            # its collectives have failed, or will never be complete: nothing of it is waited for
            self._made.rest()
            self._former, self._made = self._made, None

    def retire(self, heir: CarriedExchange[Of]) -> None:
        """Another exchange has taken over what is owed."""
        self.give_up()
        self._book.replace(self, heir)

    # -- what users ask of an exchange -------------------------------------------------------------------------------

    def inherit(self, other: CarriedExchange[Of]) -> None:
        """Take over what another one of the same tensors owes, and its counters."""
        self._replaces = other

    def stats(self) -> dict[str, Any]:
        """See `Ledger.stats`; with "lost_ranks" and "lost_norm", of all exchanges of this process."""
        current = self._made or self._former
        lost: Lost = self._book.lost
        counted = {"total": {}, "tensors": {}} if current is None else current.stats()
        return {**counted, "lost_ranks": lost.ranks, "lost_norm": lost.norm}

    def state_dict(self) -> State:
        """What this rank owes; see `hvd_compress.feedback`."""
        if self._made is None:
            owed = self._book.owed_of(self)
            return empty_state() if owed is None else self._taken_up(owed, self._book.all_ranks())
        return self._made.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` returned on this rank, now or in the next step.

        Raises:
            StateError: before ranks have met; or no such state.
        """
        refuse_loading_apart()
        if self._made is None:
            self._book.owe(self, Owed(check_state(state), is_as_saved=True))
        else:
            self._made.load_state_dict(state)


def refuse_loading_apart() -> None:
    """Raise StateError in an elastic run whose ranks have not met: a state is of a rank among a number of ranks."""
    if not are_together():
        raise StateError(
            "load_compression_state_dict() in an elastic run before its state is synced: which rank this is, and among "
            "how many, is not known yet. Call it in the function that is decorated with hvd.elastic.run, where "
            "training begins"
        )


Key = tuple[tuple[int | None, ...], str, int]


class CarriedExchanges(CarriedStates):
    """All such exchanges of an edge in this process."""

    def __init__(self, ranks: Callable[[], Ranks]) -> None:
        super().__init__("exchanges", ranks)
        self.all_ranks = ranks
        self.places: dict[Hashable, int] = {}
        """Of the variables that all ranks share: they tell exchanges of tensors of the same names apart."""
        self._exchanges: WeakSet[CarriedExchange[Any]] = WeakSet()
        self._not_made: dict[Any, Owed] = {}
        self._heirs: dict[Any, CarriedExchange[Any]] = {}
        """Of what was owed at the last commit: what has replaced the exchange since."""

    def add(self, exchange: CarriedExchange[Any]) -> None:
        """Carry another one."""
        self._exchanges.add(exchange)

    def replace(self, exchange: CarriedExchange[Any], heir: CarriedExchange[Any]) -> None:
        """Carry an exchange no more; whoever goes back to the last commit gives what was owed there to its heir."""
        key = self._key(exchange)
        self._heirs = {of: heir if now is exchange else now for of, now in self._heirs.items()}
        if key in self._saved:
            self._heirs.setdefault(key, heir)
        self._exchanges.discard(exchange)

    def save(self) -> None:
        super().save()
        self._heirs = {}

    def restore(self) -> None:
        of_heirs = {key: self._key(heir) for key, heir in self._heirs.items()}
        self._saved = {of_heirs.get(key, key): owed for key, owed in self._saved.items()}
        self._united = {of_heirs.get(key, key): united for key, united in self._united.items()}
        self._heirs = {}
        super().restore()

    def owed_of(self, exchange: CarriedExchange[Any]) -> Owed | None:
        """What is owed of an exchange that is not made."""
        return self._not_made.get(self._key(exchange))

    def owe(self, exchange: CarriedExchange[Any], owed: Owed) -> None:
        """Note what is owed of an exchange that is not made."""
        self._not_made[self._key(exchange)] = owed

    def take(self, exchange: CarriedExchange[Any]) -> Owed | None:
        """What is owed of an exchange that is made now."""
        return self._not_made.pop(self._key(exchange), None)

    def _key(self, exchange: CarriedExchange[Any]) -> Key:
        base = self._base(exchange)
        if exchange.number is None:
            taken = {other.number for other in self._exchanges if self._base(other) == base}
            exchange.number = next(i for i in itertools.count() if i not in taken)
        return (*base, exchange.number)

    def _base(self, exchange: CarriedExchange[Any]) -> tuple[tuple[int | None, ...], str]:
        return tuple(self.places.get(source) for source in exchange.sources), exchange.told

    def _owed(self) -> dict[Any, Owed]:
        made = {self._key(one): Owed(one.state_dict()) for one in self._exchanges if one.made is not None}
        return {**self._not_made, **made}

    def _go_back(self, owed: dict[Any, Owed]) -> None:
        for exchange in self._exchanges:
            exchange.give_up()
        self._not_made = dict(owed)
