"""The hook of one model: which buckets there are, which of their tensors are compressed, and what is owed of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from hvd_compress._torch.device import described, memories
from hvd_compress._torch.thrown_away import Combined, KeptAside, Steps
from hvd_compress.ddp._dense import dense_parts
from hvd_compress.ddp._given import BoundHook, Given, Sides, Staged, views_of
from hvd_compress.ddp._pipeline import Job, Pipeline, Step
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.engine import Ledger, Routing, Tensor
from hvd_compress.errors import GradientError, UnsupportedError
from hvd_compress.exchange import Account, Hosts, Pack, bucket_of

__all__ = ["ByBucket", "CommHook"]

FutureTensor = torch.futures.Future[torch.Tensor]
_Plan = list[tuple[str, ...]]

# with a static graph, the third one is the first with new buckets
_STEPS_TO_SETTLE = 3
# what is watched is compared on the device, one by one
_BUCKETS_TO_WATCH = 3


@dataclass(frozen=True)
class ByBucket(Routing):
    """Divides tensors into the buckets that DDP has, which `groups` are; small ones that follow each other join."""

    def divided(self, tensors: Iterable[Tensor], ranks: int, groups: list[list[str]] | None = None) -> list[list[str]]:
        by_name = {tensor.name: tensor for tensor in tensors}
        known = [[name for name in group if name in by_name] for group in groups or []]
        of_groups = [{name: by_name[name] for name in group} for group in self._joined_groups(known, by_name)]
        return [
            bucket
            for group in of_groups
            for bucket in super(ByBucket, self).divided(group.values(), ranks, [list(group)])
        ]

    def _joined_groups(self, groups: list[list[str]], tensors: Mapping[str, Tensor]) -> list[list[str]]:
        """Join groups up to `bucket_bytes`, counted as float32, of one type and place."""
        joined: list[list[str]] = []
        filled = 0
        for group in groups:
            nbytes = sum(4 * math.prod(tensors[name].shape) for name in group)
            kinds = {(tensors[name].dtype, tensors[name].place) for name in (*group, *(joined[-1] if joined else []))}
            if joined and filled + nbytes <= self.bucket_bytes and len(kinds) == 1:
                joined[-1] += group
                filled += nbytes
            else:
                joined.append(list(group))
                filled = nbytes
        return joined


def new_ledger(
    routing: Routing, ranks: GlooRanks, tensors: Mapping[str, torch.Tensor], plan: _Plan, hosts: Hosts | None
) -> Ledger[Staged]:
    """Make the books of tensors that come in these buckets."""

    def make_bucket(accounts: dict[str, Account], pack: Pack | None) -> Staged:
        return Staged(bucket_of(accounts, pack))

    return Ledger(
        routing, ranks.size, ranks.position, described(tensors.items()), make_bucket, [list(names) for names in plan],
        pays_debts=True, hosts=hosts, scale=1.0 / ranks.size, memory_of=memories(tensors.items()),
    )  # fmt: skip


class CommHook(BoundHook):
    """What DDP calls with each bucket whose gradients have been computed; it never waits for other ranks.

    DDP divides parameters anew after its first step, with a static graph after its second, in the order in which
    gradients came. So a step's exchanges begin with its last bucket until that is over, and then with each of them.

    Args:
        model: that is trained.
        tensors: its parameters by name.
        routing: which way they go.
        group: of the model.
        talk: the ranks.
        ranks: the same for each stage of the exchanges.
        hosts: of the ranks, where it matters.
        start_step: steps of the training that go uncompressed.
        scaler: by whose scale losses are multiplied, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        routing: ByBucket,
        group: dist.ProcessGroup,
        talk: GlooRanks,
        ranks: Sequence[GlooRanks],
        hosts: Hosts | None,
        start_step: int,
        scaler: Any,
    ) -> None:
        # DDP keeps the hook alive
        self._model = weakref.ref(model)
        self._tensors = dict(tensors)
        self._names = {p: name for name, p in tensors.items()}
        self._routing = routing
        self._group = group
        self._talk = talk
        self._hosts = hosts
        self._start_step = start_step
        self._scaler = scaler
        self.pipeline = Pipeline(talk, ranks)
        self._plan: _Plan = [tuple(reversed(self._tensors))]
        self._seen = 0
        """How many steps have shown their buckets; `_plan` was guessed at first."""
        self._is_settled = False
        """Whether DDP has divided parameters for good."""
        self._sparse: set[str] = set()
        """The tensors whose gradients are sparse."""
        self.ledger = self._new_ledger(self._plan)
        self._loaded: dict[str, Any] | None = None
        """A state that was loaded since the last step."""
        self._has_begun = False
        self._step: Step | None = None
        self._jobs: list[Job] = []
        """Those of the step that has begun."""
        self._combined: Combined | None = None
        """Of the last step, once buckets stay as they are."""
        self._watched: list[torch.Tensor] = []
        """Parameters of the buckets of this step that have come, of which `_combined` will be."""
        self._steps = Steps(tensors.values())
        self._kept_aside = KeptAside()
        self._used: set[str] | None = None
        """The parameters whose gradients this rank has computed since they were shown last."""
        if self._finds_unused():
            self._used = set()
            for name, p in tensors.items():
                p.register_post_accumulate_grad_hook(partial(_note_use, weakref.ref(self), name))
        self._sides = Sides()

    def __call__(self, bucket: GradBucket) -> FutureTensor:
        """Take a bucket; returns what DDP waits for."""
        if self._step is None or self._step.is_whole:
            self._begin()
        step, given = self._step, self._given(bucket)
        shown = {name for job in self._jobs for name in job.given.names}
        if step is None or not shown.isdisjoint(given.names):
            raise GradientError(
                f"a backward pass brings {given.names[0]!r} a second time, and other tensors of DDP have not come: a "
                "pass before it has failed, or went on at the same time. Begin again with a model wrapped anew"
            )
        inner: FutureTensor = torch.futures.Future(devices=[given.buffer.device] if given.buffer.is_cuda else None)
        job = Job(step, given, inner)
        if self._used is not None:
            job.used = self._used.intersection(given.names)
            self._used.difference_update(given.names)
        self._jobs.append(job)
        future = inner.then(partial(_result, step))
        step.is_whole = given.is_last
        self._proceed(job)
        self._watch(bucket.parameters(), given)
        return future

    # -- steps -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.pipeline.failure is not None:
            raise self.pipeline.failure
        if self._step is not None and self._jobs and not self._step.has_ended.is_set():
            raise GradientError(
                "a backward pass begins before the one before it has ended; DDP takes one after another"
            )
        self._refuse_join()
        if not self._has_begun:
            # a state that one rank alone has loaded: ranks would begin to compress, and draw numbers, at other steps
            self._has_begun = True
            self._talk.agree({"steps made before": self.ledger.steps})
        self._look_back()
        if self._kept_aside.is_wanted:
            self._kept_aside.keep(self.ledger if self._is_settled else None)
        self._step, self._jobs = Step(), []
        _raise_at_end(self._step)

    def _watch(self, parameters: Sequence[torch.Tensor], given: Given) -> None:
        """Remember a parameter of the last bucket and of some others, to see whether this step's gradients are used."""
        if not self._is_settled or not (given.is_last or given.number < _BUCKETS_TO_WATCH):
            return
        small = min((p for p in parameters if p.grad is not None), key=torch.Tensor.numel, default=None)
        if given.is_last:
            is_warm = self.ledger.steps >= self._start_step
            if small is not None and is_warm and self.ledger.owes:
                self._combined = Combined(small, self._watched)
            self._watched = []
            self._steps.were_made = False
        elif small is not None:
            self._watched.append(small)

    def _look_back(self) -> None:
        """Owe what was owed before the last step if nobody has used its gradients."""
        combined, self._combined, self._watched = self._combined, None, []
        is_kept = self._step is not None and self._step.is_kept
        if combined is None or not is_kept or self._steps.were_made:
            return
        if combined.were_thrown_away():
            self._kept_aside.go_back(self.ledger)

    def _proceed(self, job: Job) -> None:
        """Hand over this bucket, or all of the step with its last one."""
        number, names = job.given.number, job.given.names
        if self._is_settled and number == 0 and self._plan[0] != names:
            self._is_settled = False
        if self._is_settled:
            if number >= len(self._plan) or self._plan[number] != names:
                raise GradientError(
                    f"bucket {number} of DDP holds {', '.join(names[:3])}, ..., and held other tensors in the steps "
                    "before. Wrap the model anew after it has changed"
                )
            self._submit(job)
            return
        if job.given.is_last:
            # DDP sends sparse gradients, too, in buckets of their own
            sparse = {name for job in self._jobs if job.given.buffer.is_sparse for name in job.given.names}
            self._adopt([job.given.names for job in self._jobs], sparse)
            for each in self._jobs:
                self._submit(each)

    def _adopt(self, plan: _Plan, sparse: set[str]) -> None:
        """Make exchanges of these buckets, which inherit what is owed."""
        self._refuse_unseen(plan)
        self._seen += 1
        is_known = plan == self._plan and sparse == self._sparse
        self._is_settled = is_known and self._seen >= _STEPS_TO_SETTLE
        if is_known:
            return
        before, self._plan, self._sparse = self.ledger, plan, sparse
        self.ledger = self._new_ledger(plan)
        if self._loaded is not None:
            # as it was saved: what an owner owes stays where it is if its share is the same
            self.ledger.load_state_dict(self._loaded)
        else:
            self.ledger.inherit(before)

    def _refuse_unseen(self, plan: _Plan) -> None:
        """Raise GradientError for parameters that DDP does not reduce: ranks would drift apart without a word."""
        shown = {name for names in plan for name in names}
        unseen = [name for name in self._tensors if name not in shown]
        if unseen:
            raise GradientError(
                f"DDP has no gradient of {unseen[0]!r}, which asked for none when DDP wrapped the model, and did when "
                "ddp.register_comm_hook was called. Unfreeze parameters first, then wrap the model, then register"
            )

    def _new_ledger(self, plan: _Plan) -> Ledger[Staged]:
        dense = [names for names in plan if not self._sparse.intersection(names)]
        return new_ledger(self._routing, self._talk, self._tensors, dense, self._hosts)

    def _submit(self, job: Job) -> None:
        """Start what goes uncompressed, and hand over the rest."""
        self._loaded = None
        if job.given.number == 0 and self._scaler is not None:
            # a scale lies on the device, and asking for it waits: not here, unless debts travel from here
            job.before = self._rescale
            if self.ledger.debts:
                self._rescale()
        is_warm = self.ledger.steps >= self._start_step
        dense = job.take_exchanges(self.ledger) if is_warm else list(job.given.names)
        job.finds_unused = is_warm and self._finds_unused()
        if is_warm:
            job.pay_debts(self.ledger, dense)
        job.dense = dense_parts(job.given, dense, self._routing.compressor_of) if dense else []
        for part in job.dense:
            part.start(self._group)
        self.pipeline.submit(job, self.ledger)

    def _rescale(self) -> None:
        self.ledger.set_loss_scale(float(self._scaler.get_scale()))

    # -- what DDP says -----------------------------------------------------------------------------------------------

    def _given(self, bucket: GradBucket) -> Given:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        names = [self._name_of(p) for p in parameters]
        views = [buffer] if buffer.is_sparse else views_of(buffer, parameters)
        side = self._sides.of(buffer.device)
        # in the first step of a static graph DDP shows all buckets at its end, and calls each of them the first
        count = sum(len(job.given.names) for job in self._jobs) + len(names)
        is_last = bucket.is_last() or count == len(self._tensors)
        return Given(len(self._jobs), buffer, dict(zip(names, views, strict=True)), is_last, side)

    def _name_of(self, p: torch.Tensor) -> str:
        name = self._names.get(p)
        if name is None:
            model: Any = self._model()
            frozen = [n for n, q in model.module.named_parameters() if q is p] if model is not None else []
            if frozen:
                raise GradientError(
                    f"{frozen[0]!r} asked for gradients when DDP wrapped the model, and was frozen when "
                    "ddp.register_comm_hook was called. Freeze parameters first, then wrap the model, then register"
                )
            raise GradientError(
                f"DDP has a parameter of shape {tuple(p.shape)} that the model did not have when "
                "ddp.register_comm_hook was called. Register after the model is complete"
            )
        return name

    def _finds_unused(self) -> bool:
        """Whether DDP may leave the gradient of a parameter alone that no rank has used."""
        model: Any = self._model()
        return model is not None and bool(model.find_unused_parameters or model.static_graph)

    def _refuse_join(self) -> None:
        """Raise UnsupportedError in a `Join` whose divisor changes."""
        model: Any = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UnsupportedError(
                "Join(divide_by_initial_world_size=False) with ddp.register_comm_hook: what ranks owe is in units of a "
                "mean over all of them. Use divide_by_initial_world_size=True, which is the default"
            )

    # -- state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state, now and in the buckets that DDP will show."""
        self.ledger.load_state_dict(state)
        self._loaded = state


def _note_use(hook: weakref.ref[CommHook], name: str, p: torch.Tensor) -> None:
    """Note that a backward pass has computed a gradient; this comes before DDP hears of it."""
    alive = hook()
    if alive is not None and alive._used is not None:
        alive._used.add(name)


def _result(step: Step, future: FutureTensor) -> torch.Tensor:
    if step.failure is not None:
        raise step.failure
    return future.value()


def _raise_at_end(step: Step) -> None:
    """Let the backward pass raise what has ended the step, as it is.

    DDP makes a RuntimeError of what a future holds. Its own callback comes after this one, and finds futures complete.
    """

    def wait() -> None:
        if not step.is_whole:
            # parameters without a gradient: DDP tells that in the next forward pass
            return
        step.has_ended.wait()
        if step.failure is not None:
            raise step.failure

    try:
        torch.autograd.Variable._execution_engine.queue_callback(wait)
    except RuntimeError:
        # a rank that has joined: it answers others' backward passes, and makes none
        return
