from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import launch

HERE = Path(__file__).parent


def _is_left_out(item: pytest.Item) -> bool:
    """Tell whether a test asks for a case that its start leaves out."""
    asked = getattr(getattr(item, "callspec", None), "params", {})
    return launch.is_left_out(
        item.path.stem, asked.get("case"), asked.get("ranks", asked.get("size", 2)), asked.get("launcher", "mpi")
    )


def _case_of(item: pytest.Item) -> tuple[Path, str, Any]:
    """Which case of which test an item is, whatever start it asks for."""
    asked = getattr(getattr(item, "callspec", None), "params", {})
    return item.path, getattr(item, "originalname", item.name), asked.get("case")


def _check_that_others_show(left_out: Iterable[pytest.Item], kept: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError for a case that a start leaves out, and no other one of `make test-rest` has."""
    shown = {_case_of(item) for item in kept if not item.get_closest_marker("exhaustive")}
    for item in left_out:
        if _case_of(item) not in shown:
            raise pytest.UsageError(
                f"no start of `make test-rest` shows {item.nodeid}: `is_left_out` of tests/parallel/launch.py leaves "
                "its case to another start, and its test has none. Give it one"
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.path.parent == HERE and _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if not any("::" in argument for argument in config.args):
        _check_that_others_show(left_out, [item for item in items if item.path.parent == HERE])
    for item in items:
        if item.path.parent == HERE:
            # `launch.run` ends a start before, says where its ranks stood, and starts it only once for all tests
            item.add_marker(pytest.mark.timeout(launch.LIMIT_SECONDS_IN_ALL + 200))


def pytest_collection_finish(session: pytest.Session) -> None:
    launch.selected.update(item.path.stem for item in session.items if item.path.parent == HERE)
