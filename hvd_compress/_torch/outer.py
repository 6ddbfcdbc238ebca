"""The outer optimizer of DiLoCo: a torch optimizer of float32 or float64 copies of the parameters, on the host."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress import saved
from hvd_compress.errors import StateError
from hvd_compress.tensors import ParameterSpec

__all__ = ["OuterOptimizer", "nesterov"]

Array = np.ndarray[Any, Any]
Make = Callable[[Any], torch.optim.Optimizer]


def nesterov(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Make the outer optimizer of the papers, with their rate and momentum.

    Source: Douillard et al., DiLoCo (arXiv 2311.08105, 2023), section 3.

    Args:
        params: those of a fragment.
    """
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer:
    """The outer optimizer of one fragment; see `hvd_compress.diloco.Outer`.

    Args:
        make: makes a torch optimizer of parameters.
        tensors: the parameters of the fragment.
        arrays: what ranks agreed on last of each, flat; written to.

    Raises:
        TypeError: `make` is no function, or makes no torch optimizer.
        ValueError: its optimizer has not exactly these parameters.
    """

    def __init__(self, make: Make, tensors: Sequence[ParameterSpec], arrays: Sequence[Array]) -> None:
        if not callable(make):
            raise TypeError(
                f"outer={type(make).__name__}: give a function of parameters that makes a torch optimizer, such as "
                "lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)"
            )
        self._make = make
        self._arrays = arrays
        self._shapes = [t.shape for t in tensors]
        self._params = [_parameter(array, shape) for array, shape in zip(arrays, self._shapes, strict=True)]
        self._optimizer = self._made(self._params)

    def _made(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self._make(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"outer(params) has made a {type(optimizer).__name__}: it must make a torch optimizer")
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(map(id, params)):
            raise ValueError(
                f"outer(params) has made an optimizer of {len(held)} parameters: it must have the {len(params)} that "
                "it was given, and no others"
            )
        return optimizer

    def step(self, gradients: Sequence[Array | None]) -> None:
        """Update what ranks agreed on last; None leaves a parameter out."""
        for p, gradient, shape in zip(self._params, gradients, self._shapes, strict=True):
            p.grad = None if gradient is None else torch.from_numpy(gradient).view(shape)
        self._optimizer.step()
        for p, array in zip(self._params, self._arrays, strict=True):
            p.grad = None
            if p.data_ptr() != array.ctypes.data:
                # an optimizer that gives parameters other memory
                array[...] = p.detach().reshape(-1).numpy()

    def describe(self) -> Any:
        """Return the class and the options of all groups."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return [type(self._optimizer).__qualname__, [{k: repr(v) for k, v in group.items()} for group in options]]

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return a copy of the torch optimizer's state."""
        return copy.deepcopy(self._optimizer.state_dict())

    def check(self, state: Any) -> dict[str, Any]:
        """Check a state and return what `load` takes over of it.

        Raises:
            StateError: of another optimizer or of other parameters, or damaged.
        """
        given = saved.record(f"state {_OF}", state, ["state", "param_groups"])
        mine = self._optimizer.state_dict()
        groups = saved.sequence(f"param_groups {_OF}", given["param_groups"], len(mine["param_groups"]))
        checked = {
            "state": self._checked_entries(given["state"]),
            "param_groups": [_checked_group(g, m) for g, m in zip(groups, mine["param_groups"], strict=True)],
        }
        self._try(checked)
        return checked

    def _try(self, checked: dict[str, Any]) -> None:
        """Load a state into another optimizer: of entries that no step has made here, only that knows the form."""
        try:
            self._twin().load_state_dict(copy.deepcopy(checked))
        except Exception as error:
            raise StateError(f"state {_OF} cannot be loaded: {type(error).__name__}: {str(error)[:200]}") from error

    def load(self, checked: Any) -> None:
        """Take over what `check` returned."""
        self._optimizer.load_state_dict(copy.deepcopy(checked))

    def _checked_entries(self, state: Any) -> dict[int, dict[str, Any]]:
        if not isinstance(state, dict):
            raise StateError(f"state {_OF} is of type {type(state).__name__}: must be a dict")
        if not state:
            return {}
        template = self._template()
        checked = {}
        for number, entry in state.items():
            i = saved.integer(f"number of a parameter {_OF}", number, 0, len(self._params) - 1)
            known = template.get(i, {})
            what = f"state of parameter {i} {_OF}"
            of_parameter = saved.record(what, entry, known)
            checked[i] = {k: _checked_value(f"{k} in the {what}", v, known.get(k)) for k, v in of_parameter.items()}
        return checked

    def _template(self) -> Mapping[int, Mapping[str, Any]]:
        """Return what the optimizer keeps after a step, as one of other parameters of the same shapes does."""
        optimizer = self._twin()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        kept: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
        return kept

    def _twin(self) -> torch.optim.Optimizer:
        """Return an optimizer like this one, of other parameters of the same shapes, before its first step.

        The user's function is not called for it: who keeps what that returned would keep the twin.
        """
        others = [_parameter(np.zeros_like(a), s) for a, s in zip(self._arrays, self._shapes, strict=True)]
        other_of = dict(zip(map(id, self._params), others, strict=True))
        twin = object.__new__(type(self._optimizer))
        attributes = {k: v for k, v in vars(self._optimizer).items() if k != "step"}
        twin.__dict__.update({k: OrderedDict() if k.endswith("_hooks") else v for k, v in attributes.items()})
        twin.state = defaultdict(dict)
        twin.param_groups = [
            {**group, "params": [other_of[id(p)] for p in group["params"]]} for group in self._optimizer.param_groups
        ]
        return twin


_OF = "of the outer optimizer in a DiLoCo state"


def _parameter(array: Array, shape: tuple[int, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.from_numpy(array).view(shape))


def _checked_group(given: Any, mine: Mapping[str, Any]) -> dict[str, Any]:
    group = saved.record(f"group {_OF}", given, mine)
    if not saved.equal(group["params"], mine["params"]):
        raise StateError(f"group {_OF} has the parameters {str(group['params'])[:80]}, here are {mine['params']}")
    return {**mine, **{k: _checked_option(f"{k} {_OF}", group[k], v) for k, v in mine.items() if k != "params"}}


def _checked_option(what: str, given: Any, mine: Any) -> Any:
    if isinstance(mine, bool):
        return saved.flag(what, given)
    if isinstance(mine, int | float):
        number = saved.real(what, given)
        # torch takes no integers beyond 64 bits where it multiplies by an option
        is_kept = isinstance(given, float) or (isinstance(given, int) and abs(given) < 2**31)
        return given if is_kept else number
    if isinstance(mine, torch.Tensor):
        return _checked_value(what, given, mine)
    if not saved.equal(given, mine) and not isinstance(given, type(mine)):
        raise StateError(f"{what} is of type {type(given).__name__}: must be of {type(mine).__name__}")
    return given


def _checked_value(what: str, given: Any, known: Any) -> Any:
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.layout == torch.strided:
        saved.floats(what, given.reshape(-1), None, np.float64)
    if known is None:
        return given
    if not isinstance(known, torch.Tensor):
        return _checked_option(what, given, known)
    if not isinstance(given, torch.Tensor | np.ndarray):
        raise StateError(f"{what} is of type {type(given).__name__}: must be a tensor")
    flat = saved.floats(what, given.reshape(-1), None, np.float64)
    if tuple(given.shape) != tuple(known.shape):
        raise StateError(f"{what} has shape {tuple(given.shape)}: must be {tuple(known.shape)}")
    return torch.from_numpy(np.array(flat)).view(known.shape).to(known.dtype)
