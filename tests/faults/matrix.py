"""Which cases of the matrix are run: pairs of what trains and the moment, so that each pair comes up."""

from __future__ import annotations

from typing import NamedTuple

HOWS = ("kill", "raise", "stop")
WHENS = (
    "import", "init", "wrap", "first backward", "mid-backward", "before step", "in step", "save", "last step",
)  # fmt: skip
WHATS = ("onebit", "adaptive", "auto", "eventgrad", "one-sided", "daso", "diloco", "async", "ddp")
ODD = ("one step more", "other optimizer", "horovod beside")
OF_MPI_ALONE = ("one-sided", "async")
EQUAL_REPLICAS = ("onebit", "adaptive", "auto", "ddp", "horovod", "ddp alone")
"""What keeps the ranks' parameters equal to the bit."""
ANY_STEPS = ("eventgrad", "one-sided")
"""What takes ranks that make different numbers of steps: `average_parameters` brings them together."""


class Case(NamedTuple):
    """One start.

    Args:
        what: trains.
        how: a rank goes wrong.
        when: it does; for "other optimizer" what this rank trains with.
        launcher: a key of `tests.parallel.launch.LAUNCHERS`.
    """

    what: str
    how: str
    when: str
    launcher: str

    @property
    def victim(self) -> int:
        """The rank that goes wrong: the server makes the steps of an asynchronous training."""
        return 0 if self.what == "async" and self.when == "in step" else 1

    @property
    def beside(self) -> Case:
        """The same with plain Horovod, or plain DDP."""
        return self._replace(what="ddp alone" if self.what == "ddp" else "horovod")


def launcher_of(what: str, number: int) -> str:
    """Return who starts it: both in turns, where there is a choice."""
    if what == "ddp":
        return "torchrun"
    return "mpi" if what in OF_MPI_ALONE or number % 2 else "gloo"


def cases() -> list[Case]:
    """All pairs of what trains and moment, with kinds of fault and launchers in turns, and what ranks do differently.

    A Latin square gives each (what, moment) a kind of fault, so that each (what, fault) and each (moment, fault) comes
    up three times.

    Example:
        >>> found = cases()
        >>> len(found), len({(case.what, case.how) for case in found if case.how in HOWS})
        (104, 27)
    """
    of_moments = [
        Case(what, HOWS[(i + j) % 3], when, launcher_of(what, i + j // 3))
        for i, what in enumerate(WHATS)
        for j, when in enumerate(WHENS)
    ]
    others = [
        Case(what, how, "onebit" if what in ("diloco", "eventgrad", "one-sided") else "diloco", launcher_of(what, i))
        for i, what in enumerate(WHATS)
        if what != "ddp"
        for how in ODD
        if not (what == "async" and how == "one step more")
    ]
    return of_moments + others
