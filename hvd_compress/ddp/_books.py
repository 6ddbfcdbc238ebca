"""What is kept of each model that has a hook: counters, residuals, saved state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvd_compress._torch.states import with_tensors
from hvd_compress.engine import Ledger, empty_state
from hvd_compress.errors import StateError
from hvd_compress.exchange import Counters

__all__ = ["Books", "keep_books", "load_state_dict", "state_dict", "stats", "unwrapped"]


class Books:
    """What is kept of one model.

    Args:
        compression: what the user gave.
        ledger: returns the ledger of now; None where one rank exchanges nothing, and owes nothing.
        load: takes over a state.
        scales: whether the hook was given a scaler.
    """

    def __init__(
        self,
        compression: Any,
        ledger: Callable[[], Ledger[Any] | None],
        load: Callable[[dict[str, Any]], None],
        scales: bool,
    ) -> None:
        self.name = repr(compression)
        self.ledger = ledger
        self._load = load
        self._scales = scales

    def load(self, state: Any) -> None:
        """Take over a state.

        Raises:
            StateError: it cannot be taken over.
        """
        is_owing = isinstance(state, dict) and any(state.get(kind) for kind in ("residuals", "owner_residuals"))
        scale = state.get("loss_scale", 1.0) if is_owing else 1.0
        if not self._scales and isinstance(scale, int | float) and scale != 1.0:
            raise StateError(
                f"a state that was saved at a loss scale of {scale:g}, for a hook without a scaler: its residuals "
                "would have the wrong size. Register the hook with scaler=, which is "
                'torch.amp.GradScaler("cuda", enabled=False) where losses are not scaled any more'
            )
        self._load(state)


_books: WeakKeyDictionary[torch.nn.Module, Books] = WeakKeyDictionary()


def keep_books(model: torch.nn.Module, books: Books) -> None:
    """Keep these books as long as the model lives."""
    _books[model] = books


def unwrapped(model: Any) -> Any:
    """Return the model that `torch.compile` was given."""
    return getattr(model, "_orig_mod", model)


def _books_of(model: Any, call: str) -> Books:
    books = _books.get(unwrapped(model)) if isinstance(model, torch.nn.Module) else None
    if books is None:
        raise StateError(
            f"ddp.{call} of a {type(model).__name__} without a hook: give the model that ddp.register_comm_hook or "
            "ddp.fsdp_all_reduce_hook was given, not what is inside of it"
        )
    return books


def stats(model: torch.nn.Module) -> dict[str, Any]:
    """Return bytes, seconds and residual norms of all steps so far on this rank.

    Args:
        model: a model that has a hook.

    Returns:
        A dict like that of `compression_stats()` of the optimizers of `hvd_compress.torch`. "compressor" is a repr,
        "total" has counters, and "tensors" has `{name: counters}`. Counters are: steps, bytes_sent, bytes_received,
        dense_bytes (what an uncompressed ring allreduce would have sent), ratio, encode_seconds, exchange_seconds (in
        collectives, beside the backward pass), decode_seconds, residual_norm (Euclidean, in units of the sum over
        ranks); and the exchange of each tensor.

    Raises:
        StateError: the model has no hook.

    Example::

        print(ddp.stats(model)["total"]["ratio"])
    """
    books = _books_of(model, "stats")
    ledger = books.ledger()
    if ledger is None:
        return {"compressor": books.name, "total": Counters().report(0.0), "tensors": {}}
    return {"compressor": books.name, **ledger.stats()}


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the residuals of this rank; save them on each rank, since they differ between ranks.

    Args:
        model: a model that has a hook; call this between two steps.

    Returns:
        A dict of tensors, on the host, and plain values that `torch.save` takes; see `hvd_compress.feedback`.

    Raises:
        StateError: the model has no hook.

    Example::

        torch.save(ddp.state_dict(model), f"residuals-{dist.get_rank()}.pt")
    """
    ledger = _books_of(model, "state_dict").ledger()
    return with_tensors(empty_state() if ledger is None else ledger.state_dict())


def load_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Restore the residuals that `state_dict` returned on this rank; call it after registering, before the first step.

    With another number of ranks, collect the states of all ranks and divide them with
    `hvd_compress.feedback.redistribute(states, ranks, average=True)`. A single rank adds its residuals to its next
    gradients.

    Args:
        model: a model that has a hook.
        state: of this rank.

    Raises:
        StateError: not such a state, of another rank or number of ranks, or of other tensors; or the model has no hook,
            or one without a scaler, and losses were scaled when the state was saved.

    Example::

        ddp.load_state_dict(model, torch.load(f"residuals-{dist.get_rank()}.pt"))
    """
    _books_of(model, "load_state_dict").load(state)
