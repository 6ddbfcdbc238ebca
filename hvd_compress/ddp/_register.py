"""What a user calls for a model that DistributedDataParallel has wrapped."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.compressors import Adaptive
from hvd_compress.ddp._alone import Alone, AloneHook
from hvd_compress.ddp._books import Books, keep_books, unwrapped
from hvd_compress.ddp._hook import CommHook
from hvd_compress.ddp._settings import meet, named_parameters, routing_of
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, DEFAULT_MIN_NUMEL
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange
from hvd_compress.policy import check_patterns

__all__ = ["register_comm_hook"]


def register_comm_hook(
    model: DistributedDataParallel,
    compression: Any = None,
    *,
    exchange: str | Exchange = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    start_step: int = 0,
    scaler: Any = None,
    timeout: timedelta | None = None,
) -> None:
    """Let a model under DistributedDataParallel exchange compressed gradients; a collective call.

    Gradients become the mean over all ranks, as without a hook. What compression leaves out of a step is kept, and sent
    with the next one.

    Args:
        model: DistributedDataParallel, which has no hook yet.
        compression: a compressor such as `OneBit()`, its name, or a `Policy`; `Adaptive(pi=64)` if left out.
        exchange: "auto" for the one of "two_phase" and "allgather" that sends fewer bytes, or another one by its name
            or as an object.
        min_numel: tensors with fewer elements go uncompressed.
        bucket_bytes: consecutive buckets of DDP share an exchange of up to this many bytes (as float32); with 0 each
            bucket has its own, and small tensors do not share an exchange with compressed ones.
        start_step: number of first steps of the training that go uncompressed.
        scaler: the GradScaler of mixed precision, so that residuals follow its scale.
        timeout: how long a rank waits for others; that of the model's process group if left out.

    Raises:
        TypeError: no DistributedDataParallel, or no compressor.
        ValueError: a setting out of its range, or a pattern of a `Policy` that matches no parameter.
        MismatchError: on all ranks, where settings or parameters differ.
        UnsupportedError: a sharded model, one that has a hook, `Auto`, or no Gloo.
        LostRankError: a rank does not join in time.

    Source: the hooks of DDP are those of Li et al. 2020, "PyTorch Distributed", section 3; the compressors' papers are
    with them. PowerSGD's hook keeps residuals by bucket. DDP changes its buckets after the first step, so that hook
    warms up until then; here residuals are kept by parameter name.

    Example::

        from hvd_compress import Adaptive, ddp

        model = DistributedDataParallel(model)
        ddp.register_comm_hook(model, compression=Adaptive(pi=64))
    """
    model = _checked(model)
    if type(start_step) is not int or start_step < 0:
        raise ValueError(f"start_step={start_step!r}: must be a number of steps, 0 or more")
    compression = Adaptive(pi=64) if compression is None else compression
    routing = routing_of("ddp.register_comm_hook", compression, exchange, min_numel, bucket_bytes)
    tensors = named_parameters(model.module, model.parameters_to_ignore)
    group: Any = model.process_group
    size = dist.get_world_size(group)
    if size == 1:
        check_patterns(routing.compressor, tensors)
        alone = Alone(tensors, scaler, partial(_hook_alone, weakref.ref(model), tensors))
        keep_books(model, Books(compression, lambda: alone.ledger, alone.load_state_dict, scaler is not None))
        return
    talk, ranks, hosts = meet(
        group, timeout, routing, tensors, start_step=start_step, scales=scaler is not None,
        find_unused_parameters=bool(model.find_unused_parameters), static_graph=bool(model.static_graph),
    )  # fmt: skip
    hook = CommHook(model, tensors, routing, group, talk, ranks, hosts, start_step, scaler)
    model.register_comm_hook(hook, _call)
    keep_books(model, Books(compression, lambda: hook.ledger, hook.load_state_dict, scaler is not None))
    # at the end of the process threads end with it
    weakref.finalize(model, hook.pipeline.close).atexit = False


def _hook_alone(model: weakref.ref[Any], tensors: dict[str, torch.Tensor], alone: Alone) -> None:
    found = model()
    if found is not None:
        found.register_comm_hook(AloneHook(found, tensors, alone), _call)


def _call(state: Any, bucket: Any) -> Any:
    return state(bucket)


# DDP looks at what a hook says of its types, which it does not evaluate
_call.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _checked(model: Any) -> Any:
    """Return the model under DistributedDataParallel.

    Raises:
        TypeError: something else.
        UnsupportedError: a sharded model, one with a hook, or one that shows hooks some buckets only.
    """
    model = unwrapped(model)
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise UnsupportedError(
            "ddp.register_comm_hook of a sharded model: a reduce-scatter sums each element on the one rank that keeps "
            "it, inside of FSDP, where hooks get the sums only, and no rank has the gradients that it would owe. "
            "Compress between replicas of the shards (ddp.fsdp_all_reduce_hook, for fully_shard), or train with "
            "DistributedDataParallel"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"ddp.register_comm_hook of a {type(model).__name__}: give a DistributedDataParallel")
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise UnsupportedError(
            "ddp.register_comm_hook of DistributedDataParallel(skip_all_reduce_unused_params=True): it shows hooks "
            "some buckets only, and a step is over when all have come. Leave it out; what no rank has used is not sent "
            "compressed"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedError(
            "ddp.register_comm_hook with torch._dynamo.config.optimize_ddp = 'python_reducer': DDP shows hooks single "
            "gradients then, and no buckets. Leave that setting as it is when you wrap the model"
        )
    if getattr(model, "_comm_hooks", None):
        raise UnsupportedError(
            "ddp.register_comm_hook of a model that has a hook: DDP takes one, and its mixed_precision= sets one. Wrap "
            "the model again, and use torch.autocast for mixed precision"
        )
    return model
