"""A GradScaler, as float16 wants one: on a GPU where there is one, else on the CPU.

horovodrun -np 2 --gloo python examples/guides/loss_scaling.py
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.torch as hvd
from hvd_compress import OneBit


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    number = hvd.local_rank() % max(torch.cuda.device_count(), 1)
    device = torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2)).to(device)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), compression=OneBit())
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16)
    for step in range(4):
        opt.zero_grad()
        x = torch.randn(16, 64, device=device)
        if step == 1 and hvd.rank() == 1:
            x[0, 0] = torch.inf  # one rank overflows: all skip the step
        opt.set_loss_scale(scaler.get_scale())  # what is owed follows the scale
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    scales = hvd.allgather_object(scaler.get_scale())
    assert set(scales) == {2.0**15}, scales
    print("one step was skipped on all ranks, and the scale is halved:", scales)


if __name__ == "__main__":
    main()
