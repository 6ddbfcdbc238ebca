"""In an elastic run with compression ranks come and go: replicas stay equal, and those that stay go on owing."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.elastic_run import elastic_run
from tests.parallel.launch import exhaustive, thorough

has_torch = pytest.mark.skipif(find_spec("torch") is None, reason="this environment has no torch (`make test-keras2`)")
has_keras3 = pytest.mark.skipif(
    find_spec("keras") is None or version("keras").startswith("2."), reason="this environment has no Keras 3"
)

WORKERS = "tests.parallel.workers.elastic_"
# hosts and ranks to begin with; both names are this machine, so that no ssh is needed
BEGINNINGS = {
    "replace": ("127.0.0.1:1\nlocalhost:1\n", 2),
    "three": ("127.0.0.1:1\nlocalhost:2\n", 3),
    "alone": ("127.0.0.1:1\nlocalhost:1\n", 2),
    "asked": ("localhost:2\n", 2),
}
Line = dict[str, Any]


def run(folder: Path, worker: str, setting: str, scenario: str, **environment: str) -> list[list[Line]]:
    """What each process that took part has noted, in the order of their numbers."""
    hosts, ranks = BEGINNINGS[scenario]
    (folder / "hosts").write_text(hosts)
    found = elastic_run(
        folder, f"#!/bin/sh\ncat {folder}/hosts\n", f"-np {ranks} --min-np 1 --max-np 4 --network-interface lo",
        [WORKERS + worker, setting, scenario, str(folder)], **environment,
    )  # fmt: skip
    left = [process for process in found if _runs(process)]
    assert not left, f"processes {left} are left behind"
    return [*found.values()]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_replicas(processes: list[list[Line]]) -> None:
    """Before each step all have the same bits, however often it was begun."""
    digests = defaultdict[int, set[int]](set)
    for lines in processes:
        for line in lines:
            if line["at"] in ("before", "made"):
                digests[line["step"]].add(line["digest"])
    assert all(len(of_step) == 1 for of_step in digests.values()), digests


def check_owed(processes: list[list[Line]]) -> int:
    """Whoever stays goes on owing the same, in units of the update; who joins owes nothing. How often some stayed."""
    stayed = 0
    for lines in processes:
        for before, line in zip([None, *lines], lines, strict=False):
            if line["at"] != "enter":
                continue
            if before is None:
                assert line["norm"] == 0, line
                continue
            kept = [earlier for earlier in lines if earlier["at"] == "made" and earlier["step"] == line["step"]]
            assert kept, line
            assert line["worth"] == pytest.approx(kept[-1]["worth"], rel=1e-5, abs=1e-7), (kept[-1], line)
            # noted before that step: `Auto` may go another way from the next one on. A rank alone compresses nothing
            earlier = lines[lines.index(kept[-1]) - 1]
            assert line["norm"] > 0 or not earlier["compresses"] or earlier["ranks"] == 1, (earlier, line)
            stayed += 1
    return stayed


def check_paid(processes: list[list[Line]]) -> None:
    """A rank that is left alone owes nothing after its first step."""
    alone = [line for lines in processes for line in lines if line["at"] == "made" and line["ranks"] == 1]
    assert all(line["norm"] == 0 for line in alone), alone


def check_lost(processes: list[list[Line]]) -> None:
    """What a rank owed at its last commit is what the others say was lost with it."""
    gone = []
    for lines in processes:
        if lines[-1]["at"] != "end":
            *_, last = (line for line in lines if line["at"] == "made")
            gone.append(last["norm"])
    told = [lines[-2] for lines in processes if lines[-1]["at"] == "end"]
    assert {line["lost_ranks"] for line in told} == {len(gone)}
    for line in told:
        assert line["lost_norm"] == pytest.approx(math.hypot(*gone), rel=1e-6)


def check_progress(processes: list[list[Line]]) -> None:
    """All that end do so after the same step, and have learned something."""
    ended = [lines for lines in processes if lines[-1]["at"] == "end"]
    assert len({lines[-1]["step"] for lines in ended}) == 1
    losses = [line["loss"] for lines in ended for line in lines if line["at"] == "made"]
    assert losses[-1] < losses[0]


def check_accumulators(processes: list[list[Line]]) -> None:
    """AdaGrad's, which lie with owners, are all there when others own them; also those of an owner that has died."""
    made, entered = defaultdict[int, dict[int, float]](dict), defaultdict[int, dict[int, float]](dict)
    for number, lines in enumerate(processes):
        for line in lines:
            if line["at"] in ("made", "enter"):
                # a step that was made again counts once
                (made if line["at"] == "made" else entered)[line["step"]][number] = line["squares"]
    compared = made.keys() & entered.keys()
    assert compared
    for step in compared:
        assert sum(entered[step].values()) == pytest.approx(sum(made[step].values()), rel=1e-4)


def check(folder: Path, worker: str, setting: str, scenario: str, **environment: str) -> None:
    taking_part, ending = {"replace": (3, 2), "three": (4, 3), "alone": (3, 2), "asked": (3, 2)}[scenario]
    processes = run(folder, worker, setting, scenario, **environment)
    assert len(processes) == taking_part
    assert sum(lines[-1]["at"] == "end" for lines in processes) == ending
    check_replicas(processes)
    assert check_owed(processes) >= (2 if scenario in ("three", "asked") else 1)
    check_lost(processes)
    if setting in ("onebit", "adagrad", "calls"):
        check_paid(processes)
    check_progress(processes)
    if setting == "adagrad":
        check_accumulators(processes)


@has_torch
def test_one_dies_and_another_joins(tmp_path: Path) -> None:
    check(tmp_path, "compression", "onebit", "replace")


@has_torch
@pytest.mark.parametrize(
    ("setting", "scenario"),
    [
        thorough("onebit", "three"),
        exhaustive("onebit", "alone"),
        exhaustive("onebit", "asked"),
        exhaustive("topk", "three"),
        exhaustive("sum", "asked"),
        exhaustive("policy", "replace"),
        exhaustive("auto", "replace"),
        thorough("adagrad", "alone"),
        exhaustive("adagrad", "three"),
        exhaustive("server", "three"),
        exhaustive("powersgd", "three"),
        exhaustive("calls", "alone"),
        thorough("calls", "three"),
        exhaustive("adam", "three"),
        exhaustive("demo", "three"),
        exhaustive("dgc", "three"),
        exhaustive("signum", "three"),
    ],
)
def test_ranks_come_and_go(tmp_path: Path, setting: str, scenario: str) -> None:
    check(tmp_path, "compression", setting, scenario)


@pytest.mark.parametrize(
    ("setting", "scenario"),
    [
        exhaustive("onebit", "three"),
        exhaustive("onebit", "alone"),
        exhaustive("sum", "asked"),
        exhaustive("auto", "replace"),
        thorough("adagrad", "alone"),
        exhaustive("powersgd", "three"),
        exhaustive("calls", "alone"),
    ],
)
def test_a_traced_function_goes_on_when_ranks_come_and_go(tmp_path: Path, setting: str, scenario: str) -> None:
    check(tmp_path, "tensorflow", setting, scenario)


@has_torch
@has_keras3
@pytest.mark.parametrize(("setting", "scenario"), [thorough("onebit", "three"), exhaustive("adagrad", "alone")])
def test_ranks_come_and_go_under_keras_on_torch(tmp_path: Path, setting: str, scenario: str) -> None:
    check(tmp_path, "keras", setting, scenario, KERAS_BACKEND="torch")


@has_keras3
@pytest.mark.parametrize(("setting", "scenario"), [exhaustive("onebit", "three"), exhaustive("policy", "asked")])
def test_ranks_come_and_go_under_keras_on_tensorflow(tmp_path: Path, setting: str, scenario: str) -> None:
    check(tmp_path, "keras", setting, scenario, KERAS_BACKEND="tensorflow")
