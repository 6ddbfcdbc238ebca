"""The gradients that were handed over in a step, and whether somebody has written to them since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch

from hvd_compress.errors import GradientError
from hvd_compress.torch._gradients.staging import sample_of, version_of

__all__ = ["Handed"]

_MOST_SAMPLES = 3
"""A GradScaler writes to all gradients."""
_RECIPE = (
    "Clip, unscale and log gradients after backward() where every parameter gets one; where some get none, call "
    "synchronize() first"
)


class Handed:
    """The gradients of one step by the names of their parameters."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        """Those that were handed over."""
        self.versions: dict[str, int] = {}
        """How often each had been written to by then; also of gradients to which more passes will add."""
        self._samples: dict[str, tuple[int, torch.Tensor]] = {}

    def note(self, name: str, gradient: torch.Tensor) -> None:
        """Note that a gradient is handed over as it is now."""
        self.gradients[name], self.versions[name] = gradient, version_of(gradient)

    def note_versions(self) -> None:
        """Note how often gradients were written to by now: the exchange itself has written to some."""
        self.versions = {n: 0 if g.is_inference() else g._version for n, g in self.gradients.items()}

    def note_views(self) -> None:
        """Note the versions of views anew: views of one buffer count their writes together."""
        for name, gradient in self.gradients.items():
            if gradient._is_view():
                self.versions[name] = version_of(gradient)

    def take_samples(self, is_exchanged: Callable[[str], bool]) -> None:
        """Remember some values of gradients whose exchange goes on: what a GradScaler writes leaves no other trace."""
        taken = ((n, g) for n, g in self.gradients.items() if is_exchanged(n) and not g.is_sparse)
        self._samples = {n: (g.data_ptr(), sample_of(g)) for n, g in islice(taken, _MOST_SAMPLES)}

    def has_grown(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is one of these to which just one pass has added, and nobody has written in between."""
        if gradient is None or self.gradients.get(name) is not gradient:
            return False
        # a GradScaler may have skipped the step, and the user have set the gradient to zero
        return version_of(gradient) == self.versions[name] + 1

    def changed_early(self, parameters: Mapping[str, torch.Tensor]) -> str | None:
        """Return a tensor whose gradient was changed after fewer passes than a step may have, before its exchange."""
        for name, version in self.versions.items():
            gradient = parameters[name].grad
            if name not in self.gradients and gradient is not None and version_of(gradient) != version:
                return name
        return None

    def harms(self, parameters: Mapping[str, torch.Tensor], is_dense: Callable[[str], bool]) -> list[GradientError]:
        """Return what to tell the user of gradients that are not what they were when they were handed over.

        Args:
            parameters: all that take gradients, by name.
            is_dense: whether Horovod reduces a tensor.
        """
        gradients, versions = self.gradients, self.versions
        changed = {
            name
            for name, p in parameters.items()
            if name in gradients
            and (p.grad is not gradients[name] or not (p.grad.is_inference() or p.grad._version == versions[name]))
            and not (is_dense(name) and self._may_be_horovods(name, p.grad))
        }
        for name, (place, sample) in self._samples.items():
            # one that was given other memory gets its result there
            if gradients[name].data_ptr() == place and not torch.equal(sample, sample_of(gradients[name])):
                changed.add(name)
        return [_harm(name, p.grad) for name, p in parameters.items() if name in changed]

    def _may_be_horovods(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether it may be Horovod that has written to this gradient.

        Horovod may copy its result into a gradient on a GPU as soon as it is there, and torch counts that as one write.
        """
        given = self.gradients[name]
        return gradient is given and not given.is_cpu and version_of(given) == self.versions[name] + 1


def _harm(name: str, gradient: torch.Tensor | None) -> GradientError:
    if gradient is None:
        return GradientError(
            f"the gradient of {name!r} was cleared while it was exchanged. Clear gradients after step(). {_RECIPE}"
        )
    return GradientError(
        f"the gradient of {name!r} was changed while it was exchanged, and the change would be lost. {_RECIPE}. "
        "Register hooks that change gradients before the optimizer is wrapped"
    )
