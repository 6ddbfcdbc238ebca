"""How gradients travel: through exchanges of ours or Horovod's allreduce, and which of them the next step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, cast

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.engine import Routing
from hvd_compress.errors import UnsupportedError
from hvd_compress.policy import Auto, Policy
from hvd_compress.torch._collectives import sparse_allreduce_async
from hvd_compress.torch._gradients.beginning import compare_beginnings
from hvd_compress.torch._gradients.bucket import Shipment
from hvd_compress.torch._gradients.engine import Engine, precondition
from hvd_compress.torch._gradients.handed import Handed
from hvd_compress.torch._gradients.members import Members
from hvd_compress.torch._gradients.staging import all_finite
from hvd_compress.torch._gradients.steering import Steering
from hvd_compress.torch._gradients.waits import Wait
from hvd_compress.torch._gradients.wrapping import Wrapping
from hvd_compress.torch.compression import dense_route

__all__ = ["Sender"]

_Key = str | tuple[str, ...]


class Sender:
    """Hands the gradients of a step over as they come, and brings back the combined ones.

    Args:
        wrapping: what the optimizer was wrapped with.
        members: the parameters that take gradients.
        horovods: how tensors go through Horovod's allreduce, unless a `Policy` or `Auto` says otherwise.
    """

    def __init__(self, wrapping: Wrapping, members: Members, horovods: Any) -> None:
        self.wrapping = wrapping
        self.members = members
        self.engine: Engine | None = None
        """None in elastic runs, where all is Horovod's own."""
        self.make_engine: Callable[[Routing], Engine]
        self.steering: Steering | None = None
        self.waiting: dict[str, Shipment] = {}
        """The bucket of each tensor whose gradient a hook only puts there."""
        self.plain: Any = horovods
        """How all tensors go through Horovod's allreduce; None where they do not, or in different ways."""
        self.has_compared = False
        """Whether ranks know which gradients of each other are sparse; nothing is sent before."""
        self.has_loaded = False
        """Whether AdaGrad's accumulators were loaded since the last step: all ranks must do so, or they drift apart."""
        self.values: dict[str, torch.Tensor] = {}
        """Of tensors that stand for others, those whose values ranks compare in the first step."""
        self.unequal: tuple[str, int] | None = None
        """A parameter that differed between ranks in the first step, and a rank that differed from the first one."""
        self._horovods = horovods
        self._chooses = isinstance(wrapping.ours, Auto | Policy)
        self._sparse_dims: dict[str, int] = {}
        """Of the tensors that all ranks send sparse."""
        self._sent: set[str] = set()
        """Those that are handed over in this step, but for those in `waiting`."""
        self._in_flight: dict[_Key, tuple[Any, Any, Any]] = {}
        """Of a tensor or a group that Horovod reduces: handle, context, compression."""
        self._given: dict[str, torch.Tensor] = {}
        """The gradients whose own memory Horovod sums in."""
        self._group_counts: Counter[tuple[str, ...]] = Counter()
        """How many gradients of each group have come in this step."""
        self._plain_steps = 0
        """Plain steps that are not among the counters yet: counting in every hook would make short steps longer."""
        self._sparse_steps: Counter[str] = Counter()
        """In how many of these a tensor was sparse, and so not reduced."""
        self._sparse_now: set[str] = set()
        """Those that are sparse in the step that is not complete yet; it may be abandoned."""
        self._sent_itemsizes: dict[tuple[Any, torch.dtype], int] = {}

    # -- which way the next step goes ----------------------------------------------------------------------------

    def begin_way(self) -> None:
        """Between steps, with an engine that is new, or whose debts have changed: find out what hooks are to do."""
        self.begin_plain()
        self.begin_waiting()

    def begin_plain(self) -> None:
        """Find out whether the next step is Horovod's own."""
        engine = self.known_engine()
        if not self._chooses:
            self.plain = None if engine.owes else self._horovods
            return
        # of groups that Horovod sends, `steering` would not see when the first one starts
        way = engine.only_way if self.members.groups is None else None
        self.plain = None if way is None else dense_route(way)

    def begin_waiting(self) -> None:
        """Find out which gradients only wait for others."""
        is_each_its_own = self.members.groups is None and self.wrapping.passes == 1 and self.has_compared
        self.waiting = self.engine.waiting() if is_each_its_own and self.engine is not None else {}
        for name in self._sparse_dims if not self.wrapping.sparse_as_dense else ():
            self.waiting.pop(name, None)

    def comparing(self) -> Iterator[Wait]:
        """Let all ranks know which gradients are sparse, and whether their parameters differ; a collective call."""
        beginning = yield from compare_beginnings(
            self.members.by_name, self.values, self.has_loaded, self.wrapping.label, self.wrapping.process_set
        )
        self._sparse_dims, self.unequal = beginning.sparse_dims, beginning.unequal
        self.has_compared, self.has_loaded = True, False
        self.begin_waiting()

    def end_step(self) -> None:
        """Note that a step is complete; now and then the next one goes another way."""
        if self.engine is not None and self.plain is not None:
            self._plain_steps += 1
            self._sparse_steps.update(self._sparse_now)
        self.forget()
        if self.engine is None:
            return
        if self.steering is not None and self.steering.end():
            self.count_plain()
            followed = self.make_engine(self.steering.routing)
            followed.inherit(self.engine)
            self.engine = followed
            self.begin_way()
        elif self.plain is None:
            self.begin_plain()

    def known_engine(self) -> Engine:
        """The engine, where there is something to exchange."""
        if self.engine is None:
            raise RuntimeError("this rank exchanges nothing, and has no engine")
        return self.engine

    # -- while gradients come ------------------------------------------------------------------------------------

    def send(self, name: str, p: torch.Tensor) -> None:
        """Hand a gradient over, or one of zeros where this rank has none: all ranks issue the same collectives."""
        if self.steering is not None:
            self.steering.begin()
        if self.engine is not None and not self.has_compared:
            # `send_missing` will
            return
        self._sent.add(name)
        goes_sparse = self._goes_sparse(name, p.grad)
        if p.grad is None:
            p.grad = self._no_gradient(name, p) if goes_sparse else torch.zeros_like(p)
        elif goes_sparse and not p.grad.is_sparse:
            p.grad = p.grad.to_sparse(self._sparse_dims[name])
        _make_room(p)
        if self.engine is None or self.plain is not None:
            self._send_by_horovod(name, p.grad, goes_sparse, self.plain)
            return
        if self.wrapping.adagrad is not None:
            self.check_dense(name, p.grad)
        if self.engine.exchanges(name):
            if not goes_sparse:
                self.engine.start(name, p.grad.to_dense() if p.grad.is_sparse else p.grad)
                return
            self.engine.start(name, None)
        else:
            self.engine.progress()
        compression = self._dense_compression(name)
        if not goes_sparse:
            self._count_dense(name, p.grad, compression)
            p.grad = self.engine.with_debt(name, p.grad)
        self._send_by_horovod(name, p.grad, goes_sparse, compression)

    def send_of_group(self, name: str) -> None:
        """Note that a gradient of a group has come, and hand the group over with the last one."""
        group = self.members.group_of[name]
        self._group_counts[group] += 1
        if self._group_counts[group] == len(group):
            self._send_group(group)

    def _send_group(self, group: tuple[str, ...]) -> None:
        """A group is a bucket of ours, or one operation of Horovod's (l. 216-224) where nothing is compressed."""
        if self.engine is not None and not self.has_compared:
            return
        params = [self.members.by_name[name] for name in group]
        way = self._way_of_groups()
        if way is None or any(self._goes_sparse(n, p.grad) for n, p in zip(group, params, strict=True)):
            for name, p in zip(group, params, strict=True):
                self.send(name, p)
            return
        self._sent.update(group)
        for name, p in zip(group, params, strict=True):
            _make_room(p)
            if self.plain is None and p.grad is not None:
                # this rank owes something
                self._count_dense(name, p.grad, way)
                p.grad = self.known_engine().with_debt(name, p.grad)
        dense = [cast(torch.Tensor, p.grad) for p in params]
        sent, ctxs = zip(*[way.compress(g.to_dense() if g.is_sparse else g) for g in dense], strict=True)
        held = [self._held(n, g) if s is g else s for n, g, s in zip(group, dense, sent, strict=True)]
        handle = hvd.grouped_allreduce_async_(
            held, name=group[0] + self.wrapping.label, op=self.wrapping.op, process_set=self.wrapping.process_set
        )
        self._in_flight[group] = handle, ctxs, way

    def _way_of_groups(self) -> Any:
        """How a group goes through one operation of Horovod's; None where its tensors go one by one.

        All ranks have the same answer: unlike `plain` it does not follow from what this one owes.
        """
        if self.plain is not None or self._chooses:
            return self.plain
        engine = self.known_engine()
        return None if engine.is_used or engine.accumulators is not None else self._horovods

    def _goes_sparse(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether a tensor is gathered, not summed: the same on all ranks, whatever this one's gradient is."""
        if self.wrapping.sparse_as_dense:
            return False
        if self.engine is None:
            # as Horovod does
            return gradient is not None and gradient.is_sparse
        return name in self._sparse_dims

    def _no_gradient(self, name: str, p: torch.Tensor) -> torch.Tensor:
        dims = self._sparse_dims[name]
        indices = torch.zeros((dims, 0), dtype=torch.int64, device=p.device)
        values = torch.zeros((0, *p.shape[dims:]), dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)

    def _send_by_horovod(self, name: str, gradient: torch.Tensor, goes_sparse: bool, compression: Any) -> None:
        """Horovod's allreduce of a gradient (l. 187-214), under a name of this optimizer's own."""
        wrapping = self.wrapping
        if goes_sparse:
            self._sparse_now.add(name)
            gathered = sparse_allreduce_async(gradient, name + wrapping.label, wrapping.op, wrapping.process_set)
            self._in_flight[name] = gathered, None, compression
            return
        sent, ctx = compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
        if sent is gradient:
            sent = self._held(name, gradient)
        factor = wrapping.gradient_predivide_factor if wrapping.op == hvd.Average else 1.0
        handle = hvd.allreduce_async_(
            sent, name=name + wrapping.label, op=wrapping.op, prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=wrapping.process_set,
        )  # fmt: skip
        self._in_flight[name] = handle, ctx, compression

    def _held(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as Horovod's thread is given it: it stays where it is if the user gives `.grad` other memory."""
        self._given[name] = gradient
        return gradient.detach()

    def _dense_compression(self, name: str) -> Any:
        """How a tensor goes through Horovod's allreduce; Horovod itself knows one way for all."""
        if not self._chooses:
            return self._horovods
        return dense_route(self.known_engine().routing.compressor_of(name))

    def check_dense(self, name: str, gradient: torch.Tensor) -> None:
        """Raise UnsupportedError for a sparse gradient that AdaGrad cannot take."""
        if gradient.is_sparse and not self.wrapping.sparse_as_dense:
            raise UnsupportedError(
                f"{self.wrapping.adagrad!r} with a sparse gradient of {name!r}: its elements would need accumulators "
                "of their own on all ranks. Use sparse_as_dense=True"
            )

    # -- when all have come --------------------------------------------------------------------------------------

    def send_missing(self, handed: Handed) -> None:
        """Hand over what no hook has handed over, in the order of the parameters."""
        members, engine = self.members, self.engine
        if members.groups is not None and self._way_of_groups() is not None:
            self._send_missing_groups(handed)
        if self.wrapping.adagrad is not None and engine is not None:
            # exchanges were laid out with the tensors that are frozen now
            for name in members.resting:
                if engine.exchanges(name):
                    engine.start(name, None)
        if len(self._sent) == len(members.by_name):
            return
        started = self._sent.union(engine.put_off) if engine is not None and self.waiting else self._sent
        for name, p in [(n, p) for n, p in members.by_name.items() if n not in started]:
            self.send(name, p)
            # it has one now, if it had none
            handed.gradients[name] = cast(torch.Tensor, p.grad)

    def _send_missing_groups(self, handed: Handed) -> None:
        """Hand over the groups in which a tensor got no gradient, where all is Horovod's own.

        Its `synchronize` (l. 259-271) would send their tensors one by one, and ranks that have all gradients the group:
        each would wait for the other for ever.
        """
        by_name = self.members.by_name
        for group in self.members.groups or ():
            if not self._sent.isdisjoint(group) or any(self._goes_sparse(name, by_name[name].grad) for name in group):
                continue
            for name in group:
                p = by_name[name]
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
                handed.gradients[name] = p.grad
            self._send_group(group)

    def arriving(self) -> Generator[Wait, None, bool]:
        """Wait until all has arrived, in parts; returns whether all payloads are finite."""
        engine = self.engine
        if engine is not None and not engine.buckets and (met := next(iter(engine.dense), "")) in self._in_flight:
            # see `Wrapping.agree_again`: this is refused if another rank's parameters have changed
            self._in_flight = {met: self._in_flight[met], **self._in_flight}
        finite = True if engine is None else (yield from engine.waits())
        reduced = [handle for handle, _, _ in self._in_flight.values() if isinstance(handle, int)]
        if reduced:
            yield Wait(lambda: all(map(hvd.poll, reduced)))
        return finite

    def results(self, finite: bool) -> tuple[dict[str, torch.Tensor], bool]:
        """Return all combined gradients, and whether what is owed has changed with them.

        One value that is not finite takes all residuals back.

        In place of Horovod's `synchronize` (l. 255-308), whose loops would take as long as ours.
        """
        engine = self.engine
        if engine is None:
            return dict(self._reduced()), False
        owes = engine.owes
        results = {}
        for name, output in self._reduced():
            # where nothing is owed, nothing depends on it
            finite = finite and (not owes or all_finite(output))
            if self.wrapping.adagrad is not None:
                finite = precondition(engine, name, output) and finite
            results[name] = output
        # plain steps are counted when somebody asks
        results |= {} if self.plain is not None else engine.combine(keep=finite)
        engine.settle(keep=finite)
        return results, owes and finite

    def _reduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for all that Horovod has reduced itself; yields names and sums."""
        for key, (handle, ctx, compression) in self._in_flight.items():
            if callable(handle):
                # sparse gradients travel as they are
                yield cast(str, key), handle()
            elif isinstance(key, tuple):
                for name, output, its_ctx in zip(key, hvd.synchronize(handle), ctx, strict=True):
                    yield name, self._where_it_lies(name, compression.decompress(output, its_ctx))
            else:
                yield key, self._where_it_lies(key, compression.decompress(hvd.synchronize(handle), ctx))

    def _where_it_lies(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """The gradient itself, if the sum was written over it and it has not moved; else the sum."""
        given = self._given.get(name)
        return output if given is None or given.data_ptr() != output.data_ptr() else given

    def forget(self) -> None:
        """Forget what was handed over in a step that has ended."""
        self._sent, self._in_flight, self._given = set(), {}, {}
        self._sparse_now.clear()
        self._group_counts.clear()

    def abandon(self) -> None:
        """Wait for what is in flight and forget it; residuals stay as before the step."""
        if self.engine is not None:
            self._wait_for_horovod()
            self.engine.abandon()
        if self.steering is not None:
            self.steering.abandon()
        self.forget()

    def _wait_for_horovod(self) -> None:
        """Wait for Horovod's own allreduces: it forgets them here, and then refuses their names in the next step.

        Those that fail are over, too: an elastic run restores its state after a step that has failed.
        """
        for handle, _, _ in self._in_flight.values():
            with suppress(HorovodInternalError):
                if callable(handle):
                    handle()
                else:
                    hvd.synchronize(handle)

    # -- counters ------------------------------------------------------------------------------------------------

    def count_plain(self) -> None:
        """Bring the counters up to date; before anything that reads them or changes the way."""
        steps, sparse = self._plain_steps, self._sparse_steps
        self._plain_steps, self._sparse_steps = 0, Counter()
        if steps:
            engine = self.known_engine()
            engine.count_step(steps)
            for name in engine.dense:
                self._count_dense(name, self.members.by_name[name], self.plain, steps - sparse[name])

    def forget_plain(self) -> None:
        """Leave out plain steps that the counters do not have yet: ranks go back to before them."""
        self._plain_steps, self._sparse_steps = 0, Counter()

    def _count_dense(self, name: str, tensor: torch.Tensor, compression: Any, times: int = 1) -> None:
        kind = compression, tensor.dtype
        if kind not in self._sent_itemsizes:
            # asked once, not in every hook
            sent, _ = compression.compress(torch.zeros(1, dtype=tensor.dtype))
            self._sent_itemsizes[kind] = sent.element_size()
        # no nbytes: sparse gradients that are made dense have none
        numel, itemsize = tensor.numel(), tensor.element_size()
        self.known_engine().count_dense(name, numel * self._sent_itemsizes[kind], numel * itemsize, times)


def _make_room(p: torch.Tensor) -> None:
    """Give each element of a gradient memory of its own: `expand` makes one memory stand for several."""
    if p.grad is not None and not p.grad.is_sparse and 0 in p.grad.stride():
        p.grad = p.grad.contiguous()
