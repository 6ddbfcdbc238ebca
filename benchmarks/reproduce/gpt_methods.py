"""The methods that train the small transformer, each as an optimizer around or in place of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DENSE", "METHODS", "Tuning", "made_one", "sent_by", "wrapped"]

DENSE = "dense fp32"
_DECAY, _BETAS = 0.1, (0.9, 0.95)


class Tuning(NamedTuple):
    """Holds what all methods of a training have in common.

    Args:
        rate: AdamW's learning rate.
        sync_every: steps from one synchronization to the next, for methods that have them.
        warm_up: CompressedAdam's uncompressed steps.
    """

    rate: float
    sync_every: int
    warm_up: int


def wrapped(method: str, network: nn.Module, tuning: Tuning, prefix: str = "") -> Any:
    """Make the optimizer of a method.

    Args:
        method: one of `METHODS`.
        network: equal on all ranks.
        tuning: of all methods.
        prefix: of the names of collectives, which several optimizers must not share.
    """
    named = [(prefix + name, p) for name, p in network.named_parameters()]
    return METHODS[method](named, tuning)


def made_one(optimizer: Any) -> None:
    """Make one model of those of ranks that have trained alone; nothing where all have had the same all the time."""
    if hasattr(optimizer, "average_parameters"):
        optimizer.average_parameters()
    elif hasattr(optimizer, "daso_stats"):
        optimizer.epoch_end()


def sent_by(optimizer: Any) -> float:
    """Return the bytes that this rank has sent so far, uncompressed steps included."""
    if hasattr(optimizer, "diloco_stats"):
        return optimizer.diloco_stats()["bytes_between_nodes"]
    if hasattr(optimizer, "daso_stats"):
        return optimizer.daso_stats()["bytes_between_nodes"]
    if hasattr(optimizer, "event_stats"):
        return optimizer.event_stats()["total"]["bytes"]
    stats = optimizer.compression_stats()
    return stats["total"]["bytes_sent"] + stats.get("uncompressed", {}).get("bytes_sent", 0)


def _adamw(named: Any, rate: float) -> Any:
    import torch

    return torch.optim.AdamW([p for _, p in named], rate, betas=_BETAS, weight_decay=_DECAY)


def _gradients(compressor: Callable[[Any], Any]) -> Callable[[Any, Tuning], Any]:
    """Return what makes AdamW on gradients that are compressed."""

    def make(named: Any, tuning: Tuning) -> Any:
        import hvd_compress
        import hvd_compress.torch as hvd

        return hvd.DistributedOptimizer(_adamw(named, tuning.rate), named, compression=compressor(hvd_compress))

    return make


def _diloco(
    compressor: Callable[[Any], Any], momentum: bool = True, decay: float = 1.0
) -> Callable[[Any, Tuning], Any]:
    """Return what makes AdamW within DiLoCo; without an outer momentum its feedback decays."""

    def make(named: Any, tuning: Tuning) -> Any:
        import torch

        import hvd_compress
        import hvd_compress.torch as hvd

        outer: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if momentum else {"lr": 1.0}
        return hvd.DiLoCo(
            _adamw(named, tuning.rate), named, outer=lambda params: torch.optim.SGD(params, **outer),
            sync_every=tuning.sync_every, compression=compressor(hvd_compress), feedback_decay=decay,
        )  # fmt: skip

    return make


def _daso(named: Any, tuning: Tuning) -> Any:
    import hvd_compress.torch as hvd

    return hvd.DASO(
        _adamw(named, tuning.rate), named, global_skips=tuning.sync_every, batches_to_wait=1, ranks_per_node=1
    )


def _dpsgd(named: Any, tuning: Tuning) -> Any:
    import hvd_compress.torch as hvd

    return hvd.DPSGDOptimizer(_adamw(named, tuning.rate), named)


def _compressed_adam(named: Any, tuning: Tuning) -> Any:
    import hvd_compress.torch as hvd

    return hvd.CompressedAdam(
        [p for _, p in named],
        tuning.rate,
        _BETAS,
        weight_decay=_DECAY,
        named_parameters=named,
        warmup_steps=tuning.warm_up,
    )


def _demo(named: Any, tuning: Tuning) -> Any:
    import hvd_compress.torch as hvd

    return hvd.DeMo([p for _, p in named], tuning.rate, weight_decay=_DECAY, named_parameters=named)


METHODS: dict[str, Callable[[Any, Tuning], Any]] = {
    DENSE: _gradients(lambda h: h.NoCompression()),
    "dense bf16": _gradients(lambda h: h.BF16()),
    "one-bit": _gradients(lambda h: h.OneBit()),
    "adaptive(64)": _gradients(lambda h: h.Adaptive(pi=64)),
    "top-k 1 %": _gradients(lambda h: h.TopK(0.01)),
    "PowerSGD(2)": _gradients(lambda h: h.PowerSGD(rank=2)),
    "CompressedAdam, one-bit": _compressed_adam,
    "DeMo": _demo,
    "D-PSGD": _dpsgd,
    "DASO": _daso,
    "DiLoCo": _diloco(lambda h: None),
    "DiLoCo, one-bit": _diloco(lambda h: h.OneBit()),
    "DiLoCo, adaptive(64)": _diloco(lambda h: h.Adaptive(pi=64)),
    "SparseLoCo": _diloco(lambda h: h.TopK(chunk=4096, ratio=1 / 64, value_bits=2), momentum=False, decay=0.95),
}
