"""Rank 0 runs torch, rank 1 TensorFlow: they can combine only if both put the same bytes on the wire."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from hvd_compress.loopback import Loopback
from tests.parallel.workers.neutral import COMPRESSORS, numbers

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
FRAMEWORK = ("torch", "tensorflow")[RANK]
SHAPE = (48, 601)


def main(report: Any) -> None:
    """Three steps with each compressor, in both edges and in the loopback; payloads themselves are compared too."""
    report(framework=FRAMEWORK)
    sent: list[bytes] = []
    _record(sent)
    same = True
    for label, compressor in COMPRESSORS.items():
        loopback = Loopback(2, compressor)
        for step in range(3):
            arrays = [numbers("mixed", rank, step, SHAPE) for rank in range(2)]
            found = _combined(arrays[RANK], label, compressor)
            mine, sent[:] = list(sent), []
            expected = loopback.allreduce(arrays, name=label)[0]
            of_loopback, sent[:] = list(sent), []
            # the loopback encodes for both ranks, in the order of the ranks, hop after hop
            same = same and found.tobytes() == expected.tobytes() and mine == of_loopback[RANK::2]
            assert mine, "no payload was recorded"
    report(same=same)


def _combined(array: np.ndarray, name: str, compressor: Any) -> np.ndarray:
    # calls are compared under the names that Horovod gives them, which are not the same in the two frameworks
    if FRAMEWORK == "torch":
        import torch

        import hvd_compress.torch as hvd

        with mock.patch("hvd_compress.torch._functions.Meeting.require_agreement"):
            return hvd.allreduce(torch.from_numpy(array), name=name, compression=compressor).numpy()
    import hvd_compress.tensorflow as hvd

    with mock.patch("hvd_compress.tensorflow._functions.Meeting.require_agreement"):
        return hvd.allreduce(array, name=name, compression=compressor).numpy()


def _record(sent: list[bytes]) -> None:
    """Keep the bytes of every parcel that leaves a stage from now on."""
    from hvd_compress.exchange import Bucket

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def stage(self: Any, *arguments: Any) -> Any:
            parcel = original(self, *arguments)
            size = parcel.buffer.size if parcel.sizes is None else sum(parcel.sizes)
            sent.append(parcel.buffer[:size].tobytes())
            return parcel

        return stage

    setattr(Bucket, "parcel", recording(Bucket.parcel))  # noqa: B010 - mypy refuses to assign to a method
