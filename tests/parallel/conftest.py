from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import launch

HERE = Path(__file__).parent


def _is_left_out(item: pytest.Item) -> bool:
    """Tell whether a test asks for a case that its start leaves out."""
    asked = getattr(getattr(item, "callspec", None), "params", {})
    return launch.is_left_out(asked.get("case"), asked.get("ranks", 2), asked.get("launcher", "mpi"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.path.parent == HERE and _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.path.parent == HERE:
            # `launch.run` ends a start before, says where its ranks stood, and starts it only once for all tests
            item.add_marker(pytest.mark.timeout(launch.LIMIT_SECONDS_IN_ALL + 200))


def pytest_collection_finish(session: pytest.Session) -> None:
    launch.selected.update(item.path.stem for item in session.items if item.path.parent == HERE)
