"""Check what the user asks of DASO, and describe it for ranks to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_compress import wire
from hvd_compress.averaging import FORMS
from hvd_compress.compressors import BF16, FP16, Compressor, NoCompression
from hvd_compress.compressors.settings import check_choice, check_flag
from hvd_compress.errors import UnsupportedError
from hvd_compress.policy import Policy, compressors_in, given_compression
from hvd_compress.schedules import CYCLING, DasoSchedule
from hvd_compress.tensors import ParameterSpec

__all__ = ["DasoSettings"]


@dataclass(frozen=True)
class DasoSettings:
    """Holds the arguments of `DASO` that do not depend on a framework.

    Raises:
        TypeError: not a schedule or a compressor.
        ValueError: a setting out of its range.
        UnsupportedError: a compressor that loses what it does not send, as without error feedback.
    """

    schedule: DasoSchedule
    form: str = "sharded"
    merge: Any = "paper"
    compression: Any = NoCompression()
    blocking_compression: Any = BF16()
    average_state: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, DasoSchedule):
            raise TypeError(f"schedule={self.schedule!r}: give a DasoSchedule")
        check_choice(self, "form", self.form, FORMS)
        is_weight = isinstance(self.merge, int | float) and not isinstance(self.merge, bool) and 0 < self.merge <= 1
        if self.merge not in ("paper", "delta") and not is_weight:
            raise ValueError(
                f"merge={self.merge!r}: must be 'paper', 'delta', or the weight of what arrives, greater than 0 and at "
                "most 1"
            )
        check_flag(self, "average_state", self.average_state)
        for argument in ("compression", "blocking_compression"):
            given = given_compression(argument, getattr(self, argument))
            object.__setattr__(self, argument, given)
            if FP16() in compressors_in(given):
                raise UnsupportedError(
                    f"{argument}=FP16(): changes below 6e-8 would be rounded to nothing, again and again. Use BF16(), "
                    "whose rounding errors go with the next change"
                )
            for compressor in compressors_in(given):
                if not (compressor.feedback or compressor.unbiased):
                    raise UnsupportedError(
                        f"{argument}={compressor!r}: what it leaves out of a change would be lost, as parameters go on "
                        "from what was sent. Use it with error_feedback=True"
                    )

    def compression_in(self, phase: str) -> Compressor | Policy:
        """Return the compression of what goes between nodes."""
        chosen: Compressor | Policy = self.compression if phase == CYCLING else self.blocking_compression
        return chosen

    def description(self, tensors: Sequence[ParameterSpec]) -> dict[str, Any]:
        """Describe the settings for ranks to compare."""
        return {
            "wire version": wire.VERSION,
            "schedule": self.schedule.get_config(),
            "form": self.form,
            "merge": self.merge,
            "compression": self.compression.get_config(),
            "blocking_compression": self.blocking_compression.get_config(),
            "average_state": self.average_state,
            "parameters": [[t.name, list(t.shape), t.dtype] for t in tensors],
        }
