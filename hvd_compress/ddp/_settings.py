"""Check what hooks are given, and let ranks compare it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress._torch.device import told_places
from hvd_compress.compressors import Compressor
from hvd_compress.ddp._groups import groups_like
from hvd_compress.ddp._hook import ByBucket
from hvd_compress.ddp._ranks import GlooRanks
from hvd_compress.engine import DEFAULT_BUCKET_BYTES, check_settings, description, exchanged, resolved
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import MOST_STAGES, Exchange, Hosts, checked_exchange
from hvd_compress.policy import Auto, Policy, check_patterns, compressors_in, horovods_own, refuse_class

__all__ = ["meet", "named_parameters", "routing_of"]

_STAGES_OF_AUTO = 2  # those of the longer one of the two exchanges that it takes


def routing_of(
    call: str,
    compression: Any,
    exchange: str | Exchange,
    min_numel: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> ByBucket:
    """Return which way tensors go, by what the user gave.

    Args:
        call: for errors.
        compression: a compressor, a name of one, or a `Policy`.
        exchange: an exchange or a name of one.
        min_numel: tensors with fewer elements are not compressed.
        bucket_bytes: up to which buckets are joined.

    Raises:
        TypeError: no compressor.
        ValueError: a setting out of its range.
        UnsupportedError: `Auto`; messages of MPI.
    """
    refuse_class("compression", compression)
    ours = resolved(horovods_own(compression), exchange)
    if isinstance(ours, Auto):
        raise UnsupportedError(
            f"{call} with {ours!r}: it tries ways of exchanging by what Horovod's steps take. Give a compressor, such "
            "as Adaptive(pi=64), or a Policy; exchange='auto' takes the exchange that sends fewer bytes"
        )
    if not isinstance(ours, Compressor | Policy):
        raise TypeError(f"compression={ours!r}: give a compressor of hvd_compress, its name, or a Policy")
    check_settings(ours, exchange, min_numel, bucket_bytes, True, 1.0, 1, None, False)
    way = checked_exchange(exchange)
    if way.sends_by_mpi:
        raise UnsupportedError(
            f"{call} with {way!r}: its messages go over the MPI of Horovod. Leave transport='mpi' out"
        )
    chosen = exchanged(ours)
    return ByBucket(ours if chosen is None else chosen, way, min_numel, bucket_bytes)  # type: ignore[arg-type]


def named_parameters(module: torch.nn.Module, ignored: Any = ()) -> dict[str, torch.Tensor]:
    """Return the parameters that take gradients by their names, which `torch.compile` does not change.

    What DDP ignores it knows by the module's name, a dot, and the parameter's: ".scale" for one of the root.
    """
    return {
        name.replace("_orig_mod.", ""): p
        for name, p in module.named_parameters()
        if p.requires_grad and (name if "." in name else f".{name}") not in ignored
    }


def meet(
    group: dist.ProcessGroup,
    timeout: timedelta | None,
    routing: ByBucket,
    tensors: Mapping[str, torch.Tensor],
    **settings: Any,
) -> tuple[GlooRanks, list[GlooRanks], Hosts | None]:
    """Make the groups of an exchange, and compare what the ranks were given; a collective call.

    Returns:
        A group in which ranks ask each other; one for each stage; and the hosts of the ranks, where it matters.

    Raises:
        MismatchError: on all ranks, where settings or tensors differ.
        ValueError: a pattern of a `Policy` matches no tensor.
        UnsupportedError: no Gloo.
        LostRankError: a rank does not join in time.
    """
    make = groups_like(group, timeout)
    talk = make(0)
    ranks: list[GlooRanks] = []
    try:
        talk.agree(_told(routing, talk.size, tensors, settings))
        check_patterns(routing.compressor, tensors)
        stages = len(routing.exchange.collectives) or _STAGES_OF_AUTO
        if isinstance(given := routing.compressor, Compressor | Policy) and any(
            compressor.sums_factors for compressor in compressors_in(given)
        ):
            stages = max(stages, MOST_STAGES)
        # one by one: those that are made are closed where one cannot be
        ranks.extend(make(1 + number) for number in range(stages))
        hosts = Hosts.of_names(talk.host_numbers()) if routing.exchange.uses_hosts else None
    except BaseException:
        for each in (talk, *ranks):
            each.close()
        raise
    return talk, ranks, hosts


def _told(
    routing: ByBucket, ranks: int, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    parameters = [[name, list(p.shape), str(p.dtype)] for name, p in tensors.items()]
    return description(
        routing.compressor, "average", parameters, exchange=routing.exchange.told_among(ranks),
        min_numel=routing.min_numel, bucket_bytes=routing.bucket_bytes, devices=told_places(tensors.values()),
        **settings,
    )  # fmt: skip
