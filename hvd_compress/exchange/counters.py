"""Count bytes and seconds, per tensor and in total."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hvd_compress.exchange.plan import ring_bytes

__all__ = ["Counters"]


@dataclass
class Counters:
    """Counts what the exchanges of one tensor have cost this rank so far.

    Args:
        steps: exchanges finished.
        bytes_sent: given to the network by this rank; an allgather counts as a ring, a broadcast as sent by its root.
        bytes_received: taken from it.
        bytes_sent_inside: given to other ranks of its host by a hierarchical exchange; all others go between hosts.
        dense_bytes: what Horovod's ring allreduce of the uncompressed gradient would have sent.
        encode_seconds: in the stages that encode.
        start_seconds: handing what they have encoded to Horovod or MPI, which waits for nobody.
        exchange_seconds: waited for collectives, after all that could overlap with the backward pass.
        decode_seconds: in the stage that decodes.
    """

    steps: int = 0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0
    bytes_sent_inside: float = 0.0
    dense_bytes: float = 0.0
    encode_seconds: float = 0.0
    start_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, other: Counters) -> None:
        """Add the counters of another tensor; `steps` becomes the larger one."""
        self.steps = max(self.steps, other.steps)
        for field in fields(self):
            if field.name != "steps":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def scaled(self, factor: float) -> Counters:
        """Return the counters of a part of this tensor; `steps` stays."""
        values = {field.name: factor * getattr(self, field.name) for field in fields(self) if field.name != "steps"}
        return Counters(steps=self.steps, **values)

    def count_dense(self, sent_bytes: int, gradient_bytes: int, ranks: int, times: int = 1) -> None:
        """Count ring allreduces of `sent_bytes` that stand for a gradient of `gradient_bytes`."""
        moved = times * ring_bytes(sent_bytes, ranks)
        self.steps += times
        self.bytes_sent += moved
        self.bytes_received += moved
        self.dense_bytes += times * ring_bytes(gradient_bytes, ranks)

    def report(self, residual_norm: float) -> dict[str, float]:
        """Return the counters as `compression_stats()` shows them."""
        return {
            "steps": self.steps,
            "bytes_sent": round(self.bytes_sent),
            "bytes_received": round(self.bytes_received),
            "bytes_sent_inside": round(self.bytes_sent_inside),
            "dense_bytes": round(self.dense_bytes),
            "ratio": self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0,
            "encode_seconds": self.encode_seconds,
            "start_seconds": self.start_seconds,
            "exchange_seconds": self.exchange_seconds,
            "decode_seconds": self.decode_seconds,
            "residual_norm": residual_norm,
        }
