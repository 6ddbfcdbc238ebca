"""Take tensors that share an exchange through its stages on one rank: what each collective sends, and when it can.

The order is: `give` every gradient, `parcel`, collective, `advance`, collective, ..., `arrive`, and, when the payloads
of the whole step have arrived, `finish`. Gradients are only read, and residuals are renewed where they lie. Taking a
step back adds to the residuals what was sent, and subtracts the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.compressors.tables import array_at
from hvd_compress.errors import WireError
from hvd_compress.exchange import message
from hvd_compress.exchange.account import GRADIENTS, SUMS, Account
from hvd_compress.exchange.inside import Inside, Parcel
from hvd_compress.exchange.inside_compressed import inside_of
from hvd_compress.exchange.outbox import NARROW, Outbox, by_kind, computed_in
from hvd_compress.exchange.pack import Pack
from hvd_compress.exchange.table import Damaged, Table
from hvd_compress.exchange.tally import BucketTally
from hvd_compress.memory import aligned

__all__ = ["Bucket"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_LARGE = 2**18  # elements from which on a tensor is encoded as soon as it is there, while others are computed


class _Arrived(NamedTuple):
    """The payloads of a message that has come.

    Args:
        received: what keeps their memory on the host.
        at: where each lies on the host.
        places: where each lies for kernels.
        sizes: how many bytes it may take.
        flags: what its header says.
    """

    received: Bytes
    at: Numbers
    places: Numbers
    sizes: Numbers
    flags: Numbers


class Bucket:
    """Runs the stages of tensors that share an exchange, on one rank.

    Args:
        accounts: of the compressed tensors by name, with plans that were made together; the same order on all ranks.
        pack: of small tensors that travel beside them, if there are any.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit
        >>> from hvd_compress.exchange import Account, Bucket, plan_together
        >>> plans = plan_together("allgather", {"w": ((4,), OneBit())}, ranks=1)
        >>> bucket = Bucket({"w": Account("w", plans["w"], OneBit(), position=0)})
        >>> bucket.give("w", np.array([1, -1, 2, -2], np.float32))
        True
        >>> bucket.arrive(bucket.parcel().buffer)  # what an allgather among one rank brings
        True
        >>> bucket.finish(keep=True, scale=1.0)["w"]
        array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)
    """

    def __init__(self, accounts: Mapping[str, Account], pack: Pack | None = None) -> None:
        self.accounts = dict(accounts)
        self.pack = pack
        self._all = [*self.accounts.values(), *([] if pack is None else [pack.account])]
        self.tensors = [*self.accounts, *([] if pack is None else pack.members)]
        """The names of all tensors, in the order in which their gradients are expected."""
        self._numbers = {account.name: i for i, account in enumerate(self._all)}
        self._packed = -1 if pack is None else len(self._all) - 1
        """The number of the pack."""
        first = self._all[0]
        self.exchange, self.ranks = first.plan.exchange, first.plan.ranks
        self.position = first.position
        self.memory = first.memory
        """Where gradients come from, and residuals lie."""
        self.root = first.plan.root
        """With a parameter server, the rank that sums."""
        self._last, self._owned = message.arriving(self._all), message.owned(self._all)
        made = message.made(self._all)
        self.collectives = first.plan.collectives
        """What follows each stage."""
        if self.root is not None and not made.fixed_size:
            # a broadcast has a shape that all ranks must know
            self.collectives = (*self.collectives[:-1], "allgather")
        self._is_broadcast = self.collectives[-1] == "broadcast"
        self._gradients = Outbox(message.sent(self._all), self._all, GRADIENTS)
        # a rank that is not the root needs memory for what it receives
        answer_bytes = self._last.nbytes if self._is_broadcast else None
        self._answers = Outbox(made, self._all, SUMS, nbytes=answer_bytes)
        self._inside = inside_of(self._all)
        # on a device, a launch for each would take longer than what it encodes
        alone = self._inside is None and self.memory.is_host
        self._large = {i for i, a in enumerate(self._all) if a.plan.numel >= _LARGE and alone}
        self.tally = BucketTally(self._all)
        self._inboxes: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        """Memory of a device for what the first and the last collective bring."""
        self._sums: dict[int, Any] = {}
        self._kinds_of_sums: dict[int, str] = {}
        self._sums_at = np.zeros(len(self._all), np.int64)
        self._forget()

    def _forget(self) -> None:
        """Forget the step, and be ready for the next one."""
        self._gradients.end()
        self._answers.end()
        if self._inside is not None:
            self._inside.end(keep=False)
        count = len(self._all)
        self._given: dict[int, Any] = {}
        """The gradients of this step, by the number of their tensors; None for those that the caller keeps."""
        self._moved: dict[int, Any] = {}
        """Where results go that are not to overwrite their gradients."""
        self._waiting: list[int] = []
        self._skipped: set[int] = set()
        self._kinds: dict[int, str] = {}
        """The types of the gradients that are not float32."""
        self._lost = np.zeros(count, bool)
        """Whose gradients are not what they were when they were encoded."""
        self._gradients_at, self._outs_at = np.zeros(count, np.int64), np.zeros(count, np.int64)
        """Where gradients lie; and where results go."""
        self._values_at = self._gradients_at
        """Where lies what is encoded: gradients, or the sums of those of this host."""
        self._host_sums: dict[int, Array] = {}
        self._arrived: _Arrived | None = None
        self._arriving: list[tuple[str, Table]] = []
        """The tables that `finish` decodes, with the types of results."""
        self._verdicts: list[bool | Callable[[], bool]] = []
        self._outgoing: Outbox | None = None
        self._cargo: Callable[[], Parcel] | None = None
        """Returns what the next collective sends."""

    @property
    def name(self) -> str:
        """The name of its collectives, which is that of its first tensor."""
        return self._all[0].name

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of its tensors."""
        if self.pack is None or name in self.accounts:
            return self.accounts[name].plan.shape
        return self.pack.shapes[name]

    @property
    def answer_bytes(self) -> int:
        """The most bytes that the last collective brings."""
        return self._last.nbytes

    def expected(self, collective: str) -> list[int] | None:
        """Return how many bytes each rank sends here in a collective; None where only the sender knows."""
        message = {"alltoall": self._owned, "allgather": self._last}.get(collective)
        if message is None or self._inside is not None or not message.fixed_size:
            return None
        return message.slots_of_runs

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._given)

    # -- the first stage -----------------------------------------------------------------------------------------

    def waits(self, name: str) -> bool:
        """Tell whether a float32 gradient of this tensor is not touched before all of the bucket are here."""
        return self._numbers.get(name) not in self._large

    def give(self, name: str, gradient: Any) -> bool:
        """Take a gradient, in any order; returns whether it was the last one, so that `parcel` is to be sent.

        Args:
            name: of the tensor.
            gradient: flat array of the bucket's memory, float32 or float64 (16-bit floats, too, on devices), read until
                the step has ended; then `finish` overwrites it with the result, unless `move` has named another place
                for that. A small tensor is copied. None leaves the tensor out of this step, on all ranks alike.

        Returns:
            False, too, if all tensors are left out.
        """
        if self.pack is not None and name in self.pack.shapes:
            return self.pack.put(name, gradient) and self.give(self.pack.name, self.pack.buffer)
        number = self._numbers[name]
        if gradient is None:
            self._skipped.add(number)
        else:
            if gradient.dtype != np.float32 and (kind := self.memory.kind_of(gradient)) != NARROW:
                self._kinds[number] = kind
            self._given[number] = gradient
            self._gradients_at[number] = self._outs_at[number] = self.memory.address(gradient)
            self._encode_or_wait([number])
        return self._is_complete()

    def give_at(self, addresses: Mapping[str, int], kinds: Mapping[str, str] | None = None) -> bool:
        """Do as `give`, for contiguous gradients that the caller keeps where they are.

        Args:
            addresses: by the names of the tensors.
            kinds: the types of those that are not float32.
        """
        numbers = [self._numbers[name] for name in addresses]
        self._given.update(dict.fromkeys(numbers))
        if kinds:
            self._kinds.update({self._numbers[name]: kind for name, kind in kinds.items()})
        self._gradients_at[numbers] = self._outs_at[numbers] = list(addresses.values())
        self._encode_or_wait(numbers)
        return self._is_complete()

    def give_small(self, gradients: Mapping[str, Any]) -> bool:
        """Do as `give`, for small tensors that travel uncompressed."""
        assert self.pack is not None
        return self.pack.put_all(gradients) and self.give(self.pack.name, self.pack.buffer)

    def move(self, name: str, out: Any) -> None:
        """Write the result of this step into `out`, flat and of the gradient's type, and not into the gradient."""
        number = self._numbers[name]
        self._moved[number] = out
        self._outs_at[number] = self.memory.address(out)

    def lose_gradient(self, name: str) -> None:
        """Note that a gradient was overwritten: a step taken back cannot subtract it, so it stays owed."""
        self._lost[self._numbers[name]] = True

    def _encode_or_wait(self, numbers: list[int]) -> None:
        large = [i for i in numbers if i in self._large] if self._large else []
        self._waiting += [i for i in numbers if i not in self._large] if large else numbers
        if large:
            self._encode(large)

    def _is_complete(self) -> bool:
        if len(self._given) + len(self._skipped) < len(self._all):
            return False
        if not self._given:
            self._skipped = set()
            return False
        if self._inside is None:
            self._encode_rest()
            self._cargo = self._payloads
        else:
            self._take_inside(self._inside)
            self._cargo = self._cut
        return True

    def _take_inside(self, inside: Inside) -> None:
        begin = time.perf_counter()
        gradients = {
            i: array_at(self._gradients_at[i], self._all[i].plan.numel, self._kinds.get(i, NARROW)) for i in self._given
        }
        inside.take(gradients, self._skipped)
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin

    def _encode_rest(self) -> None:
        if self._waiting:
            self._encode(self._waiting)
        if self._skipped:
            self._gradients.say(self._skipped)
        if not self.memory.is_host:
            self._gradients.fetch()
        self._outgoing = self._gradients

    def _encode(self, numbers: Sequence[int]) -> None:
        """Encode gradients, or the sums of those of this host, into the slots of the first message."""
        begin = time.perf_counter()
        self._gradients.begin()
        self._gradients.encode(numbers, self._values_at, self._kinds)
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin

    def is_loaded(self) -> bool:
        """Tell whether `parcel` has nothing to wait for; never waits."""
        return self._outgoing is None or self._outgoing.is_here()

    def wait(self) -> None:
        """Wait for what `parcel` would wait for."""
        if self._outgoing is not None:
            self._outgoing.wait()

    def parcel(self) -> Parcel:
        """Return what the next collective sends: the first one once every tensor is here, others after `proceed`.

        Raises:
            WireError: a payload that `proceed` was given is truncated, corrupted or foreign.
        """
        if self._cargo is None:
            raise RuntimeError(f"parcel() of {self.name!r}, of which nothing is to be sent")
        return self._cargo()

    def _cut(self) -> Parcel:
        """Cut gradients up inside of this host."""
        assert self._inside is not None
        parcel = self._inside.cut()
        sent = self._inside.sent_bytes()
        self.tally.add_bytes("bytes_sent_inside", np.array([*sent], np.int64), np.array([*sent.values()]))
        return parcel

    def _payloads(self) -> Parcel:
        sizes = self._gradients.close()
        sent = self._gradients.message
        self.tally.count("bytes_sent", sent, sizes)
        of_runs = sent.slots_of_runs if sent.fixed_size else sent.sizes_of_runs(sizes)
        if not self.exchange.has_owners:
            return Parcel(self._gradients.buffer[: of_runs[0]])
        # the whole buffer, though not all of it is sent: Horovod's response cache wants equal shapes in every step
        is_even = sent.fixed_size and len(set(of_runs)) == 1
        return Parcel(self._gradients.buffer, None if is_even else tuple(of_runs))

    # -- the stages between collectives ------------------------------------------------------------------------------

    def advance(self, collective: str, received: Bytes) -> Parcel:
        """Do as `proceed`, and return what the next collective sends."""
        self.proceed(collective, received)
        return self.parcel()

    def proceed(self, collective: str, received: Bytes) -> None:
        """Take what `collective`, which is not the last one, has brought, and make what the next one sends.

        Raises:
            WireError: a payload, or a message, is truncated, corrupted or foreign; `parcel` may raise it, too.
        """
        if collective != "alltoall":
            self._pass_on(collective, received)
            return
        begin = time.perf_counter()
        received = aligned(received)
        at, sizes = self._owned.cut(received)
        self.tally.count("bytes_received", self._owned, sizes)
        summed = [i for i in self._given if self._all[i].owned is not None]
        self._sum(summed, received, at, sizes)
        bad = {i for i in summed if not self._precondition(i)} if self._all[0].accumulator is not None else set()
        self._answers.begin()
        kinds = self._kinds_of_values() if self._kinds else {}
        self._answers.encode([i for i in summed if i not in bad], self._sums_at, kinds)
        if bad:
            self._answers.say(bad, absent=False)
        if self._skipped:
            self._answers.say(self._skipped)
        if not self.memory.is_host:
            self._answers.fetch()
        self._outgoing, self._cargo = self._answers, self._answered
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin

    def _pass_on(self, collective: str, received: Bytes) -> None:
        """Take what a collective inside of this host has brought."""
        if self._inside is None:
            raise RuntimeError(f"{collective!r} of {self.name!r}, whose exchange is {self.exchange.id!r}")
        if collective != "scatter_inside":
            passed_on = self._inside.passed_on(received)
            self._cargo = lambda: passed_on
            return
        begin = time.perf_counter()
        try:
            self._host_sums = self._inside.sums(received)
        except Damaged as error:
            raise self._named(error) from error
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin
        self._values_at = self._values_at.copy()
        for i, total in self._host_sums.items():
            self._values_at[i] = self.memory.address(total)
        self._encode_rest()
        self._cargo = self._payloads

    def _answered(self) -> Parcel:
        """Return the payloads of the sums."""
        begin = time.perf_counter()
        if not self.memory.is_host:
            self._settle()
        sizes = self._answers.close()
        self.tally.count("bytes_sent", self._answers.message, sizes)
        self.tally.seconds["encode_seconds"] += time.perf_counter() - begin
        if self._is_broadcast:
            return Parcel(self._answers.buffer)
        answers = self._answers.buffer[: int(sizes.sum())]
        return Parcel(answers) if self._inside is None else self._inside.between(answers)

    def _settle(self) -> bool:
        """Hear what checks have found; returns whether all is finite.

        Raises:
            WireError: a payload is truncated, corrupted or foreign.
        """
        verdicts, self._verdicts = self._verdicts, []
        try:
            for i, verdict in enumerate(verdicts):
                verdicts[i] = verdict if isinstance(verdict, bool) else verdict()
        except Damaged as error:
            raise self._named(error) from error
        return all(verdicts)

    def _sum(self, numbers: Sequence[int], received: Bytes, at: Numbers, sizes: Numbers) -> None:
        """Decode and sum the payloads of all senders."""
        flags = np.zeros(len(self._owned.parts), np.int64)
        places = at
        if not self.memory.is_host:
            places = self.memory.receive(received, at, self._owned.nbytes, self._inboxes[0])
        try:
            for kind, held in by_kind(numbers, self._kinds_of_values() if self._kinds else {}):
                self._fit_sums(held, kind)
                for table in self._owned.tables(held):
                    verdict = table.check(places, sizes, flags, at, kind)
                    if not isinstance(verdict, bool):
                        self._verdicts.append(verdict)
                    table.decode(self._sums_at, places, sizes, flags, at, kind, 1.0)
        except Damaged as error:
            raise self._named(error) from error

    def _kinds_of_values(self) -> dict[int, str]:
        """Return the types of the sums that are not float32."""
        return {i: computed_in(kind) for i, kind in self._kinds.items()}

    def _fit_sums(self, numbers: Sequence[int], kind: str) -> None:
        for i in numbers:
            if self._kinds_of_sums.get(i) != kind:
                part = self._all[i].owned or slice(0, 0)
                total = self._sums[i] = self.memory.empty(part.stop - part.start, kind)
                self._kinds_of_sums[i], self._sums_at[i] = kind, self.memory.address(total)

    def _precondition(self, number: int) -> bool:
        accumulator = self._all[number].accumulator
        return accumulator is None or accumulator.precondition(self._sums[number])

    def arrive(self, received: Bytes) -> bool:
        """Check the last payloads; returns whether all of them, and so the sums, are finite.

        Raises:
            WireError: truncated or foreign.
        """
        received = aligned(received)
        at, sizes = self._last.cut(received)
        self.tally.count("bytes_received", self._last, sizes)
        if self._inside is not None:
            self._count_inside(sizes, self._inside)
        flags = np.zeros(len(self._last.parts), np.int64)
        places = at if self.memory.is_host else self.memory.receive(received, at, self._last.nbytes, self._inboxes[1])
        try:
            # told here, not when decoding: other tensors of the step may be final by then
            compressed = self._given.keys() if self.pack is None else self._given.keys() - {self._packed}
            self._arriving = self._tables_of(compressed)
            apart = self._tables_of(self._skipped) if self._skipped else []
            packed = self._tables_of([self._packed]) if self.pack is not None else []
            for kind, table in (*self._arriving, *apart, *packed):
                self._verdicts.append(table.check(places, sizes, flags, at, kind))
        except Damaged as error:
            raise self._named(error) from error
        self._arrived = _Arrived(received, at, places, sizes, flags)
        if self.pack is None:
            return self._settle()
        # nothing is owed of small tensors, so it does not matter whether the step is kept
        outs_at = np.zeros(len(self._all), np.int64)
        outs_at[self._packed] = self.memory.address(self.pack.buffer)
        self._decode(packed, outs_at, 1.0)
        is_finite = self.pack.arrive()
        return self._settle() and is_finite()

    def _tables_of(self, numbers: Collection[int]) -> list[tuple[str, Table]]:
        """Return the tables of the last message that tensors, by number, are decoded from, with types of results."""
        return [(kind, table) for kind, held in by_kind(numbers, self._kinds) for table in self._last.tables(held)]

    def finish(self, keep: bool, scale: float) -> dict[str, Array | None]:
        """Run the last stage: decode all tensors, and make the step's residuals final or take them back.

        Args:
            keep: False takes residuals and accumulators back to what they were before the step.
            scale: factor on the sums, such as 1 / ranks; with AdaGrad its loss scale takes the place of it.

        Returns:
            {name: sum times `scale`} of the tensors that `give` and `move` have named memory for; None for those that
            were left out. Small tensors have theirs in the pack.

        Raises:
            WireError: a payload is corrupted.
        """
        if self._arrived is None:
            raise RuntimeError(f"finish() of {self.name!r} before arrive()")
        if not keep:
            self._take_back()
        accumulator = self._all[0].accumulator
        scale_of_all = scale if accumulator is None else accumulator.loss_scale
        begin = time.perf_counter()
        try:
            self._decode(self._arriving, self._outs_at, scale_of_all)
        except WireError:
            # some of them are results by now
            self._lost |= self._outs_at == self._gradients_at
            raise
        if self.pack is not None:
            self.pack.finish(keep, scale)
        self.tally.seconds["decode_seconds"] += time.perf_counter() - begin
        for account in self._all:
            if account.accumulator is not None:
                account.accumulator.settle(keep)
            account.step += 1
        if self._inside is not None:
            self._inside.end(keep)
        self.tally.end_step(self._given)
        memory = {**self._given, **self._moved}
        results = {name: memory.get(self._numbers[name]) for name in self.accounts}
        skipped = {self._all[i].name for i in self._skipped}
        self._forget()
        return {name: result for name, result in results.items() if result is not None or name in skipped}

    def _decode(self, tables: Sequence[tuple[str, Table]], outs_at: Numbers, scale: float) -> None:
        if self._arrived is None:
            raise RuntimeError(f"nothing has arrived of {self.name!r}")
        _, at, places, sizes, flags = self._arrived
        try:
            for kind, table in tables:
                table.decode(outs_at, places, sizes, flags, at, kind, scale)
        except Damaged as error:
            raise self._named(error) from error

    def _named(self, error: Damaged) -> WireError:
        name = self._all[error.tensor].name
        return WireError(f"exchange of {name!r}, received by rank {self.position}: {error}")

    def abandon(self) -> None:
        """Forget a step in flight and make residuals and accumulators what they were before it."""
        self._take_back()
        for account in self._all:
            if account.accumulator is not None:
                account.accumulator.settle(keep=False)
        if self.pack is not None:
            self.pack.abandon()
        self._forget()

    def _take_back(self) -> None:
        """Make residuals what they were before the step."""
        if self._inside is None:
            self._gradients.take_back(self._gradients_at, self._lost)
        else:
            self._inside.take_back(self._lost)
            # the sums of this host's gradients are ours, so nobody has overwritten them
            self._gradients.take_back(self._values_at)
        self._answers.take_back(self._sums_at)

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""
        self.tally.settle()

    def _count_inside(self, sizes: Numbers, inside: Inside) -> None:
        """Count what is passed on inside of this host."""
        shard = inside.hosts.shard_of(self.position)
        parts = [i for i, part in enumerate(self._last.parts) if part.chunk in shard and part.tensor in self._given]
        passed_on = sizes[parts] * (inside.hosts.per_host - 1)
        self.tally.add_bytes("bytes_sent_inside", self._last.tensors[parts], passed_on)
