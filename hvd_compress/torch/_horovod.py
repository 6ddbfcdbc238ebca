"""The private seams of horovod.torch 0.28, all of them; the rest of the package uses its public names.

Quoted lines are of horovod/torch/optimizer.py, version 0.28.1.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from horovod.common import process_sets
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer as HorovodOptimizer

from hvd_compress.errors import UnsupportedError

__all__ = [
    "HorovodOptimizer",
    "formed_groups",
    "go_on_from",
    "keeping_groups",
    "known_process_sets",
    "laid_over",
    "make_class",
    "refuse_wrapped",
    "relay",
    "step_below",
    "tell_schedulers",
]

_OF_HOROVOD = {
    "_compression", "_parameter_names", "backward_passes_per_step", "_allreduce_delay", "op",
    "gradient_predivide_factor", "sparse_as_dense", "process_set", "_handles", "_grad_accs", "_requires_update",
    "_synchronized", "_should_synchronize", "_groups", "_p_to_group", "_group_counts",
}  # fmt: skip
"""What the constructor of `HorovodOptimizer` sets (l. 45-104)."""


def make_class(base: type[torch.optim.Optimizer], overrides: type) -> type[torch.optim.Optimizer]:
    """A class like `base` with Horovod's distributed methods and ours over them.

    Horovod's methods call `super(self.__class__, self)`, so that a subclass would recurse for ever. It builds its
    class from a dict for that reason (l. 599: `type(optimizer.__class__.__name__, (optimizer.__class__,),
    dict(_DistributedOptimizer.__dict__))`), and so do we. `__module__` stays Horovod's: broadcast_optimizer_state
    (functions.py l. 105) knows a distributed optimizer by it, and would otherwise start a collective step.
    """
    hidden = ("__module__", "__dict__", "__weakref__", "__doc__")
    # what it derives from, too: `object` excepted
    ours = {k: v for part in overrides.__mro__[-2::-1] for k, v in vars(part).items() if k not in hidden}
    methods = {**vars(HorovodOptimizer), **ours}
    public = _of_itself(methods)
    # torch calls the hooks of a step around the one below
    public["step"].hooked = True
    return type(base.__name__, (base,), {**methods, **public})


def go_on_from(wrapped: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> None:
    """Give a wrapped optimizer what the plain one has: its state, defaults, hooks, and attributes of its class.

    Horovod's constructor gives the one of the class the parameter groups alone (l. 45).
    """
    # a learning-rate scheduler that knows the optimizer already has laid its own `step` over it; lists of groups grow
    # with `add_param_group` of each
    apart = {"step", "param_groups", *_OF_HOROVOD}
    wrapped.__dict__.update({k: v for k, v in vars(plain).items() if k not in apart})
    wrapped._plain = weakref.ref(plain)  # type: ignore[attr-defined]


def tell_schedulers(wrapped: Any) -> None:
    """Let a learning-rate scheduler that was made of the plain optimizer know that there was a step."""
    plain = wrapped._plain()
    if plain is not None:
        plain._opt_called = True


@contextmanager
def keeping_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let dicts of parameter groups, which schedulers of the plain optimizer hold, stay the same while others come."""
    groups = optimizer.param_groups
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def _load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    """Load the state of the optimizer that was wrapped."""
    with keeping_groups(self):
        super(self.__class__, self).load_state_dict(state_dict)


def _of_itself(methods: Mapping[str, Any]) -> dict[str, Any]:
    """The public ones of some methods, called with the optimizer itself where another object stands in for it.

    Lightning and its Fabric give users an object whose class derives from the optimizer's: what it knows of a step is
    what the class has by default, or what was so once, and `super(self.__class__, self)` recurses for ever.
    """

    def of_itself(method: Any) -> Any:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            itself = getattr(self, "_itself", None)
            return method(self if itself is None else itself(), *args, **kwargs)

        return called

    return {k: of_itself(v) for k, v in methods.items() if k[0] != "_" and callable(v)}


def refuse_wrapped(by: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError if an optimizer is distributed already."""
    if type(optimizer).__module__ == HorovodOptimizer.__module__:
        raise UnsupportedError(
            f"{by} around an optimizer that is distributed already: give a torch optimizer. Where a cell of a notebook "
            "is run again, make that anew in the same cell"
        )


def laid_over(optimizer: torch.optim.Optimizer, overrides: type) -> Any:
    """An optimizer with the attributes of another one, and our methods over its class' own; none of Horovod's.

    `__module__` is Horovod's for the same reason as in `make_class`: broadcast_optimizer_state calls
    `super(optimizer.__class__, optimizer).step()` of such a class (functions.py l. 106), not a collective step.
    """
    base = type(optimizer)
    ours = {k: v for k, v in vars(overrides).items() if k not in ("__dict__", "__weakref__", "__doc__")}
    ours = {"load_state_dict": _load_state_dict, **ours}
    cls: Any = type(base.__name__, (base,), {**ours, **_of_itself(ours), "__module__": HorovodOptimizer.__module__})
    cls.__init__ = _refuse_another
    # see `make_class`
    cls.step.hooked = True
    wrapped = cls.__new__(cls)
    wrapped.param_groups = optimizer.param_groups
    go_on_from(wrapped, optimizer)
    wrapped._itself = weakref.ref(wrapped)
    return wrapped


def step_below(optimizer: Any) -> Any:
    """Make a step of the class that methods were laid over."""
    tell_schedulers(optimizer)
    return super(optimizer.__class__, optimizer).step()


def _refuse_another(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """In the place of the constructor of a class that has one optimizer; Horovod's own wrapper would derive from it."""
    raise UnsupportedError(
        "an optimizer of hvd_compress inside of another wrapper, such as horovod.torch.DistributedOptimizer: wrap a "
        "torch optimizer, once"
    )


def formed_groups(parameters: Sequence[torch.Tensor], groups: Any) -> list[tuple[torch.Tensor, ...]]:
    """Divide parameters into groups as Horovod does (l. 122-153); one that a list leaves out is a group of its own.

    Horovod broadcasts rank 0's order first, which fails in a process set without rank 0; here the fingerprint has
    made sure that the order is the same already.

    Args:
        parameters: that take gradients.
        groups: how many groups, or lists of parameters.
    """
    if not isinstance(groups, list):
        return [tuple(group) for group in split_list(list(parameters), groups) if group]
    taken = {id(p) for p in parameters}
    named = [tuple(p for p in group if id(p) in taken) for group in groups]
    grouped = {id(p) for group in named for p in group}
    return [group for group in named if group] + [(p,) for p in parameters if id(p) not in grouped]


def relay(optimizer: torch.optim.Optimizer, overrides: type) -> None:
    """Lay methods over those of an optimizer that `make_class` has made; `_below_step` is the `step` so far.

    The class stays one level above the user's, for the reason given there.
    """
    hidden = ("__module__", "__dict__", "__weakref__", "__doc__")
    made: Any = type(optimizer)
    below = {k: v for k, v in vars(made).items() if k not in hidden[1:]}
    ours = {k: v for k, v in vars(overrides).items() if k not in hidden}
    methods = {**ours, **_of_itself(ours)}
    methods["step"].hooked = True
    optimizer.__class__ = type(made.__name__, made.__bases__, {**below, "_below_step": made.step, **methods})


def known_process_sets() -> dict[int, list[int]]:
    """The ranks of each process set by its number; horovod/common/process_sets.py l. 105 reads them in this way."""
    sets: dict[int, list[int]] = process_sets._basics._get_process_set_ids_and_ranks()
    return {number: list(ranks) for number, ranks in sets.items()}
