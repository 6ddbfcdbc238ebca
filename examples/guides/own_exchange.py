"""An exchange of your own: every other rank sums. Four ranks in this process try it.

python examples/guides/own_exchange.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import hvd_compress
from hvd_compress import OneBit
from hvd_compress.loopback import Loopback


class EveryOther(hvd_compress.TwoPhase):
    """Ranks 0, 2, 4 ... own the elements, and sum what all send of them."""

    id = "every_other"

    def owners(self, ranks: int) -> Sequence[int]:
        return range(0, ranks, 2)


if __name__ == "__main__":
    four = Loopback(4, OneBit(), exchange=EveryOther())  # hvd.DistributedOptimizer(..., exchange=EveryOther())
    four.allreduce([np.full(64, rank, np.float32) for rank in range(4)], name="w")
    print("elements of rank 0, 1, 2, 3 begin and end at", four.bounds("w"))
