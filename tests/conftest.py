from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("HVD_COMPRESS_TEST_GPU") != "1":
    # kernels of devices are interpreted; ranks that tests start have this environment, too
    os.environ["TRITON_INTERPRET"] = "1"

# --doctest-modules imports what it collects; a worker is to be imported by a rank, which knows its number
collect_ignore_glob = ["parallel/workers/*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="write the golden files anew; only for a deliberate change of the wire format, with a new version number",
    )
    parser.addoption(
        "--write-names", action="store_true", help="write the list of public names anew, after a deliberate change"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as thorough what interpreted kernels are tested with, but for the first of each test."""
    kept: dict[Any, pytest.Item] = {}
    slow = [
        item for item in items if item.path.name.startswith(("test_cuda_", "test_device_memory", "test_golden_device"))
    ]
    for item in slow:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        # tests of kernels show each compressor, those of steps with them need not do so again
        kind = type(parameters.get("compressor")) if item.path.name.startswith("test_cuda_") else None
        of = item.path, getattr(item, "originalname", item.name), kind
        kept.setdefault(of, item)
    witnesses = set(kept.values())
    for item in slow:
        if item not in witnesses:
            item.add_marker(pytest.mark.thorough)


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        # a worker of xdist begins while others compile
        return
    # Numba keys its cache by the file of the compiled function alone; kernels inlined from another file that has
    # changed since would be tested as they were
    kernels = Path(__file__).parent.parent / "hvd_compress" / "kernels"
    newest = max(file.stat().st_mtime for file in kernels.glob("*.py"))
    for cached in (kernels / "__pycache__").glob("*.nb[ci]"):
        if cached.stat().st_mtime < newest:
            cached.unlink(missing_ok=True)
