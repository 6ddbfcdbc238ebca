"""One rank of event-triggered averaging: what it sends, what it holds of its neighbours, and how it mixes.

Sources: Ghosh and Gupta, EventGraD (MLHPC 2020), algorithm B and equation 3; for the mixing that keeps the mean,
Koloskova et al., CHOCO-SGD (ICML 2019), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress import saved, wire
from hvd_compress.compressors import Compressor
from hvd_compress.errors import StateError, WireError
from hvd_compress.gossip.copies import Array, Bytes, Copies
from hvd_compress.gossip.message import open_message, payloads_at, seal_message
from hvd_compress.gossip.stats import GossipTally
from hvd_compress.kernels import gossip as kernels
from hvd_compress.kernels.common import norm
from hvd_compress.schedules import Trigger
from hvd_compress.tensors import ParameterSpec
from hvd_compress.topology import Neighbours

__all__ = ["MIXINGS", "Node"]

MIXINGS = ("stale", "mean_preserving")
FORMAT = 1

_SAVED = (
    "position", "senders", "number", "expected", "watch", "needs_whole", "copies", "own", "passes", "total_bytes",
    "messages", "tensor_bytes",
)  # fmt: skip


class Node:
    """One rank's state and its part of a step; arrays are flat, in the order of `tensors`, and mixed in place.

    Args:
        tensors: the same on all ranks.
        part: this rank's neighbours.
        trigger: when a tensor is sent.
        compressors: of each tensor; where a payload would not be smaller, the tensor goes as it is.
        mixing: "stale", equation 3: own fresh values and the neighbours' last sent ones, whose mean drifts;
            "mean_preserving": differences of last sent values only, which keep the mean of all ranks.
        rates: of the way to the average that a step goes, of each tensor; 1.0 where they are not given.
        traced: whether `report` has norms, thresholds and events of every pass.
        in_order: whether every message arrives at every receiver.
    """

    def __init__(
        self,
        tensors: Sequence[ParameterSpec],
        part: Neighbours,
        trigger: Trigger,
        compressors: Sequence[Compressor] | None = None,
        mixing: str = "stale",
        rates: Sequence[float] | None = None,
        traced: bool = False,
        in_order: bool = True,
    ) -> None:
        self.tensors = tuple(tensors)
        self.part = part
        self.mixing = mixing
        self.watch = trigger.watch(len(self.tensors))
        self.idle = 0
        self.finished = False
        """Whether this rank only answers, and trains no more."""
        self.due = np.zeros(len(self.tensors), np.bool_)
        self._recovers = self.due
        self._in_order = in_order
        self._number = 0
        self._expected = [0] * len(part.senders)
        self._idle_of = [0] * len(part.senders)
        self._measures_change = trigger.measure == "change"
        keeps_own = self._measures_change or mixing == "mean_preserving"
        self.copies = Copies(self.tensors, compressors, len(part.senders), part.position, keeps_own)
        self._weights = [
            np.array(part.weights, t.dtype) * np.dtype(t.dtype).type(rate)
            for t, rate in zip(self.tensors, rates or [1.0] * len(self.tensors), strict=True)
        ]
        self._at = payloads_at(len(self.tensors))
        self.capacity = self._at + self.copies.most_bytes
        """The most bytes that a message can take."""
        self.tally = GossipTally(
            [t.name for t in self.tensors], [t.raw_bytes for t in self.tensors], self._at, len(part.receivers), traced
        )
        self._payloads: dict[int, Bytes] = {}

    def start_from(self, arrays: Sequence[Array | None]) -> None:
        """Take this rank's own values for what it knows of its neighbours, before any of them has sent."""
        self.copies.start_from(arrays)

    def all_agree_on(self, arrays: Sequence[Array]) -> None:
        """Take these values, which all ranks hold now, for all copies, without a message."""
        self.start_from(arrays)
        finite = self.watch.take_as_sent(self._norms(arrays))
        self.copies.needs_whole = ~finite

    # -- sending -----------------------------------------------------------------------------------------------------

    def decide(self, arrays: Sequence[Array | None]) -> npt.NDArray[np.bool_]:
        """Count a pass, and tell which tensors `write` will send; None, of a frozen tensor, is not.

        Raises:
            ValueError: an array has another size or dtype than its tensor.
        """
        self._check(arrays)
        absent = np.array([x is None for x in arrays], np.bool_)
        norms = self._norms(arrays)
        changes = self.copies.distances(arrays) if self._measures_change else None
        self.due = self.watch.decide(norms, changes, absent)
        # a difference to what is not finite is not finite: the whole tensor must go, and go again when it has recovered
        finite = np.isfinite(norms)
        self.copies.needs_whole |= ~finite
        self._recovers = self.due & finite
        self.tally.count_pass(norms, self.watch.compared, self.due)
        return self.due

    def _norms(self, arrays: Sequence[Array | None]) -> npt.NDArray[np.float64]:
        return np.array([0.0 if x is None else norm(x) for x in arrays], np.float64)

    def _check(self, arrays: Sequence[Array | None]) -> None:
        # kernels trust their sizes
        for tensor, x in zip(self.tensors, arrays, strict=True):
            if x is not None and (x.size != tensor.numel or x.dtype != tensor.dtype):
                raise ValueError(
                    f"{tensor.name!r} has {x.size} elements of {x.dtype}, and had {tensor.numel} of {tensor.dtype} "
                    "when its averaging began. Wrap what has changed anew"
                )

    def write(self, arrays: Sequence[Array | None], buffer: Bytes) -> int:
        """Write the message of a pass, of the tensors that `decide` has told, into the start of `buffer`.

        Args:
            arrays: as given to `decide`.
            buffer: uint8, at least `capacity` long, on an 8-byte boundary.

        Returns:
            The number of bytes used.
        """
        at = self._at
        self._payloads = {}
        for i in np.flatnonzero(self.due).tolist():
            x = arrays[i]
            assert x is not None, "decide() leaves out what is absent"
            used = self.copies.encode(i, x, self._number, buffer[at:])
            self._payloads[i] = buffer[at : at + used]
            at += used
        self.copies.needs_whole &= ~self._recovers
        self._seal(buffer, at, self.due)
        return at

    def write_nothing(self, buffer: Bytes) -> int:
        """Write a message without tensors, of a rank that has finished, as `write` does."""
        self._seal(buffer, self._at, np.zeros(len(self.tensors), np.bool_))
        return self._at

    def write_for_late(self, arrays: Sequence[Array | None], late: npt.NDArray[np.bool_], buffer: Bytes) -> int:
        """Write the message of `write` again for a receiver that missed the last values of the tensors in `late`."""
        at = self._at
        sent = self.due | (late & np.array([x is not None for x in arrays], np.bool_))
        for i in np.flatnonzero(sent).tolist():
            x = arrays[i]
            if late[i] and x is not None:
                used = self.copies.encode_whole(i, x, buffer[at:])
            else:
                used = self._payloads[i].size
                buffer[at : at + used] = self._payloads[i]
            at += used
        seal_message(buffer, at, sent, self._number - 1, self.idle)
        return at

    def count_sent(self, sent: npt.NDArray[np.intp], message: Bytes, receivers: int = 1) -> None:
        """Count a message that went to so many receivers, by the tensors in it."""
        self.tally.total_bytes += receivers * message.size
        self.tally.messages[sent] += receivers
        for i, payload in zip(sent, wire.frames(message[self._at :], len(sent)), strict=True):
            self.tally.tensor_bytes[i] += receivers * payload.size

    def _seal(self, buffer: Bytes, nbytes: int, sent: npt.NDArray[np.bool_]) -> None:
        seal_message(buffer, nbytes, sent, self._number, self.idle)
        self._number += 1

    # -- receiving ---------------------------------------------------------------------------------------------------

    def read(self, sender: int, message: Bytes) -> None:
        """Take over a message of the sender of this number among `part.senders`.

        Raises:
            WireError: a damaged message, or one that does not follow the last one of this sender.
        """
        rank = self.part.senders[sender]
        try:
            opened = open_message(message, len(self.tensors))
            expected = self._expected[sender]
            if opened.number != expected if self._in_order else opened.number < expected:
                raise WireError(
                    f"message {opened.number} came where {expected} was expected: load states that all ranks have "
                    "saved after the same step, or none"
                )
            # all are checked before the first changes a copy
            payloads = {i: self.copies.open(i, payload) for i, payload in opened.payloads.items()}
            for i, (header, body) in payloads.items():
                self.copies.decode(i, sender, header, body)
        except WireError as error:
            raise WireError(f"rank {self.part.position}, message of rank {rank}: {error}") from error
        self._expected[sender] = opened.number + 1
        self._idle_of[sender] = opened.idle

    def end_round(self) -> None:
        """End a round, whose messages have all been read, and count it if nobody has trained in it."""
        self.idle = 1 + min([self.idle, *self._idle_of]) if self.finished else 0

    @property
    def is_over(self) -> bool:
        """Tell whether no rank trains any more; all ranks find that in the same round.

        `idle` is how long this rank knows of all ranks within so many steps of it that they have not trained. When it
        exceeds the steps that news needs, that is all ranks, and none can still find it less.
        """
        return self.idle > self.part.reach

    def reopen(self) -> None:
        """Train again after `is_over`."""
        self.finished, self.idle = False, 0
        self._idle_of = [0] * len(self._idle_of)

    # -- averaging ---------------------------------------------------------------------------------------------------

    def mix(self, arrays: Sequence[Array | None]) -> None:
        """Average each array with the neighbours' copies, in place; a frozen tensor, given as None, is left out."""
        if not self.part.senders:
            return
        self._check(arrays)
        for i, x in enumerate(arrays):
            if x is None:
                continue
            weights, copies = self._weights[i], self.copies.of_senders[i]
            if self.mixing == "stale":
                kernels.mix(x, copies, weights)
            else:
                kernels.mix_differences(x, self.copies.own[i], copies, weights)

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on: histories, thresholds and copies, as plain values and NumPy arrays."""
        return {
            "format": FORMAT,
            "position": self.part.position,
            "senders": list(self.part.senders),
            "number": self._number,
            "expected": list(self._expected),
            "watch": self.watch.state_dict(),
            **self.copies.state_dict(),
            **self.tally.state_dict(),
        }

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state and return what `load` takes over of it.

        Raises:
            StateError: no such state, of another rank or topology, other tensors or another trigger, or damaged.
        """
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        if isinstance(found, bool) or not isinstance(found, int) or found != FORMAT:
            raise StateError(f"not an event state of format {FORMAT}: its format is {found!r}")
        given = saved.record("event state", state, _SAVED)
        where = (given["position"], saved.sequence("senders of an event state", given["senders"]))
        here = (self.part.position, list(self.part.senders))
        if not saved.equal(where, here):
            raise StateError(
                f"event state of rank {where[0]} with senders {where[1]} given to rank {here[0]} with senders "
                f"{here[1]}. Load it on the rank that saved it, with the same topology"
            )
        expected = saved.sequence("expected of an event state", given["expected"], len(self._expected))
        return {
            "number": saved.integer("number of an event state", given["number"]),
            "expected": [saved.integer("a number that an event state expects", n) for n in expected],
            "copies": self.copies.check(given),
            "watch": self.watch.check(given["watch"]),
            "tally": self.tally.check(given),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            StateError: as `check`; nothing has changed then.
        """
        self.load(self.check(state))

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        self.watch.load(checked["watch"])
        self.copies.load(checked["copies"])
        self.tally.load(checked["tally"])
        self._number, self._expected = checked["number"], checked["expected"]
        if not self._in_order:
            # messages may have been under way when the states were saved, each at its own time
            self._expected = [0] * len(self._expected)
            self.copies.needs_whole[:] = True
            self.watch.force()

    def report(self) -> dict[str, Any]:
        """See `event_stats` of the optimizers."""
        return self.tally.report(self.watch.thresholds)
