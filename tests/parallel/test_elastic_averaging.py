"""In an elastic run of optimizers that average parameters, ranks come and go, and what those that stay moved counts."""

from __future__ import annotations

import math
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.elastic_run import elastic_run
from tests.parallel.launch import exhaustive, thorough

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")

WORKER = "tests.parallel.workers.elastic_averaging"
Line = dict[str, Any]


def run(folder: Path, setting: str) -> list[list[Line]]:
    """What each process that took part has noted, in the order of their numbers."""
    (folder / "hosts").write_text("127.0.0.1:1\nlocalhost:2\n")
    found = elastic_run(
        folder, f"#!/bin/sh\ncat {folder}/hosts\n", "-np 3 --min-np 1 --max-np 4 --network-interface lo",
        [WORKER, setting, str(folder)],
    )  # fmt: skip
    left = [process for process in found if Path(f"/proc/{process}").exists()]
    assert not left, f"processes {left} are left behind"
    return [*found.values()]


class Meeting:
    """What ranks have noted when they met: the lines of those that stayed, of before and after, and of newcomers."""

    def __init__(self) -> None:
        self.stayed: list[tuple[Line, Line]] = []
        self.joined: list[Line] = []

    @property
    def entered(self) -> list[Line]:
        return [*(after for _, after in self.stayed), *self.joined]


def meetings(processes: list[list[Line]]) -> list[Meeting]:
    """Each time that ranks met, but for the beginning."""
    found = defaultdict[tuple[int, int], Meeting](Meeting)
    for lines in processes:
        for i, line in enumerate(lines):
            if line["at"] != "enter":
                continue
            meeting = found[line["step"], line["ranks"]]
            if i == 0:
                meeting.joined.append(line)
                continue
            before = [earlier for earlier in lines[:i] if earlier["step"] == line["step"]][-1]
            meeting.stayed.append((before, line))
    return [meeting for meeting in found.values() if meeting.stayed]


def check_equal(processes: list[list[Line]]) -> None:
    """All go on from the same parameters, and end with the same ones."""
    for meeting in meetings(processes):
        assert len({line["digest"] for line in meeting.entered}) == 1, meeting.entered
        assert len(meeting.entered) == meeting.entered[0]["ranks"]
    ended = [lines[-1] for lines in processes if lines[-1]["at"] == "end"]
    assert len(ended) == 2
    assert len({(line["step"], line["digest"]) for line in ended}) == 1


def check_mean(processes: list[list[Line]]) -> int:
    """Parameters are the mean of those that stayed, where nothing was under way; returns of how many at most."""
    most = 0
    for meeting in meetings(processes):
        before = [line for line, _ in meeting.stayed]
        if any(line.get("under_way") is not None for line in before):
            continue
        mean = np.mean([line["looks"] for line in before], axis=0)
        mean += np.sum([line.get("paid", [0.0] * 3) for line in before], axis=0)
        np.testing.assert_allclose(meeting.entered[0]["looks"], mean, rtol=1e-4, atol=1e-4)
        most = max(most, len(before))
    return most


def check_lost(processes: list[list[Line]]) -> None:
    """Who ends before the others owed what these say was lost."""
    gone = [lines[-1]["norm"] for lines in processes if lines[-1]["at"] != "end"]
    for lines in processes:
        if lines[-1]["at"] == "end":
            assert lines[-1]["lost_ranks"] == len(gone)
            assert lines[-1].get("lost_norm", 0.0) == pytest.approx(math.hypot(*gone), rel=1e-6)


def check_progress(processes: list[list[Line]]) -> None:
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in processes if lines[-1]["at"] == "end"]
    assert min(of_process[-1] for of_process in losses) < 0.8 * max(of_process[0] for of_process in losses)


def check_diloco(processes: list[list[Line]]) -> None:
    """All know the same of what they agreed on, and who stays goes on owing what it owed, with the same weight."""
    owed = 0.0
    for meeting in meetings(processes):
        assert len({str(line["agreed"]) for line in meeting.entered}) == 1, meeting.entered
        for before, after in meeting.stayed:
            assert after["worth"] == pytest.approx(before["worth"], rel=1e-4, abs=1e-6), (before, after)
            owed = max(owed, after["norm"])
        assert all(line["norm"] == 0 for line in meeting.joined)
    assert owed > 0
    # a rank alone tells what it owed with what it moves next
    alone = [line for lines in processes for line in lines if line["ranks"] == 1]
    assert alone[0]["norm"] > 0
    assert alone[-1]["norm"] == 0


def check_eventgrad(processes: list[list[Line]]) -> None:
    """Who stays keeps its thresholds and counters, who joins begins with the thresholds of rank 0; neighbours send."""
    for meeting in meetings(processes):
        for before, after in meeting.stayed:
            assert [after[key] for key in ("thresholds", "messages")] == [
                before[key] for key in ("thresholds", "messages")
            ]
        root = next(line for line in meeting.entered if line["rank"] == 0)
        assert max(root["thresholds"]) > 0
        assert all(line["thresholds"] == root["thresholds"] for line in meeting.joined)
    for lines in processes:
        together = [line["messages"] for line in lines if line["ranks"] > 1]
        assert together[-1] > together[0]
        alone = [line["messages"] for line in lines if line["ranks"] == 1]
        assert alone == alone[:1] * len(alone)


def check_daso(processes: list[list[Line]]) -> None:
    """All go on counting, who stays goes on with its counters, and nobody owes anything when they begin."""
    paid = 0.0
    for meeting in meetings(processes):
        for line in meeting.entered:
            assert line["nodes"] == line["ranks"]
            assert line["batches"] == line["step"]
            assert line["norm"] == 0
            assert line["under_way"] is None
        for before, after in meeting.stayed:
            assert after["sent"] == before["sent"]
            # with what was sent in a step that came to no commit
            assert after["bytes"] >= before["bytes"] > 0
            paid = max(paid, before["norm"])
    assert paid > 0
    for lines in processes:
        together = [line["sent"] for line in lines if line["ranks"] > 1]
        assert together[-1] > together[0]


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        thorough("diloco", check_diloco),
        exhaustive("eventgrad", check_eventgrad),
        thorough("daso", check_daso),
    ],
)
def test_ranks_come_and_go(tmp_path: Path, setting: str, check: Any) -> None:
    processes = run(tmp_path, setting)
    assert len(processes) == 4
    check_equal(processes)
    assert check_mean(processes) == 2
    check_lost(processes)
    check_progress(processes)
    check(processes)
