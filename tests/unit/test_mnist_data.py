from __future__ import annotations

import gzip
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "mnist_data.py"


@pytest.fixture
def mnist_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a mirror and a cache below tmp_path."""
    spec = importlib.util.spec_from_file_location("mnist_data", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    monkeypatch.setattr(module, "MIRROR", f"{mirror.as_uri()}/")
    monkeypatch.setattr(module, "places", lambda data_dir: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for field, name in module.FILES.items():
        sizes = [2, 3, 3] if field.endswith("x") else [2]
        content = bytes([0, 0, 8, len(sizes)]) + np.array(sizes, ">u4").tobytes() + bytes(range(int(np.prod(sizes))))
        (mirror / name).write_bytes(gzip.compress(content))
        monkeypatch.setitem(module.CONTENT, name, hashlib.sha256(content).hexdigest())
    return module


def test_a_download_that_is_mnist_is_kept(mnist_data: ModuleType) -> None:
    assert mnist_data.load().source == "MNIST, downloaded"
    assert {file.name for file in mnist_data._cache().iterdir()} == set(mnist_data.FILES.values())


@pytest.mark.parametrize(
    "sent",
    [gzip.compress(b"something else"), b"<html>sign in</html>", gzip.compress(b"x")[:-9]],
    # not the bytes, which hold the time of day: processes that share the tests would know them by different names
    ids=["another file", "a page", "cut short"],
)
def test_another_file_is_not_kept(
    sent: bytes, mnist_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="its digits take MNIST's place")
    (tmp_path / "mirror" / mnist_data.FILES["train_y"]).write_bytes(sent)
    assert "not MNIST" in mnist_data.load().source
    assert "no download: " in capsys.readouterr().out
    assert [file.name for file in mnist_data._cache().iterdir()] == [mnist_data.FILES["train_x"]]


def test_without_digits_of_any_kind_the_message_says_what_to_do(
    mnist_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    (tmp_path / "mirror" / mnist_data.FILES["train_y"]).unlink()
    with pytest.raises(SystemExit, match=r"--data-dir, or `pip install scikit-learn`"):
        mnist_data.load()
