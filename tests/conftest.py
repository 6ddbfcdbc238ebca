from __future__ import annotations

import os
from pathlib import Path

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
    """Of what interpreted kernels are tested with, keep each value of each parameter, and leave the products to GPUs.

    An interpreted kernel takes seconds where one on a GPU takes microseconds. Items with a value of a parameter that
    none before them has are thorough, as is the first of each test, and the others are exhaustive.
    """
    seen: dict[tuple[Path, str], set[tuple[str, str]]] = {}
    for item in items:
        if not item.path.name.startswith(("test_cuda_", "test_device_memory", "test_golden_device")):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        values = {(name, repr(value)) for name, value in parameters.items()}
        of = item.path, getattr(item, "originalname", item.name)
        is_new = of not in seen or values - seen[of]
        item.add_marker(pytest.mark.thorough if is_new else pytest.mark.exhaustive)
        seen.setdefault(of, set()).update(values)


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
