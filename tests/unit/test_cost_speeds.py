"""Kernel speeds: what is measured, on a clock that only the kernels move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvd_compress import FP16, QSGD, Adaptive, NoCompression, OneBit, Threshold
from hvd_compress.compressors import Compressor
from hvd_compress.cost import Line, Speed, copy_speed, measure_speed, speed_of, speeds


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@dataclass(frozen=True)
class Timed(OneBit):
    """Takes what the lines below say, but for its first calls, which compile."""

    def encode_into(self, x: np.ndarray, *arguments: Any, **settings: Any) -> int:
        CLOCK.now += 1e-4 + 3e-9 * x.size
        return super().encode_into(x, *arguments, **settings)

    def decode_into(self, payload: np.ndarray, out: np.ndarray, scale: float = 1.0, add: bool = False) -> bool:
        CLOCK.now += 1e-5 + (2e-9 if add else 1e-9) * out.size
        return super().decode_into(payload, out, scale, add)


def test_lines_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "time", CLOCK)
    speed = measure_speed(Timed())
    for line, expected in ((speed.encode, (1e-4, 3e-9)), (speed.decode, (1e-5, 1e-9)), (speed.add, (1e-5, 2e-9))):
        assert (line.fixed, line.per_unit) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (OneBit(), 1 / 8 + 8 / 2048),
        (QSGD(bits=4), 1 / 2 + 4 / 512),
        # 1 in 64 of standard normal deviates, and of the residual that is added to them some more
        (Threshold(tau=1e-3), 2 / 64 * 1.9),
        (Threshold(tau=1e3), 2 / 64 * 1.9),
        (FP16(), 2.0),
    ],
)
def test_bytes_per_element(compressor: Compressor, expected: float) -> None:
    assert measure_speed(compressor).bytes_per_element == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("compressor", [OneBit(), Adaptive(), FP16()])
def test_every_kernel_takes_its_time(compressor: Compressor) -> None:
    speed = measure_speed(compressor)
    assert min(line(10**7) for line in (speed.encode, speed.decode, speed.add)) > 0


def test_nothing_takes_nothing() -> None:
    assert measure_speed(NoCompression()) == Speed(Line(), Line(), Line(), 4.0)


def test_measured_once_in_a_process() -> None:
    assert speed_of(OneBit()) is speed_of(OneBit())
    assert copy_speed() is copy_speed()


def test_numbers_round_trip() -> None:
    speed = Speed(Line(1, 2), Line(3, 4), Line(5, 6), 7, 8, 9)
    assert speed.numbers() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert Speed.from_numbers(speed.numbers()) == speed


def test_a_disturbed_measurement_leaves_encoding_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # long rows, fewer and more elements; and short rows, beside which another program ran
    taken = iter([[1e-4, 1e-5, 1e-5], [1e-3, 1e-4, 1e-4], [1.0, 1e-4, 1e-4]])
    monkeypatch.setattr(speeds, "_typical", lambda times: np.array(next(taken)))
    speed = measure_speed(OneBit())
    assert speed.encode(10**7) > 1e-3
    assert speed.per_group > 0
