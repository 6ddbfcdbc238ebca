"""Every piece of Python in a page that is no whole program runs, after the lines that it takes for granted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.launch import LAUNCHERS, ROOT
from tests.parallel.test_guides import run

DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)

DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from hvd_compress import Adaptive, ddp
if not dist.is_initialized():
    dist.init_process_group("gloo")
compression = Adaptive(pi=64)
model = DistributedDataParallel(torch.nn.Linear(512, 512))
"""
REGISTERED = f"{DDP}\nddp.register_comm_hook(model, compression)\nmodel(torch.ones(4, 512)).sum().backward()\n"
HVD = """
import torch
import hvd_compress.torch as hvd
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
KERAS = """
import numpy as np
import keras
import hvd_compress.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
x, y = np.ones((64, 4), np.float32), np.zeros(64, np.int32)
"""
# by page and beginning: who starts the ranks, what goes before, and what is written otherwise for two CPUs
FRAGMENTS = {
    ("guides/ddp.md", "ddp.register_comm_hook(\n"): ("torchrun", DDP, {}),
    ("guides/ddp.md", "torch.save("): ("torchrun", REGISTERED, {}),
    ("guides/ddp.md", "ddp.register_comm_hook(model, c"): ("torchrun", DDP, {}),
    ("guides/ddp.md", "print(ddp.stats"): ("torchrun", REGISTERED, {}),
    ("guides/ddp.md", "from torch.distributed.device_mesh"): (
        "torchrun",
        f"{DDP}\nmodel = torch.nn.Linear(512, 512)\n",
        {'"cuda", (2, 4)': '"cpu", (2, 1)'},
    ),
    ("guides/diloco.md", "layers = "): ("gloo", HVD, {}),
    ("guides/diloco.md", "state = "): ("gloo", f"{HVD}\nopt = hvd.DiLoCo(opt, model.named_parameters())\n", {}),
    ("guides/diloco.md", "from hvd_compress import TopK"): ("gloo", HVD, {}),
    ("guides/slow-links.md", "from hvd_compress import Blockwise"): ("gloo", f"{HVD}\noptimizer = opt\n", {}),
    ("guides/diloco.md", "model.compile("): ("gloo", KERAS, {}),
    # after those of PyTorch, which cannot be imported after TensorFlow
    ("guides/adam.md", "rate = keras."): ("gloo", f"{KERAS}\nfrom hvd_compress import OneBit\n", {}),
    ("reference/errors.md", "from hvd_compress import errors"): (
        "gloo",
        f'{HVD}\nopt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression="onebit")\nstate = {{}}\n',
        {},
    ),
}


def fragments() -> dict[tuple[str, str], str]:
    """The blocks of each page but a program at its top, which `test_guides.py` runs, by their first lines."""
    found = {}
    for page in sorted(DOCS.rglob("*.md")):
        for block in BLOCK.findall(page.read_text()):
            is_program = block.startswith("import ")
            if not is_program:
                found[str(page.relative_to(DOCS)), block.partition("\n")[0] + "\n"] = block
    return found


def test_every_fragment_is_run() -> None:
    beginnings = [(page, beginning) for page, beginning in FRAGMENTS]
    for page, line in fragments():
        assert any(page == p and line.startswith(b) for p, b in beginnings), f"{page}: nothing runs {line!r}"


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["torchrun", "gloo"])
def test_fragments_run(tmp_path: Path, launcher: str) -> None:
    """All in one start, each with names of its own."""
    parts = []
    for (page, beginning), (starter, before, otherwise) in FRAGMENTS.items():
        if starter != launcher:
            continue
        (text,) = [text for (p, line), text in fragments().items() if p == page and line.startswith(beginning)]
        for said, here in otherwise.items():
            assert said in text
            text = text.replace(said, here)
        parts.append(f"exec(compile({before + text!r}, {f'{page}: {beginning}'!r}, 'exec'), {{}})")
    program = tmp_path / "fragments.py"
    # files that a fragment writes go to a folder of the test
    program.write_text("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *parts, "print('all ran')"]))
    assert "all ran" in run(str(program), *LAUNCHERS[launcher](2))
