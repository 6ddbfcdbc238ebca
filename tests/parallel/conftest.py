from __future__ import annotations

import pytest

from tests.parallel import launch

# `launch.run` ends a start in which nothing happens long before, and says where its ranks stood; one that many topics
# share takes minutes
LIMIT_SECONDS = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if launch.ROOT / "tests" / "parallel" in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


def pytest_collection_finish(session: pytest.Session) -> None:
    launch.selected.update(item.path.stem for item in session.items)
