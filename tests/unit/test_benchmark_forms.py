"""What benchmarks make of short forms, and of machines without links that have rates."""

from __future__ import annotations

from typing import Any

import candidates
import daso
import links
import page
import places
import pytest
import scaling
import speed
from measure import ALONE, DENSE, read


def test_a_record_without_the_drawn_network_has_no_picture() -> None:
    record = read("auto")
    assert record is not None
    short = {**record, "cells": [cell for cell in record["cells"] if cell["width"] == 1024]}
    assert short["cells"]
    assert speed.section(short) == ""


def test_without_a_cluster_links_are_unlimited_and_a_record_of_their_rates_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "unavailable", lambda: "no root")
    assert places.rates_or_unlimited(["1gbit", "100mbit"]) == [places.UNLIMITED]
    assert places.rates_to_be_had(["1gbit"]) == []
    written: list[Any] = []
    monkeypatch.setattr(places, "write", lambda *arguments: written.append(arguments))
    links.main(["--short"])
    assert not written


def test_candidates_come_with_what_they_are_compared_with() -> None:
    assert candidates.with_references(["one-bit", ALONE]) == [ALONE, *DENSE, "one-bit"]
    with pytest.raises(SystemExit):
        scaling.arguments(["--candidates", "two-bit"])
    assert scaling.arguments(["--candidates", "one-bit"]).candidates == ["one-bit"]


def test_each_number_of_elements_on_a_gpu_has_its_table() -> None:
    record = read("gpu")
    assert record is not None
    some = record["runs"][:2]
    runs = [{**run, "numel": numel, "copy": numel / 1000} for numel in (10_000, 1_000_000) for run in some]
    text = page._gpu({**record, "runs": runs})
    for numel in ("10,000", "1,000,000"):
        assert f"{numel} float32 in rows" in text
    assert text.count("| encode, GB/s |") == 2


def test_times_without_counted_bytes_have_no_aims_of_bytes() -> None:
    record = read("daso")
    assert record is not None
    rows = {"4,1": {"bytes": [0.0]}, daso.DASO_ADAPTIVE: {"bytes": [0.0]}}
    case = {"rate": "unlimited", "width": 1024, "cycle": 4, "rows": rows}
    assert daso.aims({"times": [case]}) == []
    assert daso.aims({"times": [{**case, "rows": {"2,1": rows["4,1"]}}]}) == []
    assert len(daso.aims({"times": record["times"]})) == 2 * len(record["times"])
