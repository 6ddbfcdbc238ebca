"""Settings of the exchange in which one rank, the root, sums a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_compress.compressors import Compressor
from hvd_compress.compressors.settings import check_choice, check_int
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange.kinds import Exchange
from hvd_compress.exchange.raw import CheckedRaw, Raw

__all__ = ["ParameterServer"]

_ROUND_ROBIN = "round_robin"


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """All ranks send their payloads to a root, which sums them up and sends the sum back to all.

    The root trains, too. Uncompressed gradients take the same way: `Compression.none` with
    `exchange=ParameterServer(answer="dense")` is the gather and broadcast that the papers compare with. Source: Lam et
    al. 2017, section 4; Sievert 2017, section 3.2. In the papers one master, which has no share of the work, gets
    everything and sends parameters back; here every bucket of gradients can have a root of its own, and what comes back
    is the sum.

    Args:
        root: position in the process set of the rank that sums, or "round_robin" for the next rank with each bucket,
            so that the load is spread.
        answer: how the sum travels: "compressed" as gradients do, with the root's own error feedback, or "dense" as
            float32 (float64 where uncompressed gradients are). A value that is not finite makes its whole tensor NaN
            either way.
        transport: "horovod" for its collectives, or "mpi" for non-blocking messages of mpi4py, which do not need
            Horovod's negotiation; "mpi" needs a run with MPI.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import ParameterServer, QSGD
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(3, QSGD(bits=1), exchange=ParameterServer(root=2, answer="dense"))
        >>> ranks.allreduce([np.array([0.0, 1.0], np.float32)] * 3)[0]
        array([0., 1.], dtype=float32)
    """

    id = "parameter_server"
    collectives = ("alltoall", "broadcast")
    takes_all = True

    root: int | str = 0
    answer: str = "compressed"
    transport: str = "horovod"

    def __post_init__(self) -> None:
        if isinstance(self.root, str):
            check_choice(self, "root", self.root, (_ROUND_ROBIN,))
        else:
            check_int(self, "root", self.root, 0, 2**31 - 1)
        check_choice(self, "answer", self.answer, ("compressed", "dense"))
        check_choice(self, "transport", self.transport, ("horovod", "mpi"))

    @property
    def sends_by_mpi(self) -> bool:
        return self.transport == "mpi"

    def of_bucket(self, number: int, ranks: int) -> ParameterServer:
        """Return the settings of one bucket, with its root filled in."""
        return replace(self, root=number % ranks) if self.root == _ROUND_ROBIN else self

    def owners(self, ranks: int) -> Sequence[int]:
        """Return the root, which `of_bucket` has filled in.

        Raises:
            UnsupportedError: there is no such rank.
        """
        if not isinstance(self.root, int):
            raise RuntimeError(f"{self!r}: the root of which bucket?")
        if self.root >= ranks:
            raise UnsupportedError(
                f"{self!r} among {ranks} ranks: the root is a position in the process set, from 0 to {ranks - 1}"
            )
        return (self.root,)

    def answers_of(self, compressor: Compressor) -> Compressor:
        return compressor if self.answer == "compressed" or isinstance(compressor, Raw) else CheckedRaw()
