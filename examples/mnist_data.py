"""Load handwritten digits for the examples, with NumPy alone: MNIST where it can be had, else scikit-learn's."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # the one that torchvision uses
DOWNLOAD_SECONDS = 10
FILES = {
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "test_x": "t10k-images-idx3-ubyte.gz",
    "test_y": "t10k-labels-idx1-ubyte.gz",
}
# sha256 of what is inside the downloaded files: mirrors compress them differently
CONTENT = {
    "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


class Digits(NamedTuple):
    """Holds images as rows of standardized pixels, their labels, and where they came from."""

    train_x: np.ndarray  # shape=(n, features), dtype=float32
    train_y: np.ndarray  # shape=(n,), dtype=int64, values 0..9
    test_x: np.ndarray
    test_y: np.ndarray
    source: str


def load(data_dir: str | None = None, download: bool = True) -> Digits:
    """Load digits from the first place that has them, see `places`; `download=False` skips the network.

    Raises:
        FileNotFoundError: `data_dir` was given and holds no MNIST.
        ValueError: a file is there but is not what its name says.
    """
    for folder in places(data_dir):
        if all((folder / name).is_file() for name in FILES.values()):
            return _standardized(source=f"MNIST from {folder}", **_read(folder))
    if data_dir:
        raise FileNotFoundError(f"no MNIST in {data_dir}: expected {', '.join(FILES.values())} there or in its mnist/")
    if download and _download(_cache()):
        return _standardized(source="MNIST, downloaded", **_read(_cache()))
    return _bundled()


def load_on_all_ranks(
    rank: int, wait_for_all: Callable[[], Any], data_dir: str | None, limit_train: int | None
) -> Digits:
    """Load the same digits on every rank; rank 0 goes first and downloads, if need be, for all."""
    data = load(data_dir) if rank == 0 else None
    wait_for_all()
    data = data or load(data_dir, download=False)
    keep = limit_train or len(data.train_y)
    return data._replace(train_x=data.train_x[:keep], train_y=data.train_y[:keep])


def deal(count: int, batch_size: int, rank: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the indices of a rank's batches in an epoch, (steps, batch): all ranks deal out the same shuffled deck."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    steps = count // (batch_size * size)
    return order[: steps * batch_size * size].reshape(steps, size, batch_size)[:, rank]


def places(data_dir: str | None) -> list[Path]:
    """Return folders that may hold MNIST: `data_dir` if given; else $HVD_COMPRESS_DATA, ../shared/data, the cache."""
    if data_dir:
        roots = [Path(data_dir)]
    else:
        root_of_project = Path(__file__).resolve().parents[1]
        named = os.environ.get("HVD_COMPRESS_DATA")
        roots = [Path(named)] if named else []
        roots += [root_of_project.parent / "shared" / "data", _cache()]
    return [folder for root in roots for folder in (root / "mnist", root)]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_compress" / "mnist"


def _read(folder: Path) -> dict[str, np.ndarray]:
    return {
        field: _read_idx(folder / name, dimensions=3 if field.endswith("x") else 1) for field, name in FILES.items()
    }


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read one idx file: two zero bytes, type 8 (uint8), number of dimensions, big-endian sizes, then the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    begin = 4 + 4 * dimensions
    sizes = np.frombuffer(content[4:begin], dtype=">u4")
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != begin + int(np.prod(sizes, dtype=np.int64)):
        raise ValueError(f"{path} is no idx file of bytes with {dimensions} dimension(s)")
    return np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(tuple(sizes))


def _download(folder: Path) -> bool:
    """Fetch what is missing; where there is no network, say why and return False."""
    print(f"MNIST is in none of the usual places; trying to download it to {folder}", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES.values():
            if (folder / name).is_file():
                continue
            # renamed when complete: a broken download must not be taken for the data by the next run
            partial = folder / f"{name}.{os.getpid()}.partial"
            with urllib.request.urlopen(MIRROR + name, timeout=DOWNLOAD_SECONDS) as reply, partial.open("wb") as file:
                shutil.copyfileobj(reply, file)
            try:
                _check(partial, name)
                partial.replace(folder / name)
            finally:
                partial.unlink(missing_ok=True)
    except (OSError, EOFError, zlib.error) as error:
        print(f"  no download: {error}", flush=True)
        return False
    return True


def _check(file: Path, name: str) -> None:
    """Raise OSError unless the file holds what MNIST's file of that name does."""
    found = hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest()
    if found != CONTENT[name]:
        raise OSError(f"what came as {name} is not MNIST's: its content has sha256 {found}, not {CONTENT[name]}")


def _bundled() -> Digits:
    """Return the 1,797 digits of 8x8 pixels that scikit-learn ships; every fifth one is for the test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise SystemExit(
            f"There are no digits to learn from: MNIST could not be downloaded, and scikit-learn, which ships small "
            f"ones, is not installed. Put {', '.join(FILES.values())} into {_cache()}, name their folder with "
            f"--data-dir, or `pip install scikit-learn`."
        ) from None

    print(
        "Using the 8x8 digits bundled with scikit-learn instead: small and easy, so accuracies mean little.", flush=True
    )
    x, y = load_digits(return_X_y=True)
    test = np.arange(len(y)) % 5 == 0
    return _standardized(
        x[~test], y[~test], x[test], y[test], source="8x8 digits bundled with scikit-learn (not MNIST)"
    )


def _standardized(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, source: str
) -> Digits:
    mean, deviation = train_x.mean(), train_x.std()

    def rows(x: np.ndarray) -> np.ndarray:
        return ((x.reshape(len(x), -1) - mean) / deviation).astype(np.float32)

    return Digits(rows(train_x), train_y.astype(np.int64), rows(test_x), test_y.astype(np.int64), source)
