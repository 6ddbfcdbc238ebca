"""How payloads become a sum: pure stages, and between each two a named collective that an edge runs.

    two_phase   encode each chunk -alltoall-> decode, sum, encode again -allgather-> decode
    allgather   encode the tensor -allgather-> decode and sum

Nothing here knows ranks (only positions), frameworks or Horovod.
"""

from __future__ import annotations

from hvd_compress.exchange.bucket import Bucket, Parcel
from hvd_compress.exchange.memory import aligned_empty
from hvd_compress.exchange.plan import EXCHANGES, Plan, chunk_bounds, make_plan, plan_together, ring_bytes
from hvd_compress.exchange.transfer import Transfer

__all__ = [
    "EXCHANGES",
    "Bucket",
    "Parcel",
    "Plan",
    "Transfer",
    "aligned_empty",
    "chunk_bounds",
    "make_plan",
    "plan_together",
    "ring_bytes",
]
