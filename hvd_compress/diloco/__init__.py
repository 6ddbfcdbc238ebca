"""Ranks that train on their own, and an outer optimizer that steps with the average of what they have moved (DiLoCo).

One rank's part, on NumPy arrays. After each step a `DiLoCoMember` asks its schedule what is due. A `Fragment` of the
parameters sends what it has moved since the ranks agreed last, hands the average to the outer optimizer, which an edge
may bring, and merges what that makes of it. How the average comes about is up to `hvd_compress.averaging`.
"""

from __future__ import annotations

from hvd_compress.diloco.fragment import MakeOuter, Outer
from hvd_compress.diloco.member import DiLoCoMember, Outcome
from hvd_compress.diloco.settings import DiLoCoSettings
from hvd_compress.diloco.sgd import OuterSGD

__all__ = ["DiLoCoMember", "DiLoCoSettings", "MakeOuter", "Outcome", "Outer", "OuterSGD"]
