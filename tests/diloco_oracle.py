"""DiLoCo as its papers define it, in NumPy, for all ranks at once; nothing of the package is used."""

from __future__ import annotations


class Nesterov:
    """SGD as torch documents it, of the parameters of a fragment: {name: array}."""

    def __init__(self, lr=0.7, momentum=0.9, nesterov=True):
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.buffers = {}

    def step(self, x, gradients):
        """The parameters after a step."""
        after = dict(x)
        for name, g in gradients.items():
            kind = g.dtype.type
            if self.momentum:
                before = self.buffers.get(name)
                buffer = g.copy() if before is None else kind(self.momentum) * before + g
                self.buffers[name] = buffer
                g = g + kind(self.momentum) * buffer if self.nesterov else buffer
            after[name] = x[name] - kind(self.lr) * g
        return after


class Oracle:
    """All replicas, and what they agree on.

    Args:
        start: {name: array}, the same on all replicas.
        replicas: how many.
        fragments: lists of names.
        sync_every: steps from one synchronization of a fragment to its next.
        delay: steps from sending to arrival.
        alpha: weight of the local value.
        outer: makes what has `step(x, gradients)`.
        weights: of the replicas in the average.
    """

    def __init__(self, start, replicas, fragments, sync_every, delay=0, alpha=0.0, outer=Nesterov, weights=None):
        self.local = [{name: x.copy() for name, x in start.items()} for _ in range(replicas)]
        self.agreed = {name: x.copy() for name, x in start.items()}
        self.fragments, self.sync_every, self.delay, self.alpha = fragments, sync_every, delay, alpha
        self.outer = [outer() for _ in fragments]
        self.weights = [1 / replicas] * replicas if weights is None else weights
        self.steps = 0
        self.sent = {}

    def step(self, updates):
        """Add its update to every replica, and do what is due."""
        for x, update in zip(self.local, updates, strict=True):
            for name, change in update.items():
                x[name] = x[name] + change
        self.synchronize()

    def synchronize(self):
        """After a step of every replica, send and take what is due."""
        self.steps += 1
        distance = self.sync_every // len(self.fragments)
        for i, names in enumerate(self.fragments):
            # the fragment arrives after step (i + 1) * distance, and again every sync_every steps
            first = (i + 1) * distance
            for arrival in range(first, self.steps + self.delay + 1, self.sync_every):
                if self.steps == arrival - self.delay:
                    self.sent[i] = [{name: self.agreed[name] - x[name] for name in names} for x in self.local]
                if self.steps == arrival:
                    self._arrive(i, names)

    def _arrive(self, i, names):
        moved = self.sent.pop(i)
        mean = {
            name: sum(x[name].dtype.type(w) * x[name] for w, x in zip(self.weights, moved, strict=True))
            for name in names
        }
        self.agreed.update(self.outer[i].step({name: self.agreed[name] for name in names}, mean))
        for x in self.local:
            for name in names:
                kind = x[name].dtype.type
                x[name] = kind(self.alpha) * x[name] + kind(1 - self.alpha) * self.agreed[name]
