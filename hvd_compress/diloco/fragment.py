"""Synchronize one fragment of the parameters: send what it has moved, step outside with the average, merge that."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_compress import saved
from hvd_compress.averaging import CHANGES, Array, FlatTensors, Groups, NodeSync
from hvd_compress.diloco.alone import AloneSync
from hvd_compress.diloco.settings import DiLoCoSettings
from hvd_compress.errors import StateError
from hvd_compress.kernels import merge as kernels
from hvd_compress.tensors import ParameterSpec

__all__ = ["Fragment", "MakeOuter", "Outer"]


class Outer(Protocol):
    """The outer optimizer of a fragment, which an edge brings."""

    def step(self, gradients: Sequence[Array | None]) -> None:
        """Update the parameters that it was made with, where they lie; None leaves one out."""

    def describe(self) -> Any:
        """Return what ranks compare, JSON-able."""

    def state_dict(self) -> Any:
        """Return everything that later steps depend on."""

    def check(self, state: Any) -> Any:
        """Check a state and return what `load` takes over of it; raises StateError, and changes nothing."""

    def load(self, checked: Any) -> None:
        """Take over what `check` returned."""


MakeOuter = Callable[[Sequence[ParameterSpec], Sequence[Array]], Outer]
"""Makes the outer optimizer of parameters; their flat arrays hold what ranks agreed on last, and are written to."""


class Fragment:
    """One fragment of the parameters of one rank.

    Args:
        numbers: of its tensors among all.
        tensors: its own.
        settings: the same on all ranks.
        groups: where this rank stands.
        name: of its collectives.
        make_outer: makes its outer optimizer.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        tensors: Sequence[ParameterSpec],
        settings: DiLoCoSettings,
        groups: Groups,
        name: str,
        make_outer: MakeOuter,
    ) -> None:
        self.numbers = numbers
        self._tensors = tensors
        self._settings = settings
        self.syncs: list[NodeSync | AloneSync] = []
        dtypes = [dtype for dtype in ("float32", "float64") if any(t.dtype == dtype for t in tensors)]
        for dtype in dtypes:
            flat = FlatTensors(tensors, dtype, len(groups.nodes.groups))
            known = (settings.compression,)
            label = f"{name}.{dtype}"
            if groups.nodes.count == 1:
                self.syncs.append(AloneSync(flat))
                continue
            # all shares of all types are taken over, or none
            restorable = len(dtypes) > 1 or len(flat.shares) > 1
            self.syncs.append(NodeSync(flat, "sharded", known, groups, label, "DiLoCo", restorable=restorable))
        self._references = self._views([sync.fit() for sync in self.syncs])
        for reference in self._references:
            reference[...] = 0
        self._gradients = [np.zeros(sync.flat.size, sync.flat.dtype) for sync in self.syncs]
        self._gradients_of = self._views(self._gradients)
        self.outer = make_outer(tensors, self._references)
        self.frozen: set[str] = set()
        """Its tensors that were frozen, and equal on all ranks, when it was last sent."""

    # -- synchronizing -----------------------------------------------------------------------------------------------

    def agree_on(self, arrays: Sequence[Array]) -> None:
        """Note that these values are what all ranks have."""
        for reference, x in zip(self._references, arrays, strict=True):
            reference[...] = x

    def newly(self, frozen: Collection[str]) -> list[int]:
        """Return which of its tensors, by their places in it, are frozen since it was last sent."""
        self.frozen &= set(frozen)
        return [i for i, t in enumerate(self._tensors) if t.name in frozen and t.name not in self.frozen]

    def note_frozen(self, places: Sequence[int]) -> None:
        """Note that tensors at these places are frozen and equal on all ranks."""
        self.frozen |= {self._tensors[i].name for i in places}

    def have_moved(self, places: Sequence[int], arrays: Sequence[Array]) -> bool:
        """Return whether values of tensors at these places differ from what ranks agreed on last."""
        return not all(np.array_equal(x, self._references[i]) for i, x in zip(places, arrays, strict=True))

    def agree_at(self, places: Sequence[int], arrays: Sequence[Array]) -> None:
        """Note that all ranks have these values of the tensors at these places."""
        for i, x in zip(places, arrays, strict=True):
            self._references[i][...] = x

    def checksum(self) -> str:
        """Return a number of what the ranks agreed on last, which differs where that does."""
        return "-".join(f"{zlib.crc32(sync.reference):08x}" for sync in self.syncs)

    def send(self, arrays: Sequence[Array], frozen: Collection[str]) -> None:
        """Start to average what these values have moved, but for frozen tensors; they may change when this returns."""
        settings = self._settings
        for sync in self.syncs:
            sync.send(CHANGES, arrays, settings.compression, settings.delay, settings.feedback_decay, frozen)

    def receive(self) -> bool:
        """Wait for the average; returns whether it is finite."""
        is_finite = True
        for sync, gradient in zip(self.syncs, self._gradients, strict=True):
            arrived = sync.receive()
            is_finite = is_finite and arrived.is_finite
            for share, values in arrived.parts:
                np.negative(values, out=gradient[share.at])
            # finite changes may have an infinite sum
            is_finite = is_finite and bool(np.isfinite(gradient).all())
        if not is_finite:
            for sync in self.syncs:
                sync.take_back()
                sync.is_decayed = self._settings.feedback_decay != 1
        return is_finite

    def step_outside(self, frozen: Collection[str]) -> None:
        """Let the outer optimizer step with the average, but for frozen tensors."""
        gradients = [
            None if t.name in frozen else gradient
            for t, gradient in zip(self._tensors, self._gradients_of, strict=True)
        ]
        self.outer.step(gradients)

    def merge(self, arrays: Sequence[Array], frozen: Collection[str]) -> None:
        """Let values become alpha of their own and the rest of what ranks agreed on, in place."""
        alpha = self._settings.alpha
        for tensor, x, reference in zip(self._tensors, arrays, self._references, strict=True):
            if tensor.name in frozen or alpha == 1:
                continue
            if alpha == 0:
                x[...] = reference
            else:
                kernels.mix(x, reference, x.dtype.type(alpha))

    def restore(self, arrays: Sequence[Array]) -> bool:
        """Go back to what ranks agreed on if a value is not finite; returns whether that was so."""
        if all(np.isfinite(x).all() for x in arrays):
            return False
        for x, reference in zip(arrays, self._references, strict=True):
            x[...] = reference
        return True

    def _views(self, flats: Sequence[Array]) -> list[Array]:
        """Return the parts of these arrays that the fragment's tensors have, in their order."""
        found = {
            i: view for sync, flat in zip(self.syncs, flats, strict=True) for i, view in sync.flat.views(flat).items()
        }
        return [found[i] for i in range(len(self._tensors))]

    # -- among other ranks -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for what is under way; it arrives when it is due."""
        for sync in self.syncs:
            sync.drain()

    def abandon(self) -> None:
        """Forget what is under way, which will never be complete; `load` has to follow."""
        for sync in self.syncs:
            sync.abandon()

    def agreed(self) -> dict[str, Any]:
        """Return copies of what is the same on all ranks: the reference, and the outer optimizer's state."""
        return {"references": [sync.reference.copy() for sync in self.syncs], "outer": self.outer.state_dict()}

    def take_agreed(self, agreed: Mapping[str, Any]) -> None:
        """Take over what `agreed` returned on any rank."""
        for sync, reference in zip(self.syncs, agreed["references"], strict=True):
            sync.fit()[...] = reference
        self.outer.load(agreed["outer"])

    def owed(self) -> list[Array | None]:
        """Return what this rank owes of each dtype, in units of the sum over nodes; nothing may be under way."""
        return [sync.owed() for sync in self.syncs]

    def owe_as(self, before: Fragment, factor: float) -> None:
        """Owe what a fragment of the same tensors owed among other ranks, times this factor."""
        for sync, old in zip(self.syncs, before.syncs, strict=True):
            debt = old.owed()
            sync.owe(None if debt is None else debt * debt.dtype.type(factor))
            sync.is_decayed = old.is_decayed

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way; returns everything that later steps depend on."""
        return {
            "syncs": [{**sync.state_dict(), "decayed": sync.is_decayed} for sync in self.syncs],
            "outer": self.outer.state_dict(),
        }

    def check(self, state: Any, *, is_sent: bool) -> dict[str, Any]:
        """Check a state of this rank and return what `load` takes over of it.

        Args:
            state: of this fragment.
            is_sent: whether the state says elsewhere that the fragment is under way.

        Raises:
            StateError: of another rank or network, or damaged.
        """
        given = saved.record("fragment of a DiLoCo state", state, ["syncs", "outer"])
        checked = []
        of_syncs = saved.sequence("syncs of a DiLoCo state", given["syncs"], len(self.syncs))
        for sync, of_sync in zip(self.syncs, of_syncs, strict=True):
            decayed = saved.record("DiLoCo state of a dtype", of_sync, ["decayed"])["decayed"]
            found = sync.check(of_sync, finite=True)
            if found["reference"].size != sync.flat.size:
                raise StateError(
                    f"this DiLoCo state has a reference of {found['reference'].size} parameters, and here are "
                    f"{sync.flat.size}: it is damaged, or of another model"
                )
            if (found["flight"] is not None) != is_sent:
                raise StateError(
                    "this DiLoCo state does not say of the same fragment in both places that it is under way: it is "
                    "damaged"
                )
            checked.append({**found, "decayed": saved.flag("decayed of a DiLoCo state", decayed)})
        return {"syncs": checked, "outer": self.outer.check(given["outer"])}

    def load(self, checked: Mapping[str, Any]) -> None:
        """Take over what `check` returned."""
        for sync, of_sync in zip(self.syncs, checked["syncs"], strict=True):
            sync.load(of_sync)
            sync.is_decayed = of_sync["decayed"]
        self.outer.load(checked["outer"])
        self.frozen = set()
