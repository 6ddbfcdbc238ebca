"""Handle the tensors of one rank, whichever framework they come from: routes, residuals, counters, saved state.

Edges subclass `Ledger` with the collectives of their framework. Arrays are NumPy. Only what is carried over in elastic
runs communicates, by the `Ranks` that an edge gives it.
"""

from __future__ import annotations

from hvd_compress.engine.alone import LedgerAlone
from hvd_compress.engine.carried_exchanges import (
    CarriedExchange,
    CarriedExchanges,
    is_carried,
    refuse_loading_apart,
    refuse_what_stays,
)
from hvd_compress.engine.carrying import Carried, CarriedStates, Owed
from hvd_compress.engine.carrying_state import CarryingState
from hvd_compress.engine.choice import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_MIN_NUMEL,
    Defaults,
    average_share,
    check_settings,
    compressor_of_call,
    describe,
    description,
    exchange_of,
    exchanged,
    horovod_compressor,
    names_of_call,
    op_of_call,
    refuse_other_ops,
    resolved,
)
from hvd_compress.engine.estimate import bucket_work
from hvd_compress.engine.kernel_thread import KernelThread, has_cores
from hvd_compress.engine.kinds import (
    DENSE,
    NONE,
    NOT_COMPARED,
    SPARSE,
    first_unequal,
    kinds_told,
    only_here,
    only_there,
)
from hvd_compress.engine.ledger import Ledger
from hvd_compress.engine.pilot import Pilot
from hvd_compress.engine.routing import Routing, Tensor, backward_buckets
from hvd_compress.engine.states import empty_state, has_residuals, refuse_residuals
from hvd_compress.engine.survival import (
    Lost,
    Seen,
    has_kept,
    losses,
    norm_owed,
    survivor_state,
    taken_up,
    united_accumulators,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_MIN_NUMEL",
    "DENSE",
    "NONE",
    "NOT_COMPARED",
    "SPARSE",
    "Carried",
    "CarriedExchange",
    "CarriedExchanges",
    "CarriedStates",
    "CarryingState",
    "Defaults",
    "KernelThread",
    "Ledger",
    "LedgerAlone",
    "Lost",
    "Owed",
    "Pilot",
    "Routing",
    "Seen",
    "Tensor",
    "average_share",
    "backward_buckets",
    "bucket_work",
    "check_settings",
    "compressor_of_call",
    "describe",
    "description",
    "empty_state",
    "exchange_of",
    "exchanged",
    "first_unequal",
    "has_cores",
    "has_kept",
    "has_residuals",
    "horovod_compressor",
    "is_carried",
    "kinds_told",
    "losses",
    "names_of_call",
    "norm_owed",
    "only_here",
    "only_there",
    "op_of_call",
    "refuse_loading_apart",
    "refuse_other_ops",
    "refuse_residuals",
    "refuse_what_stays",
    "resolved",
    "survivor_state",
    "taken_up",
    "united_accumulators",
]
