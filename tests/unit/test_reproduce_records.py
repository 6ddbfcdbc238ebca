from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import places
import pytest
from cluster import RunError
from reproduce import runner
from reproduce.cli import main
from reproduce.experiments import EXPERIMENTS, settings_of
from reproduce.store import Store
from reproduce.unit import Unit

UNIT = Unit("dryden", 1, "one-bit", {"width": 8, "seed": 0}, 4, 2)


def write(store: Store, unit: Unit, **result: Any) -> Path:
    return store.write(unit, result, 1.0, ["python"])


@pytest.mark.parametrize(
    "other",
    [
        Unit("qsgd", 1, "one-bit", {"width": 8, "seed": 0}, 4, 2),
        Unit("dryden", 2, "one-bit", {"width": 8, "seed": 0}, 4, 2),
        Unit("dryden", 1, "adaptive", {"width": 8, "seed": 0}, 4, 2),
        Unit("dryden", 1, "one-bit", {"width": 8, "seed": 1}, 4, 2),
        Unit("dryden", 1, "one-bit", {"width": 8, "seed": 0, "epochs": 1}, 4, 2),
        Unit("dryden", 1, "one-bit", {"width": 8, "seed": 0}, 2, 2),
    ],
)
def test_whatever_decides_a_result_is_in_the_key(other: Unit) -> None:
    assert other.key != UNIT.key


def test_how_work_is_divided_for_the_bar_is_not_in_the_key() -> None:
    assert Unit("dryden", 1, "one-bit", {"seed": 0, "width": 8}, 4, 7).key == UNIT.key


def test_a_record_is_read_again_and_says_what_it_is_of(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.read(UNIT) is None
    write(store, UNIT, test=[[98.0]])
    record = store.read(UNIT)
    assert record is not None
    assert record["result"] == {"test": [[98.0]]}
    assert (record["settings"], record["ranks"], record["command"]) == ({"width": 8, "seed": 0}, 4, ["python"])
    assert {"date", "processor", "torch", "horovod", "hvd_compress"} <= set(record["machine"])
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]


def test_a_record_of_other_settings_or_half_a_record_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, UNIT, test=1)
    path.write_text(path.read_text()[:40])
    assert store.read(UNIT) is None
    other = Unit("dryden", 1, "one-bit", {"width": 9, "seed": 0}, 4, 2)
    write(store, other, test=2).rename(path)
    assert store.read(UNIT) is None


def test_records_of_an_older_version_are_not_shown(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, UNIT, test=1)
    assert len(store.records("dryden", 1)) == 1
    assert store.records("dryden", 2) == []
    assert store.records("lam", 1) == []


class Ranks:
    """In the place of real ones: what was started, and what comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.labels: list[str] = []
        self.fails: set[str] = set()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(runner, "started", self)

    def __call__(self, unit: Unit, progress: object) -> dict[str, Any]:
        self.labels.append(unit.label)
        if unit.label in self.fails:
            raise RunError("mpirun returned 1")
        return {"of": unit.label}


UNITS = [Unit("dryden", 1, label, {"seed": 0}, 4, 1) for label in ("a", "b", "c")]


def test_an_interrupted_run_goes_on_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, ranks = Store(tmp_path / "r"), Ranks(monkeypatch, tmp_path)
    write(store, UNITS[0], of="before")
    assert runner.run("dryden", UNITS, store, ["python"]) == []
    assert ranks.labels == ["b", "c"]
    assert runner.run("dryden", UNITS, store, ["python"]) == []
    assert ranks.labels == ["b", "c"]
    first = store.read(UNITS[0])
    assert first is not None
    assert first["result"] == {"of": "before"}


def test_all_of_a_run_is_made_again_when_it_is_to_be_fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, ranks = Store(tmp_path / "r"), Ranks(monkeypatch, tmp_path)
    write(store, UNITS[0], of="before")
    saved = tmp_path / "hvd_compress" / "reproduce" / UNITS[0].key / "0-3.pt"
    saved.parent.mkdir(parents=True)
    saved.touch()
    runner.run("dryden", UNITS, store, ["python"], fresh=True)
    assert ranks.labels == ["a", "b", "c"]
    assert not saved.parent.exists()


def test_a_start_that_fails_is_told_and_keeps_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, ranks = Store(tmp_path / "r"), Ranks(monkeypatch, tmp_path)
    ranks.fails = {"b"}
    saved = tmp_path / "hvd_compress" / "reproduce" / UNITS[1].key
    saved.mkdir(parents=True)
    (failed,) = runner.run("dryden", UNITS, store, ["python"])
    assert failed == "dryden, b: mpirun returned 1"
    assert store.missing(UNITS) == [UNITS[1]]
    assert saved.exists()


def test_units_run_at_the_same_time_and_a_failed_one_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, ranks = Store(tmp_path / "r"), Ranks(monkeypatch, tmp_path)
    ranks.fails = {"b"}
    all_are_there = threading.Barrier(len(UNITS), timeout=60)

    def started(unit: Unit, progress: object) -> dict[str, Any]:
        all_are_there.wait()
        return ranks(unit, progress)

    monkeypatch.setattr(runner, "started", started)
    (failed,) = runner.run("dryden", UNITS, store, ["python"], jobs=3)
    assert failed == "dryden, b: mpirun returned 1"
    assert store.missing(UNITS) == [UNITS[1]]


def test_a_failure_of_one_start_among_several_ends_with_its_own_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for launcher in ("_mpirun", "_horovodrun"):
        # in the place of a launcher; $3 is the task
        monkeypatch.setattr(places, launcher, lambda ranks: ["sh", "-c", 'echo "last words: $3"; exit 3'])
    units = [Unit("dryden", 1, label, {"seed": seed}, 2, 1) for seed, label in enumerate(("a", "b"))]
    failed = runner.run("dryden", units, Store(tmp_path / "r"), ["python"], jobs=2)
    for seed, (said, name) in enumerate(zip(failed, ("a", "b, seed 1"), strict=True)):
        first, last = said.splitlines()
        assert first.startswith(f"dryden, {name}: ")
        assert first.endswith("run returned 3")
        assert f'last words: {{"experiment": "dryden", "settings": {{"seed": {seed}}}' in last


def test_a_failure_shows_what_ranks_wrote_and_not_the_trace_of_their_launcher() -> None:
    with places.Progress("a", 1) as progress:
        part = progress.part("b")
        part.write("[1]<stderr>:ValueError: no such thing\n" + "  in horovodrun\n" * 50)
        assert part.tail() == "[1]<stderr>:ValueError: no such thing"


def test_processes_that_begin_after_an_interruption_are_ended_too() -> None:
    class Process:
        terminated = 0

        def terminate(self) -> None:
            self.terminated += 1

    progress, early, late = places.Progress("a", 1), Process(), Process()
    part = progress.part("b")
    with progress, part.watching(early):  # type: ignore[arg-type]
        progress.end()
        with part.watching(late):  # type: ignore[arg-type]
            assert (early.terminated, late.terminated) == (1, 1)


def test_without_a_cluster_a_record_says_that_links_were_unlimited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, _ = Store(tmp_path / "r"), Ranks(monkeypatch, tmp_path)
    monkeypatch.setattr(runner, "rates_to_be_had", lambda rates: [])
    unit = Unit("lam", 1, "steps", {"rate": "500mbit"}, 4, 1)
    runner.run("lam", [unit], store, ["python"])
    assert store.read(unit) is None
    record = store.read(unit.with_rate("unlimited"))
    assert record is not None
    assert record["settings"]["rate"] == "unlimited"


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, experiment in EXPERIMENTS.items() for form in experiment.forms]
)
def test_units_of_a_plan_differ_and_can_be_written(name: str, form: str) -> None:
    units = EXPERIMENTS[name].plan(settings_of(name, form), range(2))
    assert len({unit.key for unit in units}) == len({unit.name for unit in units}) == len(units)
    assert all(json.loads(json.dumps(dict(unit.settings))) == unit.settings for unit in units)
    assert all(unit.experiment == name and unit.ranks >= 2 and unit.marks >= 1 for unit in units)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nobody"], "no experiment 'nobody'"),
        (["--tiny"], "give --results and --page"),
        (["--seeds", "0"], "--seeds 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["dryden", "--gpu"], "forms of dryden are tiny, short, full"),
        (["dryden", "--set", "depth=3"], "settings of dryden are width"),
        (["dryden", "--set", "width"], "give something like width=1024"),
        (["dryden", "--set", 'width="4"'], "give something like width=1024"),
        (["--full", "--tiny"], "not allowed with"),
    ],
)
def test_a_wrong_command_line_is_told(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(given)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
