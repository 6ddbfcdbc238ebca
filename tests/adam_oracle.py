"""Adam with compressed momentum for one parameter, on all ranks at once, typed from algorithm 1 of 1-bit Adam.

Of the package it uses the loopback only, which averages what ranks send.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.loopback import Loopback

# after a warm-up of 4 steps every second one may be a renewal, two times, and then every fourth: with renewals=2
DUE = (5, 7, 11, 15)
STEPS = 16
SHAPE = (40, 40)


def gradients(step: int, ranks: int, late: bool = False) -> list[np.ndarray]:
    """Of all ranks; with `late` rows 30 to 34 get one from step 9 on, of the last rank alone, and those below none."""
    found = [np.random.default_rng([step, rank]).normal(size=SHAPE).astype(np.float32) for rank in range(ranks)]
    for rank, g in enumerate(found):
        if late and (step < 9 or rank < ranks - 1):
            g[30:] = 0.0
        if late:
            g[35:] = 0.0
    return found


class Oracle:
    """The parameter, momentum, variance, and what ranks have not averaged of elements without one.

    Args:
        compressor: of momentum.
        ranks: how many.
        renewed: whether a step where a renewal is due is one in any case; else only if ranks have late gradients.
        warmup: steps.
    """

    def __init__(self, compressor, ranks: int, renewed: bool, warmup: int = 4) -> None:
        self.loop = Loopback(ranks, compressor, exchange="two_phase")
        self.renewed, self.warmup = renewed, warmup
        self.x, self.m, self.v = np.ones(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE)
        self.late = [np.zeros(SHAPE) for _ in range(ranks)]
        self.t, self.seen = 0, 0

    def step(self, grads: list[np.ndarray], lr: float, decay: float) -> None:
        due = self.t in DUE
        warms = self.t < self.warmup
        self.t += 1
        if warms or (due and (self.renewed or any(late.any() for late in self.late))):
            g = np.mean([g + late for g, late in zip(grads, self.late, strict=True)], axis=0)
            self.late = [np.zeros(SHAPE) for _ in grads]
            self.m = 0.9 * self.m + 0.1 * g
            if warms or self.renewed:
                self.v, self.seen = 0.999 * self.v + 0.001 * g * g, self.seen + 1
            else:
                self.v = np.where(self.v == 0, g * g * (1 - 0.999**self.seen), self.v)
            update = self.m / self.scale()
        else:
            d, unknown = self.scale(), self.v == 0
            mine = [0.9 * self.m / d + 0.1 * np.clip(g / d, -(0.001**-0.5), 0.001**-0.5) for g in grads]
            mine = [np.where(unknown, 0, u).astype(np.float32) for u in mine]
            update = np.where(unknown, 0, self.loop.allreduce(mine, name="w")[0])
            self.late = [late + np.where(unknown, g, 0) for g, late in zip(grads, self.late, strict=True)]
            self.m = update * d
        self.x = self.x * (1 - lr * decay) - lr / (1 - 0.9**self.t) * update

    def scale(self) -> np.ndarray:
        return np.sqrt(self.v / (1 - 0.999**self.seen)) + 1e-8
