"""Load what is learned from: MNIST, and the first batch of CIFAR-10, as tensors on every rank."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from networks import mnist_data

__all__ = ["Data", "cifar", "cifar_folders", "mnist"]

_CIFAR = ("data_batch_1.bin", "test_batch.bin")
_SHAPE = (3, 32, 32)
_MNIST_IMAGES = 60000


class Data(NamedTuple):
    """Holds images and labels, and what they are, without where they lie."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    source: str


def mnist(train: int, test: int) -> Data:
    """Load the first so many handwritten digits, as rows of standardized pixels.

    Raises:
        SystemExit: all are wanted, and there is something smaller than MNIST only.
    """
    digits = mnist_data.load_on_all_ranks(hvd.rank(), hvd.barrier, None, train)
    if train == _MNIST_IMAGES != len(digits.train_y):
        raise SystemExit(f"this repeats a paper on MNIST, and there is only {digits.source}")
    train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in digits[:4])
    return Data(train_x, train_y, test_x[:test], test_y[:test], digits.source.partition(" from ")[0])


def cifar(train: int, test: int) -> Data:
    """Load the first so many images of CIFAR-10's first batch, each standardized alone, shape=(n, 3, 32, 32).

    Raises:
        SystemExit: there is none.
    """
    folders = cifar_folders()
    found = next((files for folder in folders if all(files := [_file(folder, name) for name in _CIFAR])), None)
    if found is None:
        raise SystemExit(
            f"no CIFAR-10: expected {' and '.join(_CIFAR)} of its binary version, or these with .gz, in "
            f"{', '.join(map(str, folders))}; $HVD_COMPRESS_DATA names the folder around cifar10/"
        )
    (train_x, train_y, checksum), (test_x, test_y, _) = (_read(file) for file in found if file)
    source = f"CIFAR-10, first batch, CRC-32 {checksum:08x}"
    return Data(train_x[:train], train_y[:train], test_x[:test], test_y[:test], source)


def cifar_folders() -> list[Path]:
    """Return where CIFAR-10 is looked for: beside MNIST."""
    return [folder.with_name("cifar10") for folder in mnist_data.places(None) if folder.name == "mnist"]


def _file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read(file: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    record = 1 + int(np.prod(_SHAPE))
    if not content or len(content) % record:
        raise SystemExit(f"{file} is no file of CIFAR-10's binary version: records have {record} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    x = rows[:, 1:].astype(np.float32)
    # each image alone, as TensorFlow's example of this network does
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True).clip(min=1.0)
    return torch.from_numpy(x.reshape(-1, *_SHAPE)), torch.from_numpy(rows[:, 0].astype(np.int64)), zlib.crc32(content)
