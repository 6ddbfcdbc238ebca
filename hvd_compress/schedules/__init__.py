"""Decide when to talk, from a few numbers for each tensor. Nothing here knows tensors or ranks."""

from __future__ import annotations

from hvd_compress.schedules.daso import COOLDOWN, CYCLING, WARMUP, DasoClock, DasoSchedule, Moment
from hvd_compress.schedules.diloco import DiLoCoSchedule, Turn
from hvd_compress.schedules.renewals import Renewals
from hvd_compress.schedules.shares import Shares
from hvd_compress.schedules.staleness import Arrival, BoundedStaleness, WorkerClocks
from hvd_compress.schedules.trigger import ConstantThreshold, SlopeThreshold, Trigger, Watch

__all__ = [
    "COOLDOWN",
    "CYCLING",
    "WARMUP",
    "Arrival",
    "BoundedStaleness",
    "ConstantThreshold",
    "DasoClock",
    "DasoSchedule",
    "DiLoCoSchedule",
    "Moment",
    "Renewals",
    "Shares",
    "SlopeThreshold",
    "Trigger",
    "Turn",
    "Watch",
    "WorkerClocks",
]
