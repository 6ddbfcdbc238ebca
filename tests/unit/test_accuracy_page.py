from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from statistics import mean
from typing import Any

import accuracy
import accuracy_page
import pytest
from accuracy_cells import (
    COMPRESSORS,
    CORRECTED,
    DENSE,
    NETWORKS,
    OPTIMIZERS,
    SEEDS,
    SIGNS,
    THRESHOLD,
    TUNING_SEED,
    Cell,
    all_cells,
    candidates,
    cell_of,
    chosen,
    cut,
)

import hvd_compress
from hvd_compress.compressors import registry

Test = Callable[[Cell], float | None]


def rows_of(cells: list[Cell], test: Test) -> list[dict[str, Any]]:
    return [
        {**cell._asdict(), "test": test(cell), "bytes": 4000.0 if cell.compressor == DENSE else 1000.0,
         "parameters": 1000, "data": "MNIST", "seconds": 1.0}
        for cell in cells
    ]  # fmt: skip


def as_tuned(cell: Cell) -> float:
    """The second rate of each grid is the best, and tau is all the same."""
    is_second = cell.rate == sorted({c.rate for c in candidates([]) if c[:3] == cell[:3]} or {cell.rate})[-4:][0]
    return (2.0 if is_second else 3.0) if cell.network == "transformer" else (95.0 if is_second else 90.0)


def tuned() -> list[dict[str, Any]]:
    first = rows_of(candidates([]), as_tuned)
    return rows_of(candidates(first), as_tuned)


def content(test: Test) -> dict[str, Any]:
    found = tuned()
    run = {"command": ["python", "benchmarks/accuracy.py", "--jobs", "8"], "device": "cpu", "machine": {"cores": 16}}
    return {"form": "full", "runs": [run], "tuning": found, "rows": rows_of(all_cells(found), test)}


def cells(text: str, network: str, first: str) -> list[str]:
    section = text.partition(f"\n## {network}\n")[2].partition("\n## ")[0]
    row = next(line for line in section.splitlines() if line.startswith(f"| `{first}` |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_every_compressor_of_the_package_is_tried() -> None:
    tried = {type(make(0.1)) for make in COMPRESSORS.values()}
    assert tried == {*registry.COMPRESSORS.values(), hvd_compress.PowerSGD}


def test_names_are_calls_that_make_what_they_name() -> None:
    for name, make in COMPRESSORS.items():
        if name != THRESHOLD:
            assert eval(name, vars(hvd_compress)) == make(None)


def test_the_page_is_that_of_the_record() -> None:
    record = json.loads(accuracy.RECORD.read_text()) if accuracy.RECORD.is_file() else None
    assert accuracy.PAGE.read_text() == accuracy_page.page(record), "run benchmarks/accuracy.py --page-only"


@pytest.mark.parametrize("record", [None, {"form": "full", "runs": [], "tuning": [], "rows": []}])
def test_without_a_record_the_page_says_so(record: dict[str, Any] | None) -> None:
    text = accuracy_page.page(record)
    assert "**Missing:** the table is not recorded yet." in text
    assert "|" not in text


def test_rates_are_tuned_on_a_seed_that_is_not_in_the_table() -> None:
    assert TUNING_SEED not in SEEDS
    assert {cell.seed for cell in candidates([])} == {TUNING_SEED}
    assert {cell.seed for cell in all_cells(tuned())} == set(SEEDS)


def test_tau_is_tuned_when_the_rates_are() -> None:
    first = candidates([])
    assert {cell.compressor for cell in first} == {DENSE, SIGNS}
    assert {cell.compressor for cell in candidates(rows_of(first[1:], as_tuned))} == {DENSE, SIGNS}
    second = [cell for cell in candidates(rows_of(first, as_tuned)) if cell.compressor == THRESHOLD]
    assert {cell.rate for cell in second if cell.optimizer == "Adam"} == {1e-3}


def test_of_rates_as_good_as_the_best_the_lowest_is_taken_and_of_taus_the_largest() -> None:
    values = {0.01: 90.0, 0.03: 94.7, 0.1: 95.0, 0.3: None, 1.0: 94.9}
    mine = [c for c in candidates([]) if c[:3] == (DENSE, "SGD", "MLP")]
    assert chosen(rows_of(mine, lambda c: values[c.rate]), "OneBit()", "SGD", "MLP")["rate"] == 0.03
    taus = [Cell(THRESHOLD, "SGD", "transformer", TUNING_SEED, 0.1, tau) for tau in (1e-4, 1e-3, 1e-2)]
    losses = {1e-4: 2.0, 1e-3: 2.01, 1e-2: 2.5}
    assert chosen(rows_of(taus, lambda c: losses[c.tau or 0]), THRESHOLD, "SGD", "transformer")["tau"] == 1e-3


def test_nothing_tuned_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--tune first"):
        all_cells([])


def test_cells_are_the_figures_of_the_record() -> None:
    drawn = random.Random(0)
    record = content(lambda cell: drawn.uniform(2, 3) if cell.network == "transformer" else drawn.uniform(90, 95))
    text = accuracy_page.page(record)
    for network, name in product(NETWORKS, ("OneBit()", "Percentile(90)")):
        found = cells(text, network, name)
        digits = 3 if network == "transformer" else 1
        for number, optimizer in enumerate(OPTIMIZERS):
            mine, dense = (
                [
                    r["test"]
                    for r in record["rows"]
                    if (r["compressor"], r["network"], r["optimizer"]) == (of, network, optimizer)
                ]
                for of in (name, DENSE)
            )
            low, high = min(mine), max(mine)
            assert found[2 * number] == f"{mean(mine):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
            against = mean(mine) - mean(dense)
            assert abs(float(found[2 * number + 1].partition(" ")[0]) - against) < 0.01
        assert found[-2:] == ["1.0", "4.0"]
    assert "Not complete" not in text


def test_what_is_as_good_as_dense_is_named_and_what_is_not_is_not() -> None:
    def test(cell: Cell) -> float | None:
        bad = {"TopK(0.01)": 1.0, "FP16()": 0.4}.get(cell.compressor, 9.0 if cell.compressor != DENSE else 0.0)
        if cell.compressor == "OneBit()" and cell.optimizer == "SGD":
            bad = 0.0
        if cell.compressor == "TernGrad()":
            return None
        return 2 + bad / 25 if cell.network == "transformer" else 95 - bad

    text = accuracy_page.page(content(test))
    whatever, adam, sgd = (line for line in text.splitlines() if line[:2] in ("1.", "2.", "3."))
    assert "`FP16()` (4.0 times" in whatever
    assert "OneBit" not in whatever + adam
    assert "`OneBit()`" in sgd
    assert "TopK" not in whatever + adam + sgd
    worst = next(line for line in text.splitlines() if line.startswith("5."))
    assert "`TernGrad()`" in worst
    assert "in none of the 6 pairs" in worst
    assert cells(text, "MLP", "TernGrad()")[:4] == ["not finite", "", "not finite", ""]


def test_of_those_with_far_fewer_bytes_the_one_that_loses_least_is_named() -> None:
    def test(cell: Cell) -> float | None:
        if (cell.compressor, cell.network) == ("QSGD(2)", "ResNet"):
            return None
        lost = {DENSE: 0.0, "TopK(0.01)": 2.0, "PowerSGD(1)": 1.5, "QSGD(2)": 0.0, "FP16()": 0.0}.get(
            cell.compressor, 5.0
        )
        return 2 + lost / 25 if cell.network == "transformer" else 95 - lost

    record = content(test)
    assert "4. **For fewest bytes, at a price:** none that sent 20 times" in accuracy_page.page(record)
    for row in record["rows"]:
        if row["compressor"] in ("TopK(0.01)", "PowerSGD(1)", "QSGD(2)"):
            row["bytes"] = 160.0
    (line,) = (line for line in accuracy_page.page(record).splitlines() if line.startswith("4."))
    assert "`PowerSGD(1)` lost least" in line
    assert "at most 1.5 points of accuracy and 0.060 nats a byte, for 25 times fewer bytes" in line


def test_an_incomplete_record_says_what_is_missing() -> None:
    record = content(lambda cell: 2.0)
    record["rows"] = record["rows"][: len(record["rows"]) // 3]
    text = accuracy_page.page(record)
    assert f"**Not complete:** {len(record['rows'])} of {3 * len(record['rows'])} trainings are recorded." in text
    assert "1 of 3 seeds" in cells(text, "MLP", "OneBit()")[0]
    assert "in the mean of 1 seeds" in text
    assert "| DGC | not recorded |" in text
    record["rows"].remove(next(row for row in record["rows"] if row["optimizer"] == "Adam"))
    assert "Whatever you train" not in accuracy_page.page(record)


def test_top_k_with_momentum_correction_is_compared_with_dense_sgd() -> None:
    record = content(lambda cell: 90.0 if cell.optimizer == "DGC" else 92.0)
    for row in record["rows"]:
        if row["optimizer"] == "DGC, warm-up":
            row.update(test=None, bytes=500.0)
    section = accuracy_page.page(record).partition("## Top-k with momentum correction")[2].partition("##")[0]
    of_mlp = [line for line in section.splitlines() if line.startswith("| MLP")]
    assert [line.split("|")[2].strip() for line in of_mlp] == ["SGD", "DGC", "DGC, warm-up"]
    assert "-2.00 (-2.00–-2.00) | 4.0 |" in of_mlp[1]
    assert "not finite" in of_mlp[2]


def test_words_choose_cells() -> None:
    every = all_cells(tuned())
    table = len(COMPRESSORS) * len(NETWORKS) * len(OPTIMIZERS) * len(SEEDS)
    assert len(every) == table + len(NETWORKS) * len(CORRECTED) * len(SEEDS)
    assert len(cut(every, ["Adam", "seed=0"])) == table // len(SEEDS) // len(OPTIMIZERS)
    assert {cell_of(row) for row in rows_of(every, lambda cell: None)} == set(every)
