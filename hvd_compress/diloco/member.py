"""Run one rank of DiLoCo, which asks the schedule what is due after each step, and does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import Array, Groups, Meeting, own_state
from hvd_compress.averaging.groups import means
from hvd_compress.diloco.fragment import Fragment, MakeOuter
from hvd_compress.diloco.settings import DiLoCoSettings
from hvd_compress.errors import StateError
from hvd_compress.policy import check_patterns
from hvd_compress.schedules import Turn
from hvd_compress.tensors import ParameterSpec

__all__ = ["DiLoCoMember", "Outcome"]

FORMAT = 1

Take = Callable[[Sequence[int]], list[Array]]
"""Returns the flat arrays of parameters, by number; they are written to where they have to change."""


class Outcome(NamedTuple):
    """Says what has become of parameters.

    Args:
        changed: new values by number, for who has no memory in common with them.
        restored: numbers of those that were not finite, and are again what ranks agreed on last.
        problem: what the user is to be warned of.
    """

    changed: Mapping[int, Array] = {}
    restored: Collection[int] = ()
    problem: str | None = None


class DiLoCoMember:
    """The parameters of one rank, flat arrays in the order of `tensors`; creating it is a collective call.

    Args:
        tensors: the same on all ranks.
        settings: the same on all ranks.
        groups: where this rank stands.
        make_outer: makes the outer optimizer of a fragment.
        others: names that fragments may have and that are not exchanged, as they are frozen.

    Raises:
        MismatchError: the ranks disagree; raised on all of them.
        ValueError: fragments that do not fit the tensors; a pattern of a `Policy` that matches none.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        settings: DiLoCoSettings,
        groups: Groups,
        make_outer: MakeOuter,
        others: Collection[str] = (),
    ) -> None:
        cut = settings.cut(tensors, others)
        self.settings = settings
        self.groups = groups
        self._tensors = tensors
        self._fragments = [
            Fragment(numbers, [tensors[n] for n in numbers], settings, groups, f"{groups.name}.{i}", make_outer)
            for i, numbers in enumerate(cut)
        ]
        self._described = {
            **settings.description(tensors, cut),
            "nodes": [list(ranks) for ranks in groups.nodes.members],
        }
        if groups.everyone is not None:
            groups.everyone.agree(
                {"optimizer": "DiLoCo", **self._described, "outer": [f.outer.describe() for f in self._fragments]}
            )
        check_patterns(settings.compression, [t.name for t in tensors])
        self._meeting = Meeting(groups, "DiLoCo's moment")
        self._has_begun = False
        """Whether there is something that ranks agreed on."""
        self._under_way: int | None = None
        """The fragment that was sent and has not arrived."""
        self._frozen: list[str] = []
        """What was frozen when it was sent, on all ranks alike."""
        self._steps = self._sent = self._merged = self._not_finite = 0
        self._traffic: dict[str, Any] = dict.fromkeys(_TRAFFIC, 0)
        """Of the members before this one, among other ranks."""

    # -- training ----------------------------------------------------------------------------------------------------

    def begin(self, take: Take) -> None:
        """Note, before the first update, what all ranks begin with."""
        if not self._has_begun:
            for fragment in self._fragments:
                fragment.agree_on(take(fragment.numbers))
            self._has_begun = True

    @property
    def has_begun(self) -> bool:
        """Whether `begin` has nothing to do."""
        return self._has_begun

    def step(self) -> Turn:
        """Count a step; returns what is due, which `act` then does."""
        for fragment in self._fragments:
            for sync in fragment.syncs:
                sync.progress()
        self._steps += 1
        return self.settings.schedule.turn(self._steps)

    def act(self, turn: Turn, take: Take, frozen: Collection[str] = ()) -> Outcome:
        """Send, receive and merge.

        Args:
            turn: what is due.
            take: returns parameters.
            frozen: names of those that do not change at present; the same on all ranks.

        Raises:
            MismatchError: ranks have made other numbers of steps, have frozen others, or do not agree on what they
                agreed on last; raised on all of them.
        """
        settled: dict[int, Array] = {}
        if turn.sends is not None:
            fragment = self._fragments[turn.sends]
            self._frozen = sorted(frozen)
            facts = {
                "what is frozen": self._frozen,
                _AGREED: fragment.checksum(),
            }
            self._meeting.begin(f"a step after {self._steps} steps", facts)
            settled = self._settle_frozen(fragment, take)
            arrays = take(fragment.numbers)
            sent = [settled.get(n, x) for n, x in zip(fragment.numbers, arrays, strict=True)]
            fragment.send(sent, self._frozen)
            self._under_way = turn.sends
            self._sent += 1
        # what average_parameters() has received before its time does not arrive again
        is_due = turn.arrives is not None and turn.arrives == self._under_way
        outcome = self._arrive(take) if is_due else Outcome()
        return outcome._replace(changed={**outcome.changed, **settled})

    def _settle_frozen(self, fragment: Fragment, take: Take) -> dict[int, Array]:
        """Make tensors that were frozen since the last synchronization their mean, if a rank has moved them before.

        Nothing would ever make them equal otherwise. Returns the new values by number.
        """
        places = fragment.newly(self._frozen)
        everyone = self.groups.everyone
        if not places or everyone is None:
            return {}
        # all ranks have frozen the same ones, or are told so here
        self._meeting.settle()
        numbers = [fragment.numbers[i] for i in places]
        arrays = take(numbers)
        if not everyone.maximum([float(fragment.have_moved(places, arrays))])[0]:
            fragment.note_frozen(places)
            return {}
        averages = means(everyone, arrays, f"{self.groups.name}.frozen")
        if not all(np.isfinite(mean).all() for mean in averages):
            # the rank that has them goes back in this synchronization
            return {}
        for x, mean in zip(arrays, averages, strict=True):
            x[...] = mean
        fragment.agree_at(places, arrays)
        fragment.note_frozen(places)
        return dict(zip(numbers, arrays, strict=True))

    def _arrive(self, take: Take) -> Outcome:
        number, self._under_way = self._under_way, None
        assert number is not None
        self._meeting.settle()
        fragment = self._fragments[number]
        if not fragment.receive():
            return self._go_back(number, take)
        fragment.step_outside(self._frozen)
        arrays = take(fragment.numbers)
        fragment.merge(arrays, self._frozen)
        self._merged += 1
        return Outcome(dict(zip(fragment.numbers, arrays, strict=True)))

    def _go_back(self, number: int, take: Take) -> Outcome:
        """Leave out a synchronization; a rank whose parameters are not finite takes what ranks agreed on last."""
        self._not_finite += 1
        changed: dict[int, Array] = {}
        for fragment in self._fragments:
            arrays = take(fragment.numbers)
            # a value that is not finite in one fragment spoils the others with the next gradient
            if fragment.restore(arrays):
                changed.update(zip(fragment.numbers, arrays, strict=True))
        done = (
            f"{len(changed)} parameters of this rank ({self.groups.rank}) were not finite, and are again what the "
            "ranks agreed on last. Look at its data and learning rate"
            if changed
            else "the parameters of this rank are finite, and stay"
        )
        problem = (
            f"DiLoCo: what the ranks have moved by step {self._steps} is not finite in fragment {number}, so this "
            f"synchronization is left out, and the outer optimizer does not step; {done}"
        )
        return Outcome(changed, list(changed), problem)

    def average_parameters(self, take: Take, others: Mapping[str, Array]) -> Outcome:
        """Make the parameters, and other arrays, of all ranks their mean, in place; a collective call.

        What is under way arrives before. The outer optimizer does not step, and what compression owes stays owed.

        Raises:
            MismatchError: ranks have made other numbers of steps, or have other arrays.
        """
        self._meeting.begin(f"average_parameters() after {self._steps} steps", {})
        self._meeting.settle()
        arrived = Outcome() if self._under_way is None else self._arrive(take)
        numbers = range(len(self._tensors))
        arrays = [arrived.changed.get(i, x) for i, x in enumerate(take(numbers))]
        named = {f"parameter {t.name}": x for t, x in zip(self._tensors, arrays, strict=True)}
        self._meeting.average({**named, **others}, "by average_parameters()")
        for fragment in self._fragments:
            of_fragment = [arrays[n] for n in fragment.numbers]
            # ranks see what is not finite, but the outer optimizer goes on from what they agreed on before
            if all(np.isfinite(x).all() for x in of_fragment):
                fragment.agree_on(of_fragment)
        self._has_begun = True
        return arrived._replace(changed=dict(enumerate(arrays)))

    def refuse(self, problem: str) -> None:
        """Let all ranks know where they meet next that this one cannot go on; the caller raises what it knows."""
        self._meeting.refuse(f"{problem} after {self._steps} steps", {})

    # -- reports -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `DiLoCo.diloco_stats`."""
        nodes, schedule = self.groups.nodes, self.settings.schedule
        syncs = [sync for fragment in self._fragments for sync in fragment.syncs]
        numels = [sum(self._tensors[n].numel for n in fragment.numbers) for fragment in self._fragments]
        return {
            "nodes": nodes.count,
            "ranks_of_node": len(nodes.members[nodes.node_of(self.groups.rank)]),
            **schedule.get_config(),
            "alpha": self.settings.alpha,
            "steps": self._steps,
            "under_way": self._under_way,
            "synchronizations": {"sent": self._sent, "merged": self._merged, "not_finite": self._not_finite},
            "fragment_elements": numels,
            "parameter_bytes": sum(t.numel * np.dtype(t.dtype).itemsize for t in self._tensors),
            **{f"{key}_nodes": before + sum(getattr(s, key) for s in syncs) for key, before in self._traffic.items()},
        }

    @property
    def steps(self) -> int:
        """How many were made."""
        return self._steps

    # -- among other ranks -------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Wait for what is under way; it arrives when it is due."""
        self._meeting.settle()
        for fragment in self._fragments:
            fragment.drain()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Forget what is under way, which will never be complete, and take over what `state_dict` returned here."""
        self._meeting.abandon()
        for fragment in self._fragments:
            fragment.abandon()
        self.load_state_dict(state)

    def land(self, take: Take) -> Outcome:
        """Let what is under way arrive before its time, after `rest`."""
        return Outcome() if self._under_way is None else self._arrive(take)

    def agreed(self) -> dict[str, Any]:
        """Return what is the same on all ranks, when nothing is under way."""
        return {
            "nodes": self.groups.nodes.count,
            "steps": self._steps,
            "has_begun": self._has_begun,
            "fragments": [fragment.agreed() for fragment in self._fragments],
        }

    def owed(self) -> dict[str, Array]:
        """Return what this rank owes, by names of its parts, in units of the sum over nodes; `rest` comes before."""
        owed = {
            f"fragment {i}, {sync.flat.dtype}": debt
            for i, fragment in enumerate(self._fragments)
            for sync, debt in zip(fragment.syncs, fragment.owed(), strict=True)
        }
        return {name: debt for name, debt in owed.items() if debt is not None}

    def go_on_from(self, agreed: Mapping[str, Any]) -> None:
        """Take over what `agreed` returned on a rank of before."""
        self._steps, self._has_begun = agreed["steps"], agreed["has_begun"]
        for fragment, of_fragment in zip(self._fragments, agreed["fragments"], strict=True):
            fragment.take_agreed(of_fragment)

    def inherit(self, before: DiLoCoMember, owes_of: int) -> None:
        """Go on with the counters and what is owed of this rank's member of before.

        Args:
            before: of the same tensors and settings.
            owes_of: how many nodes there were, with which what is owed keeps its weight; 0 if nothing is owed.
        """
        self._sent, self._merged, self._not_finite = before._sent, before._merged, before._not_finite
        known = before.stats()
        self._traffic = {key: known[f"{key}_nodes"] for key in self._traffic}
        if owes_of:
            for fragment, old in zip(self._fragments, before._fragments, strict=True):
                fragment.owe_as(old, self.groups.nodes.count / owes_of)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything of this rank that later steps depend on."""
        return {
            "format": FORMAT,
            "rank": self.groups.rank,
            "settings": self._described,
            "steps": self._steps,
            "has_begun": self._has_begun,
            "under_way": self._under_way,
            "frozen": [*self._frozen],
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: not such a state, or of another rank, network, nodes or settings.
        """
        keys = ["steps", "has_begun", "under_way", "frozen", "fragments"]
        given = own_state("DiLoCo", state, FORMAT, self.groups.rank, self._described, keys)
        steps = saved.integer("steps of a DiLoCo state", given["steps"])
        has_begun = saved.flag("has_begun of a DiLoCo state", given["has_begun"])
        under_way = given["under_way"]
        if under_way is not None:
            most = len(self._fragments) - 1
            under_way = saved.integer("fragment under way in a DiLoCo state", under_way, 0, most)
        self._check_moment(steps, under_way)
        frozen = [saved.text("a frozen name of a DiLoCo state", n) for n in saved.sequence("frozen", given["frozen"])]
        of_fragments = saved.sequence("fragments of a DiLoCo state", given["fragments"], len(self._fragments))
        # all is checked before anything is changed
        checked = [
            fragment.check(of_fragment, is_sent=under_way == i)
            for i, (fragment, of_fragment) in enumerate(zip(self._fragments, of_fragments, strict=True))
        ]
        self._meeting.settle()
        for fragment, of_fragment in zip(self._fragments, checked, strict=True):
            fragment.load(of_fragment)
        self._steps, self._has_begun, self._under_way, self._frozen = steps, has_begun, under_way, frozen

    def _check_moment(self, steps: int, under_way: int | None) -> None:
        """Raise StateError unless that fragment is the next one to arrive."""
        schedule = self.settings.schedule
        if under_way is None:
            return
        due = next((t for t in range(steps + 1, steps + schedule.delay + 1) if schedule.turn(t).arrives is not None), 0)
        if not due or schedule.turn(due).arrives != under_way:
            raise StateError(
                f"this DiLoCo state says that fragment {under_way} is under way after {steps} steps, when it is not: "
                "it is damaged, or of another schedule"
            )


_TRAFFIC = ("bytes_between", "bytes_inside", "seconds_between", "seconds_inside")
_AGREED = "what they agreed on last (start from equal parameters, as after hvd.broadcast_parameters)"
