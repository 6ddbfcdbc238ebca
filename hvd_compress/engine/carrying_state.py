"""What the state of an elastic run does beside what Horovod's does, whatever the framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.elastic import note_meeting, note_parting
from hvd_compress.engine.carrying import Carried
from hvd_compress.ranks import Ranks, forget_numbers

__all__ = ["CarryingState"]


class CarryingState:
    """Carries over what ranks owe; laid over a state of Horovod's."""

    _commits = -1
    """Of this state, on all ranks; -1 before the first sync."""

    def _carried(self) -> Sequence[Carried]:
        """What is carried over, in an order that all ranks share."""
        raise NotImplementedError

    def _all_ranks(self) -> Ranks:
        """The ranks that there are."""
        raise NotImplementedError

    def _hosts_updated(self) -> type[Exception]:
        """Horovod's HostsUpdatedInterrupt."""
        raise NotImplementedError

    def save(self) -> None:
        """Keep all values, to come back to."""
        super().save()  # type: ignore[misc]
        self._commits += self._commits >= 0
        for carried in self._carried():
            carried.save()

    def commit(self) -> None:
        """Keep all values, tell all ranks what this one owes, and look for other hosts; a collective call.

        Raises:
            HostsUpdatedInterrupt: other hosts are there, which `hvd.elastic.run` waits for.
        """
        # a rank that is lost now leaves all others at the commit before: they have not kept this one yet
        self._share()
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if there are other hosts; a collective call."""
        interrupt: Any = self._hosts_updated()
        try:
            super().check_host_updates()  # type: ignore[misc]
        except interrupt:
            # all ranks are still here, with what is lost if they go; plain values go on with the weights, as they are
            self._share()
            self.save()
            # exchanges have to be made anew also where nobody joins
            raise interrupt(skip_sync=False) from None

    def restore(self) -> None:
        """Go back to the values that were kept last."""
        for carried in self._carried():
            carried.restore()
        super().restore()  # type: ignore[misc]

    def reset(self) -> None:
        """Ranks have come or gone; they meet in `sync`."""
        note_parting()
        super().reset()  # type: ignore[misc]

    def sync(self) -> None:
        """Give all ranks the state of rank 0, make exchanges for these ranks, and keep the values; a collective call.

        What each rank owes stays on it.
        """
        # who joins has counted nothing
        forget_numbers()
        note_meeting()
        for carried in self._carried():
            carried.gather(self._commits)
        super().sync()  # type: ignore[misc]
        for carried in self._carried():
            carried.sync(self._commits)
        mine = np.array([self._commits], np.int64)
        self._commits = max(0, int(self._all_ranks().run("broadcast", "hvd_compress.elastic.commits", mine)[0]))
        # a step that fails before the next commit goes back to here, on ranks that have joined, too
        self._share()
        self.save()

    def _share(self) -> None:
        told = [carried.share() for carried in self._carried()]
        # none takes over anything before all have heard everything
        for take in told:
            take()
