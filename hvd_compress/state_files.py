"""Flat arrays in files of NumPy's npz format, read without trust.

`numpy.load` parses a header with Python's own parser and sets memory aside for whatever shape that states, so it can
raise nearly anything, warn, and ask for any amount of memory. What is written here is flat and not compressed: its
headers have one form, and an array is no longer than its file. The zip format has a checksum for each array.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import StateError

__all__ = ["read_arrays", "write_arrays"]

_SUFFIX = ".npy"
# magic, version 1.0, length of the header, header (a multiple of 64 bytes with these)
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<f4|<f8|>f4|>f8|\|u1)', 'fortran_order': (?:False|True), "
    rb"'shape': \((\d{1,19}),\), \} *\n",
    re.DOTALL,
)


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write flat arrays of bytes, float32 or float64 to a file, whole or not at all; its folder is made.

    Raises:
        OSError: it cannot be written, as on a full disk; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # what a killed process has left, or somebody has planted: a link here is removed, never followed
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            # a full disk may show itself only here, and must before the old file goes
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(file: BinaryIO) -> dict[str, npt.NDArray[Any]]:
    """The arrays that `write_arrays` wrote.

    Raises:
        StateError: an entry is not of that form.
        Exception: the file is damaged; which one depends on where it is, see `zipfile`.
    """
    arrays = {}
    length = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.compress_size for member in members) > length:
            raise StateError(f"it has {length} bytes, its entries claim more")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise StateError(f"its entry {member.filename!r} is compressed, or has two lengths")
            arrays[member.filename.removesuffix(_SUFFIX)] = _array(member.filename, archive.read(member))
    return arrays


def _array(name: str, data: bytes) -> npt.NDArray[Any]:
    header = _HEADER.match(data, 0, 1024)
    if header is None or header.end() != 10 + int.from_bytes(header[1], "little"):
        raise StateError(f"its entry {name!r} is not a flat array of bytes, float32 or float64")
    dtype, count = np.dtype(header[2].decode()), int(header[3])
    if len(data) - header.end() != count * dtype.itemsize:
        raise StateError(f"its entry {name!r} has {len(data) - header.end()} bytes for {count} values of {dtype}")
    # a copy, which can be written to
    return np.frombuffer(data, dtype, offset=header.end()).astype(dtype.newbyteorder("="))
