"""What each compressor sends, and how far one exchange and thirty are from the exact mean; no ranks are started:

    python examples/guides/choose.py

The gradients are random numbers. They show bytes and error feedback, not accuracy.
"""

from __future__ import annotations

import numpy as np

from hvd_compress import QSGD, Adaptive, Compressor, OneBit, Percentile, TopK
from hvd_compress.loopback import Loopback

RANKS, SHAPE = 4, (512, 512)
COMPRESSORS: list[Compressor] = [
    Adaptive(pi=64),
    Adaptive(pi=64, coding="golomb"),
    TopK(ratio=0.01),
    OneBit(),
    QSGD(bits=4, coding="elias"),
    Percentile(90, error_feedback=True),
]


def distance(compressor: Compressor, steps: int) -> float:
    """How far the sum of `steps` exchanges of the same gradients is from the exact one, relative to that."""
    numbers = np.random.default_rng(0)
    gradients = [numbers.standard_normal(SHAPE, np.float32) for _ in range(RANKS)]
    exact = steps * np.mean(gradients, axis=0)
    ranks = Loopback(RANKS, compressor)
    total = sum(ranks.allreduce(gradients, name="w")[0] for _ in range(steps))
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def main() -> None:
    gradient = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    print(f"{'times fewer':>12}{'1 step off':>12}{'30 off':>8}  compressor")
    for compressor in COMPRESSORS:
        fewer = gradient.nbytes / compressor.encode(gradient).size
        print(f"{fewer:12.1f}{distance(compressor, 1):12.0%}{distance(compressor, 30):8.0%}  {compressor!r}")


if __name__ == "__main__":
    main()
