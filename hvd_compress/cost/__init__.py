"""Predict what exchanges and steps cost from links and kernels, measured or on paper, and choose by that.

All of it is numbers; the caller says whose collectives are timed, by handing in `hvd_compress.ranks.Ranks`.
"""

from __future__ import annotations

from hvd_compress.cost.choose import Configuration, Corrector, configurations, pick
from hvd_compress.cost.drift_watch import DriftWatch
from hvd_compress.cost.explore import Explorer
from hvd_compress.cost.line import Line, fit_line
from hvd_compress.cost.link import COLLECTIVES, LinkSpeed, Network
from hvd_compress.cost.measure import measure_link, measure_network, network_of, sent_bytes, slowest_speeds
from hvd_compress.cost.predict import (
    Stage,
    Work,
    break_even_bandwidth,
    dense_work,
    exchange_seconds,
    stages_of,
    work_of,
)
from hvd_compress.cost.race import Race
from hvd_compress.cost.rivals import Rivals
from hvd_compress.cost.speeds import Speed, copy_speed, measure_speed, speed_of
from hvd_compress.cost.step import PlannedExchange, step_seconds

__all__ = [
    "COLLECTIVES",
    "Configuration",
    "Corrector",
    "DriftWatch",
    "Explorer",
    "Line",
    "LinkSpeed",
    "Network",
    "PlannedExchange",
    "Race",
    "Rivals",
    "Speed",
    "Stage",
    "Work",
    "break_even_bandwidth",
    "configurations",
    "copy_speed",
    "dense_work",
    "exchange_seconds",
    "fit_line",
    "measure_link",
    "measure_network",
    "measure_speed",
    "network_of",
    "pick",
    "sent_bytes",
    "slowest_speeds",
    "speed_of",
    "stages_of",
    "step_seconds",
    "work_of",
]
