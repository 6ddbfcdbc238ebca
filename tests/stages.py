"""The collectives between the stages of buckets, as list operations, for ranks that live in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from hvd_compress.exchange import Bucket, Parcel


def sizes_of(parcel: Parcel, ranks: int) -> tuple[int, ...]:
    """Bytes for each receiver of an alltoall."""
    return parcel.sizes or (parcel.buffer.size // ranks,) * ranks


def alltoall(parcels: Sequence[Parcel]) -> list[np.ndarray]:
    """What each rank receives."""
    cut = []
    for parcel in parcels:
        offsets = accumulate(sizes_of(parcel, len(parcels)), initial=0)
        cut.append([parcel.buffer[a:b].copy() for a, b in pairwise(offsets)])
    return [np.concatenate(of_receiver) for of_receiver in zip(*cut, strict=True)]


def allgather(parcels: Sequence[Parcel]) -> np.ndarray:
    """What every rank receives."""
    return np.concatenate([parcel.buffer for parcel in parcels])


def last_message(buckets: Sequence[Bucket]) -> np.ndarray:
    """What the last collective of buckets that are complete, one of each rank, brings to all of them."""
    parcels = [bucket.parcel() for bucket in buckets]
    *earlier, last = buckets[0].collectives
    if earlier:
        received = alltoall(parcels)
        parcels = [bucket.advance("alltoall", message) for bucket, message in zip(buckets, received, strict=True)]
    return parcels[buckets[0].root].buffer if last == "broadcast" else allgather(parcels)
