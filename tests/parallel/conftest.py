from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import launch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            # `launch.run` ends a start before, says where its ranks stood, and starts it only once for all tests
            item.add_marker(pytest.mark.timeout(launch.LIMIT_SECONDS_IN_ALL + 200))


def pytest_collection_finish(session: pytest.Session) -> None:
    launch.selected.update(item.path.stem for item in session.items if item.path.parent == HERE)
