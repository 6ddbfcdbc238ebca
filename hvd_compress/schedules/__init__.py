"""When to talk: decisions from a few numbers for each tensor. No tensors, no ranks."""

from __future__ import annotations

from hvd_compress.schedules.trigger import ConstantThreshold, SlopeThreshold, Trigger, Watch

__all__ = ["ConstantThreshold", "SlopeThreshold", "Trigger", "Watch"]
