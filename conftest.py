"""For tests and for examples in docstrings: what cannot be collected without TensorFlow is left out, and says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leave out files that need TensorFlow where it is not installed: the newest Pythons have no wheel of it."""
    report = yield
    if report.failed and importlib.util.find_spec("tensorflow") is None:
        text = str(report.longrepr)
        missing = ("No module named 'tensorflow'", "No module named 'keras'", "No package metadata was found for keras")
        if any(words in text for words in missing):
            reason = "TensorFlow is not installed: left out whole"
            return pytest.CollectReport(report.nodeid, "skipped", (str(collector.path), 0, reason), [])
    return report
