"""Send two thin factors of a gradient's matrix instead of the matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.compressors.base import Array, Body, Bytes, Compressor
from hvd_compress.compressors.key import Key
from hvd_compress.compressors.settings import check_flag, check_int
from hvd_compress.errors import UnsupportedError

__all__ = ["PowerSGD"]


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sums low-rank factors of gradients: r (n + m) numbers for a matrix of n rows and m columns.

    A tensor is treated as a matrix of its first dimension by all others. M is the gradient plus the residual, which is
    what earlier steps left out. Each step makes one power iteration with M: P = M Q is summed over the ranks and made
    orthonormal, Q = M' P is summed, and P Q' is the combined gradient. What that leaves out becomes the residual. The
    next step begins with this Q. The second sum needs the first, so this is an exchange and no payload: `encode` and
    `decode` do not exist. A tensor that would not become smaller goes uncompressed, as small ones and vectors do.

    Source: Vogels et al. 2019, algorithms 1 and 2. In the paper every rank subtracts the same mean over all ranks from
    its residual; here each rank subtracts what it has sent itself, P (M' P)'. The sum of the residuals is the same, and
    so are all results, but residuals of ranks do not drift apart. The paper's first Q is normally distributed; here it
    is uniform, drawn from a counter, since that has the same bits on every machine. Rows of Q have length 1, and a row
    that has become 0 is drawn anew.

    Args:
        rank: r, the number of columns of the factors.
        warm_start: begin with the last step's Q; if False, each step begins with a random one.
        seed: of the random Q; all ranks draw the same one from the seed and the tensor's name.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import PowerSGD
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(2, PowerSGD(rank=1))
        >>> of_rank_1 = np.outer([1, 2, 3], [4, 5, 6, 7]).astype(np.float32)
        >>> ranks.allreduce([of_rank_1, 3 * of_rank_1], name="w")[1].round(3)
        array([[ 8., 10., 12., 14.],
               [16., 20., 24., 28.],
               [24., 30., 36., 42.]], dtype=float32)
    """

    rank: int = 1
    warm_start: bool = True
    seed: int = 0

    id: ClassVar[str] = "powersgd"
    sums_factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "rank", self.rank, 1, 2**16)
        check_flag(self, "warm_start", self.warm_start)
        check_int(self, "seed", self.seed, 0, 2**64 - 1)

    @property
    def feedback(self) -> bool:
        return True

    def matrix_of(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the rows and columns of a tensor as a matrix, and the rank of its factors, which is never larger."""
        n = shape[0] if shape else 1
        m = math.prod(shape[1:])
        return n, m, min(self.rank, n, m)

    def first_q(self, shape: tuple[int, ...], name: str, step: int) -> npt.NDArray[np.float32]:
        """Return a random Q (r, m), the same on all ranks."""
        _, m, r = self.matrix_of(shape)
        low, high = Key(self.seed, name, step).words()
        # raw numbers of a counter: what NumPy makes of them may change with its version, and ranks may have several
        raw = np.random.Philox(key=int(low) | int(high) << 32).random_raw(r * m)
        return ((raw >> 40).astype(np.float32) * np.float32(2**-23) - np.float32(1)).reshape(r, m)

    def body_bytes(self, numel: int, group: int) -> int:
        self._refuse()

    def encode_body(self, x: Array, gradient: Array, body: Bytes, group: int, key: Key) -> Body:
        self._refuse()

    def decode_body(self, header: wire.Header, body: wire.Sections, out: Array, scale: np.float32, add: bool) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self!r} makes no payloads: ranks sum its factors in an exchange of its own, with exchange='auto', "
            "'two_phase' or 'allgather'. Take a compressor such as TopK(0.01) here"
        )
