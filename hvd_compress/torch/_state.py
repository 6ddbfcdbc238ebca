"""Parameters and optimizer states of one rank for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress._torch.parameters import as_tensors
from hvd_compress.torch._collectives import broadcast_async_, synchronize
from hvd_compress.torch._plain import Sent, dumps, loads
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "of_root", "values_of_root"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Make tensors of all ranks those of one rank, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()`, or a dict or list like them;
            tensors of any type and layout. None among the values of a dict is left alone.
        root_rank: the rank whose values all get.

    Raises:
        ValueError: `params` is none of these.
        TypeError: one of the values is no tensor, or has no memory yet.
        HorovodInternalError: the ranks' tensors of one name differ in shape or type.

    Example::

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    named = _listed(params)
    for name, tensor in named:
        _refuse_unfit(name, tensor)
    _broadcast([(name, name or f"tensor {i}", p) for i, (name, p) in enumerate(named)], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Make the optimizer's state and settings on all ranks those of one rank; no parameter changes.

    Call it before or after `broadcast_parameters`, and before or after `DistributedOptimizer`. All that `state_dict()`
    holds is taken over, whatever the other ranks have: learning rates, momenta of any type, states that only one rank
    has. Residuals of compressors are not among it: see `compression_state_dict`.

    Gradients stay as they are. Where the optimizer has no state yet, missing ones become zeros, as Horovod's function
    leaves them.

    Args:
        optimizer: any torch optimizer, wrapped or not.
        root_rank: the rank whose state all get.
        model: not needed; it is taken because Horovod's function takes it.

    Raises:
        TypeError: not an optimizer of torch; or the root's state holds something else than numbers, text, tensors and
            containers of these, which would have to be unpickled; then on all ranks.
        MismatchError: the ranks' optimizers have other parameters, or they name other roots; raised on all of them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"broadcast_optimizer_state of {type(optimizer).__name__}: give an optimizer of torch.optim")
    if not optimizer.state:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None):
            p.grad = torch.zeros_like(p)
    shapes = [[[list(p.shape), str(p.dtype)] for p in group["params"]] for group in optimizer.param_groups]
    TorchRanks().agree({"root_rank": root_rank, "parameter groups": shapes})
    tensors: list[torch.Tensor] = []
    is_root = hvd.rank() == root_rank
    told = of_root(_packed(_content(optimizer), tensors) if is_root else None, "hvd_compress.optimizer_state")
    if not is_root:
        told = _Unpacking(optimizer, tensors).run(told)
    labels = [f"optimizer_state.{i}" for i in range(len(tensors))]
    _broadcast([(f"hvd_compress.{label}", label, t) for label, t in zip(labels, tensors, strict=True)], root_rank)
    if not is_root:
        _take_over(optimizer, told)
    if isinstance(optimizer, HearsOfStates):
        optimizer.state_has_come()


@runtime_checkable
class HearsOfStates(Protocol):
    """An optimizer whose ranks compare something after they have been given a state."""

    def state_has_come(self) -> None:
        """All ranks have the state of one of them."""


def of_root(mine: Any, name: str) -> Any:
    """What the root gives, which others give None for; raises TypeError on all ranks where it cannot be sent."""
    said = b""
    if mine is not None:
        try:
            said = dumps([True, mine])
        except TypeError as error:
            said = dumps([False, str(error)])
    is_good, told = loads(TorchRanks().gather_bytes(said, name))
    if not is_good:
        raise TypeError(told)
    return told


def values_of_root(mine: Any, name: str) -> Any:
    """What rank 0 gives, with its arrays as tensors on the host, on all ranks; a collective call.

    Args:
        mine: plain values, tensors, arrays, and containers of these; only that of rank 0 counts.
        name: of the collectives.

    Raises:
        TypeError: the value of rank 0 cannot be sent; raised on all ranks.
    """
    tensors: list[torch.Tensor] = []
    is_root = hvd.rank() == 0
    # in a list, since None says that a rank gives nothing
    told = of_root(_packed([as_tensors(mine)], tensors) if is_root else None, name)
    if not is_root:
        told = _with_room(told, tensors)
    _broadcast([(f"{name}.{i}", f"{name}.{i}", t) for i, t in enumerate(tensors)], 0)
    return mine if is_root else told[0]


# -- tensors ---------------------------------------------------------------------------------------------------------


def _listed(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return sorted((name, p) for name, p in params.items() if p is not None)
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"broadcast_parameters of {type(params).__name__}: give model.state_dict(), model.named_parameters() or a "
            "list of tensors"
        )
    return [p if isinstance(p, tuple) else (None, p) for p in params]


def _refuse_unfit(name: str | None, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"broadcast_parameters: {name!r} is {type(tensor).__name__}, no tensor. Leave it out, and send it by "
            "broadcast_object"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"broadcast_parameters: {name!r} has no shape yet. Run the model once on all ranks before you broadcast it"
        )


def _broadcast(named: Iterable[tuple[str | None, str, torch.Tensor]], root_rank: int) -> None:
    """Broadcast tensors in place: each with its name for Horovod, and one for errors."""
    failed: HorovodInternalError | None = None
    started = [(label, broadcast_async_(tensor, root_rank, name)) for name, label, tensor in named]
    for label, handle in started:
        # each is waited for, so that nothing of theirs is in flight when an error is raised
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            failed = failed or HorovodInternalError(f"broadcast of {label!r}: {error}")
    if failed is not None:
        raise failed


# -- states ----------------------------------------------------------------------------------------------------------


def _content(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Settings of each group, and the state of each parameter by its group and its place there."""
    params = [(p, (i, j)) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    places: dict[Any, Any] = dict(params)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    # some optimizers keep what belongs to none of the parameters under a name of its own
    kept = {key: entry for key, entry in optimizer.state.items() if key in places or not isinstance(key, torch.Tensor)}
    return {"groups": groups, "state": {places.get(key, key): entry for key, entry in kept.items()}}


def _packed(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value in which `Sent` stands for each plain tensor, which `tensors` gets."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        return Sent(tuple(value.shape), value.dtype, value.device.type == "cpu")
    return _rebuilt(value, lambda inner: _packed(inner, tensors))


def _with_room(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value in which tensors on the host, which `tensors` gets, stand where `Sent` was."""
    if isinstance(value, Sent):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    return _rebuilt(value, lambda inner: _with_room(inner, tensors))


class _Unpacking:
    """Makes room on this rank for the tensors of the root.

    Args:
        optimizer: where memory that fits is used again.
        tensors: gets them in the order of the root's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> None:
        self._optimizer, self._tensors = optimizer, tensors

    def run(self, told: dict[str, Any]) -> dict[str, Any]:
        """The root's content with tensors of this rank, which hold nothing yet."""
        mine = _content(self._optimizer)
        groups = [
            self._unpacked(theirs, own, self._first(i))
            for i, (theirs, own) in enumerate(zip(told["groups"], mine["groups"], strict=True))
        ]
        state = {
            place: self._unpacked(entry, mine["state"].get(place), self._parameter(place))
            for place, entry in told["state"].items()
        }
        return {"groups": groups, "state": state}

    def _unpacked(self, value: Any, mine: Any, like: torch.Tensor | None) -> Any:
        if isinstance(value, Sent):
            tensor = self._room(value, mine, like)
            self._tensors.append(tensor)
            return tensor
        own = mine if isinstance(mine, Mapping) else {}
        if isinstance(value, dict):
            return _like(value, ((k, self._unpacked(v, own.get(k), like)) for k, v in value.items()))
        return _rebuilt(value, lambda inner: self._unpacked(inner, None, like))

    def _room(self, sent: Sent, mine: Any, like: torch.Tensor | None) -> torch.Tensor:
        device = torch.device("cpu") if sent.is_on_host or like is None else like.device
        if isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype, mine.device) == (
            torch.Size(sent.shape), sent.dtype, device,
        ):  # fmt: skip
            return mine.detach()
        if like is not None and like.shape == torch.Size(sent.shape):
            return torch.empty_like(like.detach(), dtype=sent.dtype, device=device)
        return torch.empty(sent.shape, dtype=sent.dtype, device=device)

    def _first(self, group: int) -> torch.Tensor | None:
        return next(iter(self._optimizer.param_groups[group]["params"]), None)

    def _parameter(self, place: Any) -> torch.Tensor | None:
        if not isinstance(place, tuple):
            return self._first(0) if self._optimizer.param_groups else None
        group, position = place
        parameter: torch.Tensor = self._optimizer.param_groups[group]["params"][position]
        return parameter


def _take_over(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> None:
    """Make the content that of the optimizer; dicts of groups, which schedulers and wrappers hold, stay the same."""
    for group, settings in zip(optimizer.param_groups, content["groups"], strict=True):
        for key in group.keys() - settings.keys() - {"params"}:
            del group[key]
        group.update(settings)
    state = {}
    for place, entry in content["state"].items():
        is_parameter = isinstance(place, tuple)
        state[optimizer.param_groups[place[0]]["params"][place[1]] if is_parameter else place] = entry
    optimizer.state.clear()
    optimizer.state.update(state)


def _rebuilt(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A dict, list or tuple with what it holds converted; anything else as it is."""
    if isinstance(value, dict):
        return _like(value, ((key, convert(inner)) for key, inner in value.items()))
    if isinstance(value, list):
        return [convert(inner) for inner in value]
    if isinstance(value, tuple):
        inner = [convert(inner) for inner in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return value


def _like(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of the same kind with other items."""
    made = value.copy()
    made.clear()
    made.update(items)
    return made
