"""The trajectories of Streaming DiLoCo that another implementation has computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["RUNS", "check_trajectory"]

_GOLDEN = json.loads((Path(__file__).parent / "golden" / "diloco.json").read_text())
RUNS = {f"delay={r['delay']}-alpha={r['alpha']}": r for r in _GOLDEN["runs"]}


def check_trajectory(diloco: Callable[..., Any], golden: dict[str, Any]) -> None:
    """Train one number for each fragment with an edge's `DiLoCo`, and compare each step with one of `RUNS`."""
    setting = _GOLDEN["setting"]
    names = [str(i) for i in range(setting["fragments"])]
    # by a number, and by names, which mean the same here
    for fragments in (len(names), [[name] for name in names]):
        ps = [torch.nn.Parameter(torch.tensor([setting["start"]])) for _ in names]
        optimizer = diloco(
            torch.optim.SGD(ps, lr=1.0), zip(names, ps, strict=True), sync_every=setting["sync_every"],
            fragments=fragments, delay=golden["delay"], alpha=golden["alpha"],
            outer=lambda params: torch.optim.SGD(params, lr=2.0),
        )  # fmt: skip
        for local in golden["local"]:
            assert [p.item() for p in ps] == local
            for p in ps:
                p.grad = torch.full_like(p, setting["gradient"])
            optimizer.step()
