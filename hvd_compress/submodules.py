"""The submodules of Horovod under the names of an edge, which stands in Horovod's place in the user's imports."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["offer"]


def offer(edge: str, horovods: str, **others: Any) -> None:
    """Make the imported submodules of a package of Horovod importable below an edge, with the edge's own names in them.

    What the edge has a name for comes from the edge; all else is Horovod's. A submodule that the edge has itself gets
    what it lacks.

    Args:
        edge: name of the edge's package, imported as far as its names go.
        horovods: name of the package that it stands for.
        others: names of submodules only, which the edge has something for.

    Example:
        With `import hvd_compress.torch`, `from hvd_compress.torch.mpi_ops import allreduce` works like
        `from horovod.torch.mpi_ops import allreduce`, with compression.
    """
    mine = sys.modules[edge]
    ours = {**vars(mine), **others}
    for name, theirs in sorted(sys.modules.items()):
        inner = name.removeprefix(f"{horovods}.")
        if inner == name or inner.startswith("_"):
            continue
        if "." in inner:
            # below a submodule nothing is ours
            sys.modules.setdefault(f"{edge}.{inner}", theirs)
            continue
        if f"{edge}.{inner}" not in sys.modules:
            if find_spec(f"{edge}.{inner}") is not None:
                # not imported yet, as it takes a while
                continue
            sys.modules[f"{edge}.{inner}"] = ModuleType(f"{edge}.{inner}", theirs.__doc__)
            setattr(mine, inner, sys.modules[f"{edge}.{inner}"])
        public = {n: ours.get(n, value) for n, value in vars(theirs).items() if not n.startswith("_")}
        names = vars(sys.modules[f"{edge}.{inner}"])
        names.update({n: value for n, value in public.items() if n not in names})
