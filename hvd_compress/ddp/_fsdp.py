"""Hooks of FSDP2 with replicas: dense among the ranks that share a model, compressed between those with one shard."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvd_compress._torch.checksum import checksum
from hvd_compress.compressors import Adaptive
from hvd_compress.ddp._alone import Alone
from hvd_compress.ddp._books import Books, keep_books
from hvd_compress.ddp._dense import dense_parts
from hvd_compress.ddp._given import Given, Sides
from hvd_compress.ddp._hook import new_ledger
from hvd_compress.ddp._pipeline import Job, Pipeline, Step
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.ddp._settings import meet, routing_of
from hvd_compress.engine import DEFAULT_MIN_NUMEL, NOT_COMPARED, Ledger, first_unequal
from hvd_compress.errors import GradientError, UnsupportedError
from hvd_compress.exchange import Exchange
from hvd_compress.policy import check_patterns

__all__ = ["fsdp_all_reduce_hook"]

# bytes of a bucket: a module's exchange does not wait for those of others, which FSDP reduces later
_APART = 1
Shapes = dict[str, tuple[int, ...]]


def fsdp_all_reduce_hook(
    model: torch.nn.Module,
    group: Any,
    compression: Any = None,
    *,
    exchange: str | Exchange = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    scaler: Any = None,
    timeout: timedelta | None = None,
) -> None:
    """Let the replicas of a model under `fully_shard` exchange compressed gradients; a collective call.

    Inside of a replica FSDP sums gradients with its own reduce-scatter. Each rank then exchanges the shard that it
    keeps, compressed, with those ranks of other replicas that keep the same one. Shard the model only over the mesh
    dimension inside of a replica; this hook takes the place of the allreduce between replicas.

    FSDP needs the result when a hook returns, so the hook waits for it. Each module that `fully_shard` was called with
    has an exchange of its own: a value that is not finite restores the residuals of this module only.

    Call it again after parameters were frozen or unfrozen. What is owed then is forgotten.

    Args:
        model: under `fully_shard`; all modules inside it that are under `fully_shard`, too, get the hook.
        group: the process group of the ranks that keep the same shard, or a mesh of one dimension.
        compression: a compressor, its name, or a `Policy`; `Adaptive(pi=64)` if left out.
        exchange: "auto" or another one, by its name or as an object.
        min_numel: shards with fewer elements go uncompressed.
        scaler: the GradScaler of mixed precision.
        timeout: how long a rank waits for others; that of `group` if left out.

    Raises:
        TypeError: the model is not under `fully_shard`, or there is no compressor.
        ValueError: a setting out of its range, a pattern of a `Policy` that matches no parameter, or a group in which
            ranks keep different shards.
        MismatchError: on all ranks of `group`, where settings or parameters differ.
        UnsupportedError: a mesh of two dimensions, between whose replicas FSDP sums itself; modules that `fully_shard`
            was given in a list; a torch without `set_all_reduce_hook`.
        LostRankError: a rank does not join in time.

    Source: the method `set_all_reduce_hook` of PyTorch's FSDP2.

    Example::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        ddp.fsdp_all_reduce_hook(model, mesh["replicate"], compression=Adaptive(pi=64))
    """
    group = group.get_group() if hasattr(group, "get_group") else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r}: give the process group of the ranks that keep the same shard, or their mesh")
    modules = _sharded(model)
    compression = Adaptive(pi=64) if compression is None else compression
    routing = routing_of("ddp.fsdp_all_reduce_hook", compression, exchange, min_numel, _APART)
    shapes = {name: of_module for name, module in modules.items() if (of_module := _shards(name, module))}
    tensors = {
        parameter: torch.empty(shape, dtype=p.dtype, device="meta")
        for of_module in shapes.values()
        for parameter, (shape, p) in of_module.items()
    }
    of_modules = {name: {n: shape for n, (shape, _) in of_module.items()} for name, of_module in shapes.items()}
    kept = {n: p for of_module in shapes.values() for n, (_, p) in of_module.items()}
    _refuse_other_shards(group, kept)
    size = dist.get_world_size(group)
    for name in modules.keys() - shapes.keys():
        # its parameters may be unfrozen
        modules[name].set_all_reduce_hook(partial(_cut, name, {}))
    if size == 1:
        check_patterns(routing.compressor, tensors)
        alone = Alone(tensors, scaler, partial(_hook_alone, weakref.WeakValueDictionary(modules), of_modules))
        keep_books(model, Books(compression, lambda: alone.ledger, alone.load_state_dict, scaler is not None))
        return
    shard = {p.device_mesh.get_local_rank() for p in kept.values()}
    talk, ranks, hosts = meet(group, timeout, routing, tensors, scales=scaler is not None, shard=sorted(shard))
    like = {n: torch.empty_like(tensors[n], device=p.to_local().device) for n, p in kept.items()}
    ledger = new_ledger(routing, talk, like, [tuple(names) for names in of_modules.values()], hosts)
    del like
    replicas = _Replicas(ledger, Pipeline(talk, ranks), group, scaler, _Values(talk, group, model, kept))
    for name, parts in of_modules.items():
        modules[name].set_all_reduce_hook(partial(replicas.exchange, name, parts))
    keep_books(model, Books(compression, lambda: ledger, ledger.load_state_dict, scaler is not None))
    weakref.finalize(model, replicas.pipeline.close).atexit = False


def _refuse_other_shards(group: dist.ProcessGroup, kept: Mapping[str, Any]) -> None:
    """Raise ValueError for a group in which ranks have different shards: their mean would be of nothing."""
    mine, others = dist.get_rank(), set(dist.get_process_group_ranks(group))
    for name, p in kept.items():
        if both := sorted(others.intersection(p.device_mesh.mesh.flatten().tolist()) - {mine}):
            raise ValueError(
                f"ddp.fsdp_all_reduce_hook: the ranks {both} of the group keep other shards of {name!r} than this one "
                f"({mine}). Give the ranks that keep the same shard, such as mesh['replicate'] of a mesh of two "
                "dimensions; a model without replicas has none"
            )


def _hook_alone(modules: Mapping[str, Any], shapes: Mapping[str, Shapes], alone: Alone) -> None:
    """Let the modules of one replica add what it owes."""

    def pay(module: str, reduced: torch.Tensor) -> None:
        alone.pay(_cut(module, shapes[module], reduced))
        alone.end_step(counts=module == next(iter(shapes)))

    for name in shapes:
        modules[name].set_all_reduce_hook(partial(pay, name))


class _Values:
    """Compares the parameters of replicas once: neither FSDP nor a hook makes them equal.

    Args:
        talk: the ranks that keep the same shards.
        group: of them.
        model: that has them.
        kept: the shards of this rank.
    """

    def __init__(self, talk: GlooRanks, group: Any, model: torch.nn.Module, kept: Mapping[str, Any]) -> None:
        self._talk = talk
        self._numbers = dist.get_process_group_ranks(group)
        # no weak references: torch would not swap these tensors then, as model.to_empty() of a sharded model does
        self._kept = dict(kept)
        self._places = {
            id(p): (weakref.ref(module), name)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
        }
        self._compared: set[str] = set()

    def compare(self, module: str, names: Iterable[str], steps: int) -> None:
        """Warn of a shard that differs between replicas, the first time that its module comes; a collective call.

        Raises:
            MismatchError: a state was loaded on some ranks only; raised on all of them.
        """
        if module in self._compared:
            return
        if not self._compared:
            self._talk.agree({"steps made before": steps})
        self._compared.add(module)
        names = list(names)
        sums = np.array([self._checksum(name) for name in names], np.int64)
        rows = self._talk.run("allgather", f"values of {module}", sums).reshape(self._talk.size, -1)
        unequal = first_unequal(rows, names)
        if unequal is not None:
            name, position = unequal
            warnings.warn(
                f"the shard of {name!r} on rank {self._numbers[position]} differs from that on rank "
                f"{self._numbers[0]}, and will go on doing so: replicas exchange gradients only. Make the model from "
                "one seed on all ranks, with torch.manual_seed, or load one checkpoint on all",
                stacklevel=2,
            )

    def _checksum(self, name: str) -> int:
        kept = self._kept.pop(name)
        module, attribute = self._places[id(kept)]
        now = getattr(module(), attribute, None)
        # another shard has taken its place, as load_state_dict(assign=True) does it; whole parameters come and go
        is_gone = isinstance(now, type(kept)) and now is not kept
        local = kept.to_local()
        return NOT_COMPARED if is_gone or local.is_meta else checksum(local)


class _Replicas:
    """Exchanges shards with the other replicas.

    Args:
        ledger: of all shards.
        pipeline: that runs the exchanges.
        group: of the replicas, for what goes uncompressed.
        scaler: see `fsdp_all_reduce_hook`.
        values: of the parameters.
    """

    def __init__(self, ledger: Ledger[Any], pipeline: Pipeline, group: Any, scaler: Any, values: _Values) -> None:
        self._ledger = ledger
        self.pipeline = pipeline
        self._group = group
        self._scaler = scaler
        self._values = values
        self._came: set[str] = set()
        """The modules of this step."""
        self._sides = Sides()

    def exchange(self, module: str, shapes: Shapes, reduced: torch.Tensor) -> None:
        """Make the sums that FSDP has reduced means over the replicas, in place."""
        if self.pipeline.failure is not None:
            raise self.pipeline.failure
        # nothing is under way: FSDP waits for each module before the next one
        self._values.compare(module, shapes, self._ledger.steps)
        step = Step(counts=not self._came or module in self._came)
        self._came = {module} if step.counts else self._came | {module}
        side = self._sides.of(reduced.device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[reduced.device] if reduced.is_cuda else None
        )
        job = Job(step, Given(0, reduced, _cut(module, shapes, reduced), True, side), future)
        if self._scaler is not None and step.counts:
            self._ledger.set_loss_scale(float(self._scaler.get_scale()))
        dense = job.take_exchanges(self._ledger)
        job.pay_debts(self._ledger, dense)
        job.dense = dense_parts(job.given, dense, self._ledger.routing.compressor_of) if dense else []
        for part in job.dense:
            part.start(self._group)
        self.pipeline.submit(job, self._ledger)
        future.wait()
        if step.failure is not None:
            raise step.failure


def _sharded(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules under `fully_shard`, by their names.

    Raises:
        TypeError: there is none.
        UnsupportedError: this torch has no hooks of theirs.
    """
    modules: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    }
    if not modules:
        raise TypeError(f"ddp.fsdp_all_reduce_hook of a {type(model).__name__}: give a model under fully_shard")
    _refuse_shared_groups(modules)
    if not all(hasattr(module, "set_all_reduce_hook") for module in modules.values()):
        raise UnsupportedError(
            f"ddp.fsdp_all_reduce_hook with torch {torch.__version__}, whose FSDPModule has no set_all_reduce_hook: "
            "install a newer torch"
        )
    return modules


def _refuse_shared_groups(modules: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for modules that FSDP reduces together."""
    names: dict[int, str] = {}
    for name, module in modules.items():
        first = names.setdefault(id(module._get_fsdp_state()), name)
        if first != name:
            raise UnsupportedError(
                f"ddp.fsdp_all_reduce_hook: {first!r} and {name!r} were given to fully_shard together, in a list, and "
                "have one hook. Call fully_shard for each of them"
            )


def _shards(prefix: str, module: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shard of each parameter of a module that no module inside shards itself: its shape as FSDP reduces it.

    Raises:
        UnsupportedError: FSDP sums between replicas itself, or there are more dimensions than one.
    """
    found = {}
    for name, p in _own_parameters(prefix, module):
        mesh: Any = p.device_mesh
        if mesh.ndim != 1:
            raise UnsupportedError(
                f"ddp.fsdp_all_reduce_hook: {name!r} lies on a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}. "
                "With one for replicas FSDP sums between them, uncompressed, before a hook is called: shard over the "
                'other one alone, fully_shard(model, mesh=mesh["shard"]). Tensor parallelism is not supported'
            )
        dim, shards = p.placements[0].dim, mesh.size()
        shape = list(p.shape)
        # FSDP fills the last shard up
        shape[dim] = math.ceil(shape[dim] / shards)
        found[name] = (tuple(shape), p)
    return found


def _own_parameters(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a module that no module inside shards itself, by name, in the order of FSDP.

    FSDP lays those of children before a module's own, and modules and parameters that stand at two places once.
    """
    met: set[Any] = set()

    def walk(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        met.add(module)
        for name, child in module.named_children():
            if child not in met and not any(kind.__name__ == "FSDPModule" for kind in type(child).__mro__):
                yield from walk(f"{prefix}.{name}" if prefix else name, child)
        for name, p in module.named_parameters(prefix, recurse=False):
            if p not in met and p.requires_grad and hasattr(p, "device_mesh"):
                met.add(p)
                yield name.replace("_orig_mod.", ""), p

    yield from walk(prefix, module)


def _cut(module: str, shapes: Mapping[str, tuple[int, ...]], reduced: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut what FSDP has reduced into shards, by the names of their parameters.

    Raises:
        GradientError: it has another size.
    """
    numels = [math.prod(shape) for shape in shapes.values()]
    if sum(numels) != reduced.numel():
        raise GradientError(
            f"FSDP has reduced {reduced.numel()} elements of {module or 'the model'!r}, whose shards have "
            f"{sum(numels)}: a parameter has no gradient in this step, or was frozen or unfrozen since "
            "ddp.fsdp_all_reduce_hook was called. Use each parameter in each step, on all ranks, and call "
            "ddp.fsdp_all_reduce_hook again after parameters were frozen or unfrozen; what is owed then is forgotten"
        )
    starts = accumulate(numels, initial=0)
    return {
        name: reduced[start : start + numel].view(shape)
        for (name, shape), numel, start in zip(shapes.items(), numels, starts, strict=False)
    }
