"""Turn payloads into a sum: pure stages, and between each two a named collective that an edge runs.

    two_phase     encode each chunk -alltoall-> decode, sum, encode again -allgather-> decode
    allgather     encode the tensor -allgather-> decode and sum
    hierarchical  cut up -alltoall inside hosts-> sum, encode each chunk -alltoall between hosts-> decode, sum, encode
                  again -to all between hosts-> pass on -to all inside hosts-> decode
    parameter_server  encode the tensor -to the root-> decode, sum, encode again -broadcast-> decode

Nothing here knows ranks (only positions), frameworks or Horovod.
"""

from __future__ import annotations

from hvd_compress.exchange.account import Account
from hvd_compress.exchange.adagrad import Accumulator, AdaGrad, exchange_with
from hvd_compress.exchange.bucket import Bucket
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.factor_bucket import bucket_of
from hvd_compress.exchange.factors import MOST_STAGES, SumOfFactors, suited
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.inside import Parcel
from hvd_compress.exchange.kinds import AllGather, Dense, Exchange, FewestBytes, Hierarchical, TwoPhase
from hvd_compress.exchange.named import EXCHANGES, checked_exchange, make_plan, plan_together
from hvd_compress.exchange.narrow_account import account_of
from hvd_compress.exchange.pack import Pack
from hvd_compress.exchange.parameter_server import ParameterServer
from hvd_compress.exchange.plan import Plan, chunk_bounds, ring_bytes
from hvd_compress.exchange.raw import Raw, checked, fitted, is_uncompressed, unchecked
from hvd_compress.memory import aligned_empty

__all__ = [
    "EXCHANGES",
    "MOST_STAGES",
    "Account",
    "Accumulator",
    "AdaGrad",
    "AllGather",
    "Bucket",
    "Counters",
    "Dense",
    "Exchange",
    "FewestBytes",
    "Hierarchical",
    "Hosts",
    "Pack",
    "ParameterServer",
    "Parcel",
    "Plan",
    "Raw",
    "SumOfFactors",
    "TwoPhase",
    "account_of",
    "aligned_empty",
    "bucket_of",
    "checked",
    "checked_exchange",
    "chunk_bounds",
    "exchange_with",
    "fitted",
    "is_uncompressed",
    "make_plan",
    "plan_together",
    "ring_bytes",
    "suited",
    "unchecked",
]
