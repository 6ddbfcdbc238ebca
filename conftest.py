"""For tests and for examples in docstrings: what needs TensorFlow is left out where it is not installed, and says so.

The newest Pythons have a wheel of torch, and none of TensorFlow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator

import pytest

WITHOUT_TENSORFLOW = importlib.util.find_spec("tensorflow") is None
MISSING = (
    "No module named 'tensorflow'",
    "No module named 'keras'",
    "No package metadata was found for keras",
    "Extension horovod.tensorflow has not been built",
    "TensorFlow is not installed",
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leave out whole files that cannot be imported."""
    report = yield
    if WITHOUT_TENSORFLOW and report.failed and any(words in str(report.longrepr) for words in MISSING):
        reason = "TensorFlow is not installed: the whole file is left out"
        return pytest.CollectReport(report.nodeid, "skipped", (str(collector.path), 0, reason), [])
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the cases, of files that can be imported, whose name says that they need it."""
    if WITHOUT_TENSORFLOW:
        for item in items:
            if any(framework in item.name for framework in ("tensorflow", "keras")):
                item.add_marker(pytest.mark.skip(reason="TensorFlow is not installed"))
