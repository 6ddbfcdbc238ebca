"""`hvd_compress.tensorflow` among two pairs of ranks out of four."""

from __future__ import annotations

import horovod.tensorflow as horovod
import numpy as np

from hvd_compress import OneBit
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import SHAPES
from tests.parallel.workers.tensorflow_values import EXCHANGE, check_against, given, gradients, variables, wrapped

FRAMEWORK = "tensorflow"
EVEN, ODD = horovod.ProcessSet([0, 2]), horovod.ProcessSet([1, 3])
PROCESS_SETS = [EVEN, ODD]

cases = Cases()


@cases.add
def each_pair_combines_its_own() -> None:
    mine, ranks = (EVEN, (0, 2)) if horovod.rank() % 2 == 0 else (ODD, (1, 3))
    of, loopback = variables(), Loopback(2, OneBit(), EXCHANGE)
    for i in range(2):
        found = gradients(of, given(i), lambda tape: wrapped(tape, process_set=mine))
        for name, combined in zip(SHAPES, found, strict=True):
            check_against(loopback, name, combined, i, ranks)


@cases.add
def ranks_outside_keep_their_gradients() -> None:
    found = gradients(variables(), given(0), lambda tape: wrapped(tape, process_set=EVEN))
    if horovod.rank() % 2:
        np.testing.assert_array_equal(found[0], given(0)[0])
