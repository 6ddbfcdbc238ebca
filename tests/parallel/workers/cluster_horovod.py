"""One allreduce on a virtual cluster; tells what Horovod takes the cluster for."""

from __future__ import annotations

import json
import socket
import sys

import horovod.torch as hvd
import torch


def main(numel: int) -> None:
    hvd.init()
    summed = hvd.allreduce(torch.full((numel,), float(hvd.rank() + 1)), op=hvd.Sum, name="x")
    told = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(),
        "cross_size": hvd.cross_size(),
        "host": socket.gethostname(),
        "sums": summed.unique().tolist(),
    }
    print(json.dumps(told))
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
