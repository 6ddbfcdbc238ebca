"""Train inside the ranks: a training is tested after each epoch, and goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import ranks as r
import torch
from networks import mnist_data
from torch import nn

import hvd_compress.torch as hvd

from .checkpoint import Checkpoint
from .data import Data

__all__ = ["Observer", "all_ranks", "learn", "same_on_all_ranks", "wrapped"]

_TEST_BATCH = 500


class Observer(Protocol):
    """Looks on while a training goes on."""

    found: dict[str, Any]
    """JSON-able; kept in checkpoints."""

    def begin(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Look at a batch before its step."""

    def end(self, step: int) -> None:
        """Look at what a step has done."""


def wrapped(
    optimizer: torch.optim.Optimizer, network: nn.Module, compression: Any, prefix: str = "", **settings: Any
) -> Any:
    """Wrap an optimizer so that it compresses all gradients, small ones too, as the papers do.

    Args:
        optimizer: plain.
        network: whose parameters it has.
        compression: a compressor.
        prefix: of the names of collectives, which several optimizers must not share.
        settings: of `DistributedOptimizer`.
    """
    named = [(prefix + name, p) for name, p in network.named_parameters()]
    return hvd.DistributedOptimizer(optimizer, named, compression=compression, min_numel=1, **settings)


def learn(
    settings: Mapping[str, Any],
    network: nn.Module,
    optimizer: Any,
    data: Data,
    checkpoint: Checkpoint,
    observer: Observer | None = None,
    target: float = float("inf"),
) -> dict[str, Any]:
    """Train, from the checkpoint on if there is one.

    Args:
        settings: "epochs", "batch" of a rank, "seed" of the order of images, "parts" of an epoch, each with a training
            accuracy of its own.
        network: equal on all ranks.
        optimizer: wrapped, or plain where ranks are to learn alone.
        data: the same on all ranks, which deal it out anew in each epoch.
        checkpoint: of this unit.
        observer: is told of each step.
        target: training accuracy in percent that ends it.

    Returns:
        Accuracies in percent: "train" of each part, of images before they were learned from; "test" of each epoch and,
        where ranks learn alone, rank. "loss" of each part, "bytes_sent" and "seconds" of each rank, "steps", what
        `observer` has found, whether "replicas_identical" (None where ranks learn alone), and "digest" of the first
        rank's parameters.
    """
    are_replicas = hasattr(optimizer, "compression_stats")
    history: dict[str, Any] = {"train": [], "loss": [], "test": [], "bytes": 0, "seconds": 0.0, "steps": 0}
    first = _restored(checkpoint, network, optimizer, history, observer)
    sent_before = history["bytes"]
    for _ in range(first):
        r.done("as saved")
    for epoch in range(first, settings["epochs"]):
        if _is_reached(history, target):
            r.done("has reached its accuracy")
            continue
        order = mnist_data.deal(len(data.train_y), settings["batch"], hvd.rank(), hvd.size(), settings["seed"], epoch)
        for part in np.array_split(order, settings.get("parts", 1)):
            _learn_part(part, network, optimizer, data, history, observer)
            if _is_reached(history, target):
                break
        history["test"].append(_tested(network, data, are_replicas))
        history["bytes"] = sent_before + _bytes_sent(optimizer)
        checkpoint.save(epoch, _state(epoch, network, optimizer, history, observer))
        r.done(f"epoch {epoch + 1}: {history['test'][-1][0]:.2f} %")
    digests = hvd.allgather_object(_digest(network), name="reproduce.digests")
    return {
        **{key: history[key] for key in ("train", "loss", "test", "steps")},
        "bytes_sent": all_ranks(history["bytes"]),
        "seconds": all_ranks(history["seconds"]),
        "watched": None if observer is None else observer.found,
        "digest": digests[0],
        "replicas_identical": len(set(digests)) == 1 if are_replicas else None,
        "parameters": sum(p.numel() for p in network.parameters()),
        "data": data.source,
    }


def all_ranks(value: float) -> list[float]:
    """Return the value of each rank."""
    return hvd.allgather(torch.tensor([value], dtype=torch.float64), name="reproduce.all_ranks").tolist()


def same_on_all_ranks(network: nn.Module) -> bool:
    """Tell whether all ranks hold the same bytes."""
    return len(set(hvd.allgather_object(_digest(network), name="reproduce.digests"))) == 1


def _is_reached(history: dict[str, Any], target: float) -> bool:
    return bool(history["train"]) and history["train"][-1] >= target


def _learn_part(
    order: np.ndarray,
    network: nn.Module,
    optimizer: Any,
    data: Data,
    history: dict[str, Any],
    observer: Observer | None,
) -> None:
    right, loss_sum = torch.zeros(()), torch.zeros(())
    begin = time.perf_counter()
    for rows in order:
        x, y = data.train_x[rows], data.train_y[rows]
        if observer is not None:
            observer.begin(history["steps"], x, y)
        optimizer.zero_grad()
        out = network(x)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        right += (out.detach().argmax(dim=1) == y).sum()
        loss_sum += loss.detach()
        if observer is not None:
            observer.end(history["steps"])
        history["steps"] += 1
    history["seconds"] += time.perf_counter() - begin
    history["train"].append(float(np.mean(all_ranks(100 * float(right) / order.size))))
    history["loss"].append(float(np.mean(all_ranks(float(loss_sum) / len(order)))))


def _tested(network: nn.Module, data: Data, are_replicas: bool) -> list[float]:
    """Return the test accuracy of each rank; where all have the same network, they share the work."""
    if not are_replicas:
        return [100 * right / len(data.test_y) for right in all_ranks(_right(network, data.test_x, data.test_y))]
    mine = slice(hvd.rank(), None, hvd.size())
    return [100 * sum(all_ranks(_right(network, data.test_x[mine], data.test_y[mine]))) / len(data.test_y)]


def _right(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    network.eval()
    with torch.no_grad():
        batches = zip(x.split(_TEST_BATCH), y.split(_TEST_BATCH), strict=True)
        right = sum(int((network(x).argmax(dim=1) == y).sum()) for x, y in batches)
    network.train()
    return right


def _bytes_sent(optimizer: Any) -> int:
    return optimizer.compression_stats()["total"]["bytes_sent"] if hasattr(optimizer, "compression_stats") else 0


def _state(epoch: int, network: nn.Module, optimizer: Any, history: dict[str, Any], observer: Observer | None) -> Any:
    return {
        "epoch": epoch,
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": optimizer.compression_state_dict() if hasattr(optimizer, "compression_state_dict") else None,
        "history": history,
        "watched": None if observer is None else observer.found,
    }


def _restored(
    checkpoint: Checkpoint, network: nn.Module, optimizer: Any, history: dict[str, Any], observer: Observer | None
) -> int:
    """Restore the last checkpoint; returns the epoch to begin with."""
    state = checkpoint.load()
    if state is None:
        return 0
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    if state["compression"] is not None:
        optimizer.load_compression_state_dict(state["compression"])
    history.update(state["history"])
    if observer is not None:
        observer.found.update(state["watched"])
    return state["epoch"] + 1


def _digest(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in network.parameters():
        digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
