"""Horovod's `join`, which stands in for ranks that have ended, where exchanges are compressed."""

from __future__ import annotations

import gc

import horovod.torch as hvd

from hvd_compress.torch._gradients.combiner import Combiner
from hvd_compress.torch._gradients.owners import in_use

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Wait until all ranks have come here; a collective call.

    As Horovod's, and ranks may come after different numbers of steps, as long as no optimizer compresses: Horovod adds
    zeros for a rank that has come, and these are no payloads. With compression all ranks must have made the same
    number of steps.

    Args:
        device: number of the GPU on which Horovod makes its zeros, -1 for the CPU.

    Returns:
        The rank that came last.

    Raises:
        MismatchError: on all ranks, where an optimizer compresses and ranks go on to another step.
    """
    if any(map(_compresses, in_use())):
        # ranks must find the same optimizers in use
        gc.collect()
    for combiner in filter(_compresses, in_use()):
        combiner.wrapping.agree_to_join(combiner.sender.known_engine())
    last: int = hvd.join(device)
    return last


def _compresses(combiner: Combiner) -> bool:
    engine = combiner.sender.engine
    if engine is None or combiner.wrapping.process_set.process_set_id != 0:
        return False
    # with `Auto`, the others may begin to compress in any step
    return bool(engine.buckets) or combiner.sender.steering is not None
