"""What optimizers share that exchange momentum: names, closures, GradScaler, states of what this rank alone keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NoReturn

import horovod.torch as hvd
import torch

from hvd_compress._torch.parameters import by_name
from hvd_compress._torch.scaling import told_by_scaler, unscale
from hvd_compress.elastic import is_elastic
from hvd_compress.engine.momentum import TAKEN_BACK, check_option, refuse_auto, take_own
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.feedback import check_state
from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.owners import refuse_retired, take_over
from hvd_compress.torch._momentum.carrier import Carrier, stand_in, wide
from hvd_compress.torch._ranks import TorchRanks

__all__ = ["MomentumOptimizer"]


_OF_OTHERS = ("dampening", "centered", "lr_decay", "etas", "rho", "lambd", "betas")
"""Options by which groups of torch's optimizers are known."""


def refuse_elastic_sets(kind: str, process_set: hvd.ProcessSet) -> None:
    """Raise UnsupportedError in an elastic run."""
    if is_elastic():
        raise UnsupportedError(
            f"{kind}(process_set={process_set}) in an elastic run: Horovod forgets process sets when ranks come or go. "
            "Leave process_set out, or start with a fixed number of ranks"
        )


class MomentumOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose ranks exchange momentum in `step`, not gradients in `backward`.

    Gradients stay those of their rank. A rank without a gradient of a parameter counts as one with zeros. Where what is
    exchanged is not finite on some rank, no rank makes the step: parameters, momentum and what compression owes stay as
    they were.

    Args:
        kind: the class's public name, for errors.
        params: as torch.optim takes them.
        defaults: of groups.
        named_parameters: names of the parameters, which key collectives, residuals and randomness.
        compression: of what is exchanged.
        process_set: the ranks that take part.
        told: settings that ranks compare.
    """

    # a GradScaler would not call `step` at all where a gradient is not finite, and ranks would count differently
    _step_supports_amp_scaling = True
    _carrier: Carrier
    _KEPT: ClassVar[Sequence[str]] = ()
    """What torch keeps of each parameter in `state`."""
    _OWN: ClassVar[str]
    """What the values of `_own` are called in states."""
    _RANGES: ClassVar[Mapping[str, tuple[float, float | None]]] = {}
    """Options of groups that are numbers: the least, and what they have to be below."""

    def __init__(
        self,
        kind: str,
        params: Any,
        defaults: dict[str, Any],
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        process_set: hvd.ProcessSet,
        told: dict[str, Any],
    ) -> None:
        self._kind = kind
        if process_set.process_set_id != 0:
            refuse_elastic_sets(kind, process_set)
        self._told_settings = told
        self.has_met = not is_elastic()
        """Whether its exchanges are made for the ranks that there are."""
        refuse_auto(kind, compression)
        self._retired = False
        self._taken_back = 0
        self._is_spoiled = False
        """Whether a GradScaler has found that a gradient of the step under way was not finite."""
        self._is_complete = False
        self._own: dict[torch.Tensor, torch.Tensor] = {}
        """What this rank alone keeps of parameters beside the residuals; sums over ranks of it count."""
        self._process_set = process_set
        self._given = {id(p): name for name, p in by_name("named_parameters", named_parameters or ()).items()}
        super().__init__(params, defaults)
        self._names: dict[torch.Tensor, str] = {}
        for group in self.param_groups:
            self._name(group)
        if process_set.included() and process_set.size() > 1:
            self._agree_on_settings()

    def _agree_on_settings(self) -> None:
        groups = [self._told(group) for group in self.param_groups]
        names = [name for p, name in self._names.items() if p.requires_grad] or list(self._names.values())
        told = {"optimizer": self._kind, **self._told_settings, "groups": groups}
        TorchRanks(self._process_set).agree(told, beside=names)

    def _told(self, group: dict[str, Any]) -> dict[str, Any]:
        # the text of a tensor names its device, which differs between ranks
        plain = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        kept = {key: repr(value) for key, value in plain.items()}
        names = [[self._names[p], list(p.shape), str(p.dtype), p.requires_grad] for p in group["params"]]
        return {**kept, "parameters": names}

    def _complete(self) -> None:
        """The subclass has made its carriers."""
        self._is_complete = True
        take_over(self, (p for p in self._names if p.requires_grad), self._kind, self)

    # -- parameters ------------------------------------------------------------------------------------------------

    def _name(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Name the parameters of a group and refuse what cannot be exchanged; returns them."""
        names = group.get("param_names") or [None] * len(group["params"])
        for p, own in zip(group["params"], names, strict=True):
            name = self._given.get(id(p), own) or f"parameter.{len(self._names)}"
            if name in self._names.values():
                raise ValueError(f"{self._kind}: two parameters are named {name!r}; names must differ")
            if p.is_complex() or not p.is_floating_point():
                raise TypeError(
                    f"{self._kind} with parameter {name!r} of {p.dtype}: parameters must be real floating-point "
                    "numbers. Keep a complex one as torch.view_as_real"
                )
            self._names[p] = name
        return list(group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all ranks before the same step; they are compared there."""
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if self._is_complete:
            self._take_new(self._name(self.param_groups[-1]))
            take_over(self, (p for p in self._names if p.requires_grad), self._kind, self)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for an option of a group that is out of its range."""
        for name, (least, below) in self._RANGES.items():
            check_option(self._kind, name, group[name], least, below)

    def _take_new(self, parameters: list[torch.Tensor]) -> None:
        """Make room in the carriers for parameters that were added."""
        for p in parameters:
            self._carrier.add(self._names[p], self._stand_in(p), p)

    def _stand_in(self, p: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter in the carrier: of its shape, unless the subclass exchanges another one."""
        return stand_in(p)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Name, parameter and group of all that take gradients now."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    yield self._names[p], p, group

    def _owned(self) -> set[int]:
        return {id(p) for p in self._names if p.requires_grad}

    def retire(self) -> None:
        """Another optimizer takes over the parameters: refuse to go on."""
        self._retired = True
        self._carrier.optimizer.retire()

    # -- elastic runs ----------------------------------------------------------------------------------------------

    @property
    def combiner(self) -> Combiner:
        """Of the exchange whose residuals belong to this rank."""
        combiner: Combiner = self._carrier.optimizer._combiner
        return combiner

    def agree_in_elastic_run(self) -> None:
        """Compare with the ranks that there are, and begin where rank 0 is, whose state all have; a collective call."""
        self._agree_on_settings()

    def own_labels(self) -> set[str]:
        """Names of what this rank alone keeps."""
        return {self._label(p) for p in self._names}

    @property
    def own_values(self) -> dict[str, Any]:
        """Copies of what this rank alone keeps, as arrays, by those names."""
        return {
            self._label(p): {"shape": list(tensor.shape), "values": tensor.reshape(-1).cpu().clone().numpy()}
            for p, tensor in self._own.items()
        }

    @own_values.setter
    def own_values(self, entries: dict[str, Any]) -> None:
        self._own = {
            p: torch.from_numpy(entries[self._label(p)]["values"].copy()).view(p.shape).to(p.device)
            for p in self._names
            if self._label(p) in entries
        }

    # -- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange and update; a collective call.

        Args:
            closure: computes the loss and the gradients of this rank, and returns the loss; called once.

        Returns:
            What the closure has returned.

        Raises:
            GradientError: another optimizer has taken over the parameters.
            MismatchError: the ranks' parameters or steps differ; raised on all of them.
        """
        if self._retired:
            refuse_retired()
        if not self.has_met:
            raise UnsupportedError(
                f"{self._kind} in an elastic run, and no hvd.elastic.TorchState has synced this optimizer: exchanges "
                "are made there for the ranks that there are. Give it to hvd.elastic.TorchState(model, optimizer) of "
                "hvd_compress.torch, and train inside of a function that is decorated with hvd.elastic.run"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with told_by_scaler(self) as told:
            if told.get("grad_scale") is not None:
                unscale(self.param_groups, told["grad_scale"])
            self._is_spoiled = bool(told.get("found_inf", False))
            if not self._update():
                self._take_back(is_expected=bool(told))
        return loss

    def _update(self) -> bool:
        """Exchange and update; returns False if something was not finite, and nothing has changed."""
        raise NotImplementedError

    def _averaged(self, carrier: Carrier, arrays: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """Average what this step exchanges; see `Carrier.average`. Even of nothing: other ranks may have something."""
        if self._is_spoiled:
            # this tells all ranks. The gradients may be finite by now: clipping by value makes them so
            for array in arrays.values():
                array.fill_(torch.nan)
        return carrier.average(arrays)

    def _take_back(self, is_expected: bool) -> None:
        self._taken_back += 1
        if not is_expected:
            # a GradScaler expects such steps, and lowers its scale
            warnings.warn(TAKEN_BACK.format(kind=self._kind), RuntimeWarning, stacklevel=4)

    # -- states ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, which is the same on all ranks; residuals have another method.

        Raises:
            StateError: the state is of another kind of optimizer; nothing has changed then.
        """
        self._refuse_other_kinds(state_dict)
        super().load_state_dict(state_dict)
        # torch converts what it loads to the parameters' types, and moments of halves are wider
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and key in self.state[p]:
                    self.state[p][key] = value.detach().to(device=p.device, dtype=wide(p), copy=True)

    def _refuse_other_kinds(self, state_dict: dict[str, Any]) -> None:
        of_others = [key for key in _OF_OTHERS if key not in self.defaults]
        groups = [
            (f"group {i}", group, list(self.defaults), of_others) for i, group in enumerate(state_dict["param_groups"])
        ]
        kept = [
            (f"parameter {i}", entry, list(self._KEPT), of_others if self._KEPT else list(entry))
            for i, entry in state_dict["state"].items()
        ]
        for what, entry, needed, foreign in (*groups, *kept):
            missing = [f"no {key!r}" for key in needed if key not in entry]
            if has := [*missing, *(repr(key) for key in foreign if key in entry)]:
                raise StateError(
                    f"load_state_dict() of a {self._kind}: {what} of the state has {has[0]}, so it is of another kind "
                    "of optimizer. Load model and residuals, and let the optimizer begin anew"
                )

    def compression_state_dict(self) -> dict[str, Any]:
        """What this rank alone keeps, to be saved per rank: residuals of compression among it.

        Returns:
            A dict of tensors and plain values that `torch.save` takes; see `hvd_compress.feedback`, whose
            `redistribute` divides it among another number of ranks.
        """
        state: dict[str, Any] = self._carrier.optimizer.compression_state_dict()
        for label, entry in self.own_values.items():
            state["residuals"][label] = {**entry, "values": torch.from_numpy(entry["values"])}
        return state

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `compression_state_dict` returned on this rank.

        Raises:
            StateError: not such a state, of another rank or number of ranks, or of other parameters.
        """
        checked = check_state(state)
        own = {}
        for p, label in ((p, self._label(p)) for p in self._names):
            dtype = "float64" if wide(p) == torch.float64 else "float32"
            values = take_own(checked["residuals"], label, tuple(p.shape), dtype)
            if values is not None:
                own[p] = torch.from_numpy(values).view(p.shape).to(p.device)
        self._carrier.optimizer.load_compression_state_dict(checked)
        self._own = own

    def _label(self, p: torch.Tensor) -> str:
        return f"{self._OWN} of {self._names[p]}"

    def compression_stats(self) -> dict[str, Any]:
        """Bytes, seconds and residual norms of what was exchanged compressed on this rank; see `DistributedOptimizer`.

        Returns:
            What that returns. "steps_taken_back" says how many steps no rank has made, since something was not finite.
        """
        return {**self._carrier.optimizer.compression_stats(), "steps_taken_back": self._taken_back}

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {self._kind} cannot be copied or pickled: it exchanges the momentum of the parameters that it was made "
            "for. Save state_dict() and compression_state_dict(), and make one of the other model"
        )
