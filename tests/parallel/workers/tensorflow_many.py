"""Many variables of different sizes in one tf.function, for many steps."""

from __future__ import annotations

import zlib
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import Threshold

FRAMEWORK = "tensorflow"
STEPS = 200
# of very different sizes, so that ranks and threads finish them in other orders
SHAPES = [(1 + i % 7, 17 * (1 + (i * 29) % 64)) for i in range(64)]


def main(report: Any) -> None:
    """Train for STEPS steps; the digest of all variables must be that of the other ranks."""
    of = [tf.Variable(tf.ones(shape), name=f"v{i}") for i, shape in enumerate(SHAPES)]
    rng = np.random.default_rng(horovod.rank())
    targets = [tf.constant(rng.standard_normal(shape).astype(np.float32)) for shape in SHAPES]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum((v - t) ** 2) for v, t in zip(of, targets, strict=True)])
        # sizes of payloads vary: splits travel too
        tape = hvd.DistributedGradientTape(tape, compression=Threshold(0.1), exchange="two_phase", min_numel=0)
        for v, g in zip(of, tape.gradient(loss, of), strict=True):
            v.assign_sub(0.05 * g)

    for _ in range(STEPS):
        step()
    stats = hvd.DistributedGradientTape(
        tf.GradientTape(), compression=Threshold(0.1), exchange="two_phase", min_numel=0
    ).compression_stats(of)
    report(steps=stats["total"]["steps"], digest=zlib.crc32(b"".join(v.numpy().tobytes() for v in of)))
