"""What is built of this folder: an sdist with all that is versioned, a wheel with the package alone."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest

from hvd_compress import __version__

ROOT = Path(__file__).parents[2]
# what setuptools adds
MADE = {"PKG-INFO", "setup.cfg"}
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools overwrites it
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def versioned() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this folder is no git checkout: what is versioned is not known")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(versioned: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel, built from what is versioned and something that is not."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    strays = {"tests/unit/__pycache__/a.pyc": b"", "hvd_compress/kernels/__pycache__/b.nbi": b"", "ci/setup.log": b""}
    for name in [*versioned, *strays]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(strays[name] if name in strays else (ROOT / name).read_bytes())
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return out


def wheel_of(folder: Path) -> zipfile.ZipFile:
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def metadata_of(folder: Path) -> Message:
    with wheel_of(folder) as wheel:
        return email.message_from_bytes(wheel.read(f"hvd_compress-{__version__}.dist-info/METADATA"))


def test_the_sdist_has_all_that_is_versioned(built: Path, versioned: set[str]) -> None:
    with tarfile.open(built / f"hvd_compress-{__version__}.tar.gz") as archive:
        found = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert versioned <= found
    assert {name for name in found - versioned if not name.startswith("hvd_compress.egg-info/")} == MADE


def test_the_wheel_has_the_package_alone(built: Path, versioned: set[str]) -> None:
    with wheel_of(built) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {name for name in versioned if name.startswith("hvd_compress/")}
    assert {"hvd_compress/py.typed", "hvd_compress/cli/build_horovod.py"} <= found


def test_metadata(built: Path) -> None:
    metadata = metadata_of(built)
    assert metadata["Version"] == __version__ == "0.2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    pythons = {c.rpartition(" ")[2] for c in metadata.get_all("Classifier", []) if "Python :: 3." in c}
    (row,) = re.findall(r"^\| Python \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)
    assert pythons == set(re.findall(r"3\.\d+", row.partition(";")[0])), "README has another list of what was run"
    (row,) = re.findall(r"^\| Python \|(.*)\|$", (ROOT / "docs" / "start" / "install.md").read_text(), re.M)
    assert pythons == set(re.findall(r"3\.\d+", row)), "the table of what was run has another list"
    assert not re.search(r"\]\((?!https?:|#)", str(metadata.get_payload())), "leads nowhere on an index page"


def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_hvd_compress", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_index_page() -> None:
    page = setup_module().index_page
    text = "[A](A.md), [the\nlast](docs/b.md#c), [x](https://x/y), [here](#use), ![plot](p.png)"
    assert page(text, "") == "A (`A.md`), the\nlast (`docs/b.md`), [x](https://x/y), [here](#use), plot (`p.png`)"
    assert page(text, "https://h/o/r") == (
        "[A](https://h/o/r/blob/main/A.md), [the\nlast](https://h/o/r/blob/main/docs/b.md#c), [x](https://x/y), "
        "[here](#use), ![plot](https://h/o/r/raw/main/p.png)"
    )


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions"])
def test_links_of_pages_lead_to_files(page: str) -> None:
    pages = [ROOT / page] if (ROOT / page).is_file() else sorted((ROOT / page).glob("*.md"))
    found = set()
    for path in pages:
        places = re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", path.read_text())
        found |= {path.parent / p.partition("#")[0] for p in places if not re.match(r"[a-z]+:|#", p)}
    assert found
    assert not [place for place in found if not place.is_file()]


def test_the_index_of_decisions_has_every_page() -> None:
    decisions = ROOT / "docs" / "decisions"
    pages = {page.name for page in decisions.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([^)/]+)\)", (decisions / "README.md").read_text())) == pages


def test_urls_are_those_of_the_home_and_of_nothing_invented(built: Path) -> None:
    urls = setup_module().project_urls
    assert urls("") == {}
    assert urls("https://h/o/r")["Source"] == "https://h/o/r"
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hvd_compress"]["home"]
    assert len(metadata_of(built).get_all("Project-URL", [])) == len(urls(home))


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_version_is_told_without_frameworks() -> None:
    program = (
        "import sys, hvd_compress; print(hvd_compress.__version__, "
        "[n for n in ('torch', 'tensorflow', 'keras', 'horovod') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"{__version__} []", done.stderr
