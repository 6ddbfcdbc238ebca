from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reproduce import lam, lam_page, page, sievert
from reproduce.cli import FOLDER, PAGE
from reproduce.dryden import volume_figures
from reproduce.experiments import EXPERIMENTS, settings_of
from reproduce.store import Store
from reproduce.unit import Unit

ROOT = Path(__file__).parents[2]
COMMAND = ["python", "-m", "benchmarks.reproduce"]


def training(unit: Unit, accuracy: float, **more: Any) -> dict[str, Any]:
    ranks = 4 if unit.label == "no communication" else 1
    watched = {"step": [0, 1, 50], "bytes": [1000, 3000, 2000]}
    return {
        "train": [90.0, 99.0], "loss": [1.0, 0.1], "test": [[50.0] * ranks, [accuracy - i for i in range(ranks)]],
        "steps": 10, "bytes_sent": [30000.0] * unit.ranks, "seconds": [1.0] * unit.ranks, "digest": "ab",
        "parameters": 1000, "data": "MNIST", "watched": watched, "replicas_identical": True, **more,
    }  # fmt: skip


def written(tmp_path: Path, store: Store) -> str:
    path = tmp_path / "docs" / "page.md"
    page.write(path, store)
    return path.read_text()


def cells_of(text: str, first: str) -> list[str]:
    """The cells of the first row that begins so."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def part_of(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}")[2].partition("\n## ")[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def test_without_records_the_page_says_what_is_missing(tmp_path: Path, store: Store) -> None:
    text = written(tmp_path, store)
    for name in EXPERIMENTS:
        assert f"**Missing:** nothing is recorded. `python -m benchmarks.reproduce {name}`" in text
    assert "**0 of 5 starts of the short form are recorded**; **0 of 15 starts of the full form are recorded**" in text
    assert "{{" not in text


def test_ours_stand_beside_the_papers_and_a_missing_method_is_named(tmp_path: Path, store: Store) -> None:
    units = EXPERIMENTS["dryden"].plan(settings_of("dryden", "short"), range(2))
    accuracy = {"normal": 97.5, "one-bit": 97.25, "threshold": 96.0, "no communication": 95.0}
    for unit in units:
        if unit.label in accuracy:
            value = accuracy[unit.label] + unit.settings["seed"]
            store.write(unit, training(unit, value), 60.0, COMMAND)
    table = part_of(written(tmp_path, store), "Accuracy of quantized")
    assert "### 1,024 wide, 5 epochs, 60,000 images, batches of 10 a rank, 4 ranks" in table
    # Table 1 of the paper: 98.49 against 98.51
    assert cells_of(table, "one-bit") == [
        "98.49", "-0.02", "97.75 (97.25–98.25)", "-0.25 (-0.25–-0.25)", "3.0 (3.0–3.0)", "2",
    ]  # fmt: skip
    assert cells_of(table, "no communication")[:3] == ["98.09", "-0.42", "95.50 (95.00–96.00)"]
    assert cells_of(table, "adaptive") == ["98.53", "+0.02", "**missing**", "", "", "0"]
    assert "**4 of 5 starts of the short form are recorded**" in table
    (plot,) = store.folder.glob("dryden-accuracy-*.png")
    assert f"![{plot.stem}](../results/{plot.name})" in table


def test_trainings_of_other_sizes_get_a_table_of_their_own(tmp_path: Path, store: Store) -> None:
    for changes in (["width=64"], ["width=128"], ["width=64", "epochs=2"]):
        unit = EXPERIMENTS["dryden"].plan(settings_of("dryden", "short", changes), [0])[0]
        store.write(unit, training(unit, 90.0), 60.0, COMMAND)
    table = part_of(written(tmp_path, store), "Accuracy of quantized")
    titles = [line.split(",")[:2] for line in table.splitlines() if " wide, " in line]
    assert titles == [["### 128 wide", " 5 epochs"], ["### 64 wide", " 5 epochs"], ["### 64 wide", " 2 epochs"]]


def test_replicas_that_differ_are_told(tmp_path: Path, store: Store) -> None:
    one, other, *_ = EXPERIMENTS["dryden"].plan(settings_of("dryden", "short"), [0])
    store.write(one, training(one, 90.0), 60.0, COMMAND)
    assert "\nIn 1 of 1 trainings all ranks held the same bytes" in written(tmp_path, store)
    store.write(other, training(other, 90.0, replicas_identical=False), 60.0, COMMAND)
    assert "\n**In 1 of 2 trainings all ranks held the same bytes" in written(tmp_path, store)


def test_steps_on_limited_links_and_of_more_rounds_come_first(tmp_path: Path, store: Store) -> None:
    lam_records(store)
    for rate, seconds, rounds in (("unlimited", 100.0, 9), ("500mbit", 4.0, 5)):
        changes = [f"rate={rate}", f"seconds={seconds}", "workers=[]", "timed=[4]"]
        (unit,) = EXPERIMENTS["lam"].plan(settings_of("lam", "short", changes), [0])
        rows = {method: {"seconds": [seconds] * rounds, "bytes": [0] * rounds} for method in lam.TIMED}
        sent = [dict.fromkeys(lam.TIMED, 1.0)] * 4
        store.write(unit, {"rows": rows, "bytes_sent": sent, "data": "CIFAR"}, 9.0, COMMAND)
    table = part_of(written(tmp_path, store), "Sparsified gradients")
    assert cells_of(table, "dense, allreduce")[1] == "4000"


def test_a_volume_is_summed_up_by_its_sizes_and_its_changes_early_and_late() -> None:
    steps = [0, 1, 2, 50, 100, 2500, 2501, 2502]
    watched = {"step": steps, "bytes": [4000.0, 2000.0, 1000.0, 500.0, 3000.0, 100.0, 110.0, 121.0]}
    # the median is that of the 0th, 50th, 100th and 2500th; early ones are halved, late ones grow by a tenth
    assert volume_figures(watched) == ["4.0", "4.0", "1.8", "0.1", "0.1", "50.0", "10.0"]
    assert volume_figures({"step": steps, "bytes": [0.0] * 8}) == ["0.0"] * 7


def test_what_the_first_rank_alone_had_sent_is_not_shown_as_the_volume(tmp_path: Path, store: Store) -> None:
    watched = {"step": [0, 1], "bytes": [4000.0, 2000.0]}
    one, other, *_ = EXPERIMENTS["dryden"].plan(settings_of("dryden", "short"), [0])
    store.write(one, training(one, 90.0, watched=watched), 60.0, COMMAND)
    assert "kB in the first step" not in written(tmp_path, store)
    store.write(other, training(other, 90.0, watched={**watched, "of": "mean of all ranks"}), 60.0, COMMAND)
    table = part_of(written(tmp_path, store), "Volume of each")
    assert cells_of(table, "normal")[0] == "**missing**"
    assert cells_of(table, "one-bit")[:2] == ["4.0", "4.0"]


def test_minutes_of_a_resumed_training_are_those_of_all_of_it(tmp_path: Path, store: Store) -> None:
    unit = EXPERIMENTS["dryden"].plan(settings_of("dryden", "short"), [0])[0]
    store.write(unit, training(unit, 90.0, seconds=[600.0, 601.0]), 60.0, COMMAND)
    assert cells_of(written(tmp_path, store), "dryden")[3] == "10"


def lam_records(store: Store) -> None:
    curves = {"dense, allreduce": [50.0, 99.6], "Percentile(90)": [40.0, 80.0, 90.0, 99.7]}
    for unit in EXPERIMENTS["lam"].plan(settings_of("lam", "short"), [0]):
        if unit.settings["kind"] == lam.TIMES:
            seconds = {"dense, allreduce": 2.0, "dense, parameter server": 8.0, "Percentile(90)": 1.0}
            seconds["Percentile(90), error feedback"] = 1.5
            seconds["Percentile(90), error feedback, two phases"] = 1.25
            rows = {method: {"seconds": [s, 2 * s, s], "bytes": [0, 0, 0]} for method, s in seconds.items()}
            sent = [dict.fromkeys(seconds, 5000.0)] * unit.ranks
            result = {"rows": rows, "bytes_sent": sent, "data": "CIFAR"}
            store.write(unit, result, 9.0, COMMAND)
        elif unit.label in curves:
            histograms = [lam.histogram(np.ones(20, np.float32))]
            watched = {"step": [0], "layers": {"0.weight": histograms, "3.weight": histograms}}
            result = training(unit, 50.0, train=curves[unit.label], watched=watched)
            store.write(unit, result, 9.0, COMMAND)


def test_time_to_equal_accuracy_is_passes_times_steps(tmp_path: Path, store: Store) -> None:
    lam_records(store)
    table = part_of(written(tmp_path, store), "Sparsified gradients")
    # four parts of a pass: dense reaches 99.5 % in the second, the other in the fourth; 312 steps of 32 images a pass
    assert cells_of(table, "dense, allreduce")[:3] == ["0.50", "2000", f"{0.5 * 312 * 2:.0f}"]
    # half as long a step, twice the passes: as fast; four times as fast as the server
    assert cells_of(table, "Percentile(90)") == [
        "1.00", "1000", "312", "1.0 (1.0–1.0)", "4.0 (4.0–4.0)",
    ]  # fmt: skip
    assert cells_of(table, "Percentile(90), error feedback") == ["**missing**", "1500", "", "", ""]
    assert cells_of(table, "paper, 14 machines")[-1] == "about 2"
    assert cells_of(table.partition("### Steps")[2], "Percentile(90)") == [
        "1000 (1000–2000)", "2.0 (2.0–2.0)", "8.0 (8.0–8.0)", "5", "5", "1.0",
    ]  # fmt: skip


def test_the_accuracy_to_reach_is_the_papers_or_what_all_have_reached() -> None:
    def records(*train: float) -> list[dict[str, Any]]:
        return [{"result": {"train": list(train)}, "settings": {"parts": 2}}]

    assert lam_page.equal_accuracy({"a": records(99.6), "b": records(100.0)}) == 99.5
    assert lam_page.equal_accuracy({"a": records(90.0, 80.0), "b": records(100.0)}) == 90.0
    assert lam_page.passes_to(70.0, records(60.0, 65.0, 71.0)[0]) == 1.5
    assert lam_page.passes_to(99.0, records(60.0)[0]) is None


def test_a_histogram_of_magnitudes_counts_them_in_root_mean_squares() -> None:
    # of ten values, the largest tenth is one: 64 of 64 + 9
    found = lam.histogram(np.array([1, -1, 1, -1, 1, -1, 1, -1, 1, -8], np.float32))
    assert found["largest_tenth"] == pytest.approx(64 / 73)
    one, eight = (int(m / (7.3**0.5) / lam.WIDEST * lam.BINS) for m in (1, 8))
    assert (found["counts"][one], found["counts"][eight]) == (0.9, 0.1)
    assert sum(lam.histogram(np.zeros(5, np.float32))["counts"]) == 1.0


def test_parts_of_a_step_add_up_and_the_server_stands_alone(tmp_path: Path, store: Store) -> None:
    parts = {"encode": 1.0, "send": 0.25, "wait": 3.0, "decode": 0.5}
    counted = zip(
        ("encode_seconds", "start_seconds", "exchange_seconds", "decode_seconds"), parts.values(), strict=True
    )
    clocks = {"compute": 10.0, "step": 2.0, **dict(counted)}
    assert sievert.shares(clocks) == {"compute": 5.25, **parts, "step": 2.0}
    for unit in EXPERIMENTS["sievert"].plan(settings_of("sievert", "short"), [0]):
        ranks = [{**clocks, "step": 14.0}] + [clocks] * (unit.ranks - 1)
        store.write(unit, {"ranks": ranks, "steps": 4, "parameters": 9, "data": "CIFAR"}, 9.0, COMMAND)
    table = part_of(written(tmp_path, store), "Where the time goes")
    assert cells_of(table, "8: others") == ["44", "8", "2", "25", "4", "17", "3000", "1"]
    assert cells_of(table, "2: server")[-3:] == ["58", "6000", "1"]


def test_parts_of_a_step_are_means_of_seeds(tmp_path: Path, store: Store) -> None:
    counted = dict.fromkeys(("encode_seconds", "start_seconds", "exchange_seconds", "decode_seconds"), 0.0)
    for unit in EXPERIMENTS["sievert"].plan(settings_of("sievert", "short", ["workers=[2]"]), range(2)):
        clocks = [{**counted, "compute": 1.0, "step": 1.0 + 2 * unit.settings["seed"]}] * 2
        store.write(unit, {"ranks": clocks, "steps": 1, "parameters": 9, "data": "CIFAR"}, 9.0, COMMAND)
    table = part_of(written(tmp_path, store), "Where the time goes")
    assert cells_of(table, "2: others")[-3:] == ["62 (50–75)", "3000 (2000–4000)", "2"]


def test_methods_stand_with_what_a_rank_sends_and_their_last_accuracies(tmp_path: Path, store: Store) -> None:
    for unit in EXPERIMENTS["methods"].plan(settings_of("methods", "short"), [0]):
        sent = {"MNIST, Horovod fp32": 60000.0, "MNIST, one-bit": 3000.0}
        if unit.label in sent:
            tested = [[10.0], [90.0], [94.0], [98.0]]
            store.write(unit, training(unit, 0.0, test=tested, bytes_sent=[sent[unit.label]] * 4), 9.0, COMMAND)
    table = part_of(written(tmp_path, store), "Which method to choose")
    # ten steps; the mean of the last three epochs
    assert cells_of(table, "Horovod fp32") == ["94.0", "6.0", "1.0", "1"]
    assert cells_of(table, "one-bit") == ["94.0", "0.3", "20.0", "1"]
    assert cells_of(table, "top-k 1 %") == ["**missing**", "", "", "0"]


def test_bits_stand_with_bytes_with_and_without_a_coding(tmp_path: Path, store: Store) -> None:
    for unit in EXPERIMENTS["qsgd"].plan(settings_of("qsgd", "short"), [0]):
        if unit.settings["data"] == "CIFAR-10" or unit.settings["bits"] == 8:
            continue
        coded = unit.settings["coding"]
        digest = "other" if coded and unit.settings["bits"] == 2 else "ab"
        sent = [15000.0 if coded else 30000.0] * unit.ranks
        store.write(unit, training(unit, 97.0, digest=digest, bytes_sent=sent), 9.0, COMMAND)
    table = part_of(written(tmp_path, store), "Accuracy against bits")
    # 30 kB in 10 steps, to 3 others; 1000 parameters of 4 bytes
    assert cells_of(table, "4") == ["97.00", "1.0", "4.0", "0.5", "8.0", "yes, bit by bit", "1"]
    assert cells_of(table, "2")[5] == "**no**"
    assert cells_of(table, "8") == ["**missing**", "", "", "**missing**", "", "", "0"]
    assert cells_of(table, "32 (Horovod fp32)")[:3] == ["97.00", "4.0", "1.0"]


def gpt_records(store: Store, seeds: int = 2, **more: Any) -> None:
    losses = {"dense fp32": 2.0, "one-bit": 2.02, "DiLoCo": 2.03, "SparseLoCo": 2.1}
    for unit in EXPERIMENTS["gpt"].plan(settings_of("gpt", "short", ["rates=[]"]), range(seeds)):
        if unit.label not in losses:
            continue
        fewer = {"dense fp32": 1, "one-bit": 30, "DiLoCo": 25, "SparseLoCo": 4000}[unit.label]
        result = {
            "train": [5.0, 2.0], "test": [5.0, losses[unit.label] * (1 + unit.settings["seed"])], "step": [225, 450],
            "bytes": [1e9 / fewer, 3e9 / fewer], "steps": 450, "parameters": 2_500_000, "seconds": [1.0, 1.0],
            "data": "4.7 MB of sources", "device": "a card", "replicas_identical": True, **more,
        }  # fmt: skip
        store.write(unit, result, 9.0, COMMAND)


def test_trainings_of_the_transformer_stand_beside_the_dense_one_of_their_seed(tmp_path: Path, store: Store) -> None:
    gpt_records(store)
    table = part_of(written(tmp_path, store), "A small transformer")
    assert "Run on: a card, 2 ranks on one machine; float32;" in table
    assert cells_of(table, "dense fp32") == ["3.000 (2.000–4.000)", "", "3,000.0", "", "", "2"]
    assert cells_of(table, "one-bit") == ["3.030 (2.020–4.040)", "+1.0 (+1.0–+1.0)", "100.0", "30.0", "30.0", "2"]
    assert cells_of(table, "SparseLoCo")[2:] == ["0.75", "4,000.0", "4,000.0", "2"]
    assert cells_of(table, "DASO") == ["**missing**", "", "", "", "", "0"]
    # SparseLoCo is 5 % above
    assert "with all seeds: **one-bit**, 30.0 times fewer, +1.0 (+1.0–+1.0) % above." in table
    averaging = table.partition("| ranks that train alone |")[2]
    assert cells_of(averaging, "DiLoCo") == ["3.045 (2.030–4.060)", "+1.5 (+1.5–+1.5)", "25.0"]
    assert cells_of(averaging, "D-PSGD") == ["**missing**", "", ""]
    assert "**Not measured:** how long their steps take" in table
    assert len(list(store.folder.glob("gpt-loss-*.png"))) == 1


def test_what_was_not_run_of_the_transformer_is_told(tmp_path: Path, store: Store) -> None:
    gpt_records(store)
    table = part_of(written(tmp_path, store), "A small transformer")
    assert "| short | methods trained by 2 ranks | **4 of 14** | 2 |" in table
    assert "| short | steps of 2 ranks timed at 100mbit | **0 of 1** | |" in table
    assert "| full | methods trained by 4 ranks | **0 of 14** | |" in table
    assert "| gpu | methods trained by 2 ranks | **0 of 14** | |" in table


def test_trainings_on_other_devices_or_texts_are_not_compared(tmp_path: Path, store: Store) -> None:
    gpt_records(store)
    for path in store.folder.glob("gpt-one-bit-*.json"):
        path.write_text(path.read_text().replace("a card", "another card"))
    table = part_of(written(tmp_path, store), "A small transformer")
    assert table.count("\nRun on: ") == 2
    assert "| one-bit | 3.030 (2.020–4.040) | | 100.0 | | |" in table


def test_prose_and_records_must_fit_each_other() -> None:
    with pytest.raises(ValueError, match="do not fit each other: volume"):
        page.filled("{{volume}} {{speed}}", {"speed": "1"})
    with pytest.raises(ValueError, match="do not fit each other: speed"):
        page.filled("", {"speed": "1"})


@pytest.mark.thorough
def test_the_page_is_that_of_the_records(tmp_path: Path) -> None:
    # prose that is changed without `--page-only`, or a page that is changed by hand, would not last
    folder = tmp_path / FOLDER.relative_to(ROOT)
    folder.mkdir(parents=True)
    for record in FOLDER.glob("*.json"):
        shutil.copy(record, folder)
    path = tmp_path / PAGE.relative_to(ROOT)
    page.write(path, Store(folder))
    assert path.read_text() == PAGE.read_text()


def test_no_figure_of_ours_is_typed_into_the_prose() -> None:
    assert "98." not in page.PROSE.read_text()
