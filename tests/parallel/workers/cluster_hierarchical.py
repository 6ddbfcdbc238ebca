"""Steps of an optimizer with one exchange; tells what it counted, on a virtual cluster."""

from __future__ import annotations

import json
import sys
import zlib

import torch

import hvd_compress.torch as hvd
from hvd_compress import NoCompression, OneBit
from tests.parallel.workers.neutral import numbers

SHAPE = (1000, 4000)
STEPS = 4


def main(exchange: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    compression = NoCompression() if exchange == "dense" else OneBit()
    settings = {} if exchange == "dense" else {"exchange": exchange}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression, **settings)
    for step in range(STEPS):
        (p * torch.from_numpy(numbers("p", hvd.rank(), step, SHAPE))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    total = optimizer.compression_stats()["total"]
    counted = {key: total[key] for key in ("bytes_sent", "bytes_sent_inside", "dense_bytes")}
    print(json.dumps({**counted, "digest": zlib.crc32(p.detach().numpy().tobytes())}))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
