"""The submodules of Horovod under the names of an edge, which stands in their place in the user's imports."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["offer"]


def offer(edge: str, horovods: str, **others: Any) -> None:
    """Make each imported submodule of a package of Horovod importable below an edge, with the edge's own names in it.

    What the edge has a name for comes from the edge; all else is Horovod's. Submodules that the edge has itself stay.

    Args:
        edge: name of the edge's package, imported as far as its names go.
        horovods: name of the package that it stands for.
        others: names of submodules only, which the edge has something for.

    Example:
        With `import hvd_compress.torch`, `from hvd_compress.torch.mpi_ops import allreduce` works like
        `from horovod.torch.mpi_ops import allreduce`, with compression.
    """
    mine = sys.modules[edge]
    for name, theirs in list(sys.modules.items()):
        inner = name.removeprefix(f"{horovods}.")
        if inner == name or "." in inner or inner.startswith("_"):
            continue
        if f"{edge}.{inner}" in sys.modules or find_spec(f"{edge}.{inner}") is not None:
            continue
        made = ModuleType(f"{edge}.{inner}", theirs.__doc__)
        ours = {**vars(mine), **others}
        made.__dict__.update({n: ours.get(n, v) for n, v in vars(theirs).items() if not n.startswith("_")})
        made.__all__ = [n for n in vars(made) if not n.startswith("_")]  # type: ignore[attr-defined]
        sys.modules[made.__name__] = made
        setattr(mine, inner, made)
