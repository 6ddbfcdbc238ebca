"""What an optimizer was wrapped with, and what is made of it for the parameters that take gradients now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._torch.device import described, told_places
from hvd_compress.compressors import Compressor
from hvd_compress.elastic import is_elastic
from hvd_compress.engine import Routing, describe, description
from hvd_compress.errors import MismatchError
from hvd_compress.exchange import AdaGrad, Exchange
from hvd_compress.fingerprint import Place
from hvd_compress.policy import Auto, Policy
from hvd_compress.torch._agreement import require_agreement_through
from hvd_compress.torch._gradients.bucket import collective_name
from hvd_compress.torch._gradients.engine import Engine
from hvd_compress.torch._gradients.owners import in_use
from hvd_compress.torch._gradients.steering import Steering
from hvd_compress.torch._ranks import TorchRanks

if TYPE_CHECKING:
    from hvd_compress.torch._gradients.combiner import Combiner
    from hvd_compress.torch._gradients.sending import Sender

__all__ = ["Wrapping", "label_for"]


@dataclass
class Wrapping:
    """What an optimizer was wrapped with.

    Args:
        compression: as the user gave it.
        ours: what of it needs exchanges of this package, or None.
        op: Horovod's.
        exchange: see `DistributedOptimizer`.
        min_numel: likewise.
        bucket_bytes: likewise.
        groups: likewise.
        adagrad: likewise.
        process_set: the ranks that take part.
        scale: factor on the sum over ranks.
        gradient_predivide_factor: see `DistributedOptimizer`.
        passes: its `backward_passes_per_step`, which may be set anew.
        sparse_as_dense: see `DistributedOptimizer`.
        label: what tells collectives from those of other optimizers with tensors of the same names.
    """

    compression: Any
    ours: Compressor | Policy | Auto | None
    op: Any
    exchange: Exchange
    min_numel: int
    bucket_bytes: int
    groups: Any
    adagrad: AdaGrad | None
    process_set: hvd.ProcessSet
    scale: float
    gradient_predivide_factor: float
    passes: int
    sparse_as_dense: bool
    label: str = ""
    on_refusal: Callable[[str], None] = lambda problem: None
    """Called with what ends a step on all ranks of the process set, before it is raised: others may wait for them."""
    number: int = field(default_factory=partial(next, count()))
    """Of this wrapping among those of this process."""

    @property
    def is_carried(self) -> bool:
        """Whether this is an elastic run, where ranks keep something from step to step: residuals, or accumulators."""
        return is_elastic() and (self.ours is not None or self.adagrad is not None)

    @property
    def name(self) -> str:
        """The name of the compressor in statistics."""
        known = isinstance(self.compression, Compressor | Auto | Policy)
        return repr(self.compression) if known else str(describe(self.compression))

    def description(self, groups: list[dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
        """What ranks compare: settings, and all parameters; `names` by the parameters' ids."""
        params = [p for group in groups for p in group["params"]]
        positions = {id(p): i for i, p in enumerate(params)}
        together = self.groups
        if isinstance(together, list):
            together = [[positions.get(id(p)) for p in group] for group in together]
        parameters = [[names.get(id(p), i), list(p.shape), str(p.dtype), p.requires_grad] for i, p in enumerate(params)]
        return description(
            self.compression, self.op, parameters,
            exchange=self.exchange.told_among(self.process_set.size()), min_numel=self.min_numel,
            bucket_bytes=self.bucket_bytes, groups=together, adagrad=self.adagrad, devices=told_places(params),
            gradient_predivide_factor=self.gradient_predivide_factor, backward_passes_per_step=self.passes,
            sparse_as_dense=self.sparse_as_dense,
        )  # fmt: skip

    def agree(self, groups: list[dict[str, Any]], names: dict[int, str]) -> None:
        """Compare with all ranks before the optimizer is wrapped; a collective call.

        Raises:
            MismatchError: on all ranks, naming the first difference.
        """
        # by the names that Horovod's own optimizer has for them, which reduces those that are not frozen
        known = [
            (names.get(id(p), f"allreduce.noname.{i}.{j}"), p.requires_grad)
            for i, group in enumerate(groups)
            for j, p in enumerate(group["params"])
        ]
        reduced = [name for name, is_trained in known if is_trained] or [name for name, _ in known]
        told = {"optimizer": "DistributedOptimizer", **self.description(groups, names)}
        TorchRanks(self.process_set).agree(told, beside=reduced)

    def agree_again(self, combiner: Combiner, engine: Engine) -> None:
        """Compare with all ranks after parameters were frozen, unfrozen, added or converted; a collective call.

        Ranks where nothing has changed do not know of it. They go on with the exchange that was to come, and Horovod
        tells all ranks that the two do not fit.

        Raises:
            MismatchError: on all ranks, naming the first difference, or that others have not changed theirs.
        """
        told = self.description(combiner.param_groups, {id(p): n for p, n in combiner.members.names.items()})
        self._meet(
            engine, told, "parameters were frozen, unfrozen, added or converted on this rank, and not on all others. "
            "All ranks must do so before the same step",
        )  # fmt: skip

    def agree_on_load(self, engine: Engine) -> None:
        """Make sure that all ranks have loaded a state since the last step; a collective call.

        Raises:
            MismatchError: on all ranks, where others go on without.
        """
        self._meet(
            engine, {"call": "load_compression_state_dict()"}, "load_compression_state_dict() was called on this rank "
            "and not on all others: AdaGrad would give them other updates. Load a state on all ranks before the same "
            "step",
        )  # fmt: skip

    def agree_to_join(self, engine: Engine) -> None:
        """Make sure that no rank makes another step before Horovod's `join`; a collective call.

        Raises:
            MismatchError: on all ranks, where others go on to a step.
        """
        self._meet(
            engine, {"call": "join()"}, "join() was called on this rank, and others go on to another step: compressed "
            "exchanges need all ranks in each step. Give all ranks the same number of batches (drop_last=True), or use "
            "Compression.none or Compression.fp16, with which join() stands in for ranks that have ended",
        )  # fmt: skip

    def agree_on_way(self, engine: Engine, told: dict[str, Any]) -> None:
        """Make sure that all ranks go the same way from this step on; a collective call.

        Args:
            engine: that the other ranks would use if they went on as before.
            told: what is to be the same.

        Raises:
            MismatchError: on all ranks, where others differ or go on as before.
        """
        self._meet(
            engine, told, "this rank and others are at different steps: a state was loaded on this rank and not on all "
            "others. Load one on all ranks before the same step, or on one, followed by hvd.broadcast_optimizer_state",
        )  # fmt: skip

    def _meet(self, engine: Engine, told: dict[str, Any], alone: str) -> None:
        """Compare under the name of the first exchange; ranks that do not compare get an error there."""
        if engine.buckets:
            kind, first = engine.buckets[0].beginning
            name = collective_name(kind, first, self.label)
        else:
            # without a tensor, nobody is about to start anything
            kind, name = "allreduce", next(iter(engine.dense), "hvd_compress.members") + self.label
        try:
            require_agreement_through(told, self.process_set, Place(kind, name))
        except HorovodInternalError as error:
            if "Mismatched" not in str(error):
                raise
            self.on_refusal(alone)
            raise MismatchError(alone) from error
        except MismatchError as error:
            self.on_refusal(str(error))
            raise

    def equip(self, sender: Sender) -> None:
        """Give a sender the exchanges of the parameters that take gradients now; with `Auto` a collective call."""
        members = sender.members
        # of a list, Horovod makes a group of each parameter that is in none of its groups
        formed = [list(g) for g in members.groups or () if len(g) > 1 or not isinstance(self.groups, list)]
        tensors = list(members.by_name.items())
        # the last rank of an elastic run sends everything: what it owes goes with its next gradients
        ours = None if self.process_set.size() == 1 else self.ours
        auto = ours if isinstance(ours, Auto) else None
        routing = Routing(None if isinstance(ours, Auto) else ours, self.exchange, self.min_numel,
                          self.bucket_bytes)  # fmt: skip
        sender.make_engine = partial(
            Engine, scale=self.scale, process_set=self.process_set, tensors=tensors, groups=formed or None,
            pays_debts=self.adagrad is None or is_elastic(), adagrad=self.adagrad,
            resting=list(members.resting.items()), label=self.label,
        )  # fmt: skip
        sender.steering = None
        if auto is not None:
            sender.steering = Steering(auto, described(tensors), routing, self.process_set)
            routing = sender.steering.routing
        sender.engine = sender.make_engine(routing)


def label_for(groups: list[dict[str, Any]], names: set[str], process_set: hvd.ProcessSet) -> str:
    """What tells the collectives of an optimizer from those of others in use, the same on all ranks; a collective call.

    Args:
        groups: of parameters of the optimizer to wrap.
        names: of these parameters.
        process_set: the ranks that take part.
    """
    mine = {id(p) for group in groups for p in group["params"]}
    used = [
        other.wrapping.label
        for other in in_use()
        if other.wrapping.process_set.process_set_id == process_set.process_set_id
        and not names.isdisjoint(other.members.names.values())
        and mine.isdisjoint(map(id, other.members.by_name.values()))
    ]
    free = next(i for i in range(len(used) + 1) if _label(i) not in used)
    # what is still in use may differ between ranks: Python collects garbage when it likes
    return _label(int(TorchRanks(process_set).maximum([float(free)])[0]))


def _label(number: int) -> str:
    return f".{number}" if number else ""
