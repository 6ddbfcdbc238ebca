"""Encode, check and decode tables of payloads: by the kernels of a compressor, or row by row where it has none.

See `hvd_compress.kernels.table` for what a table is. Nothing else calls the kernels of a compressor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress import wire
from hvd_compress.errors import WireError
from hvd_compress.kernels import table
from hvd_compress.kernels.table import ADD, FLAGS, GRADIENT, NUMEL, PAYLOAD, ROOM, USED, X

if TYPE_CHECKING:
    from hvd_compress.compressors.base import Compressor
    from hvd_compress.compressors.key import Key

__all__ = [
    "LIKE",
    "DeviceKernels",
    "Kernels",
    "Rows",
    "array_at",
    "bytes_at",
    "check",
    "decode",
    "encode",
    "explain",
    "fill_keys",
    "row",
    "take_back",
]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

LIKE = {np.dtype(t): np.empty(0, t) for t in (np.float32, np.float64)}
"""Tells kernels of which type the arrays of a table are."""


class Kernels(NamedTuple):
    """The kernels of a compressor with its settings.

    Args:
        encode: (rows, like); fills USED.
        decode: (rows, like, scale); returns the number of the first row whose body does not fit, or -1.
        shorten: (rows); makes payloads shorter without loss, where there is a coding, and renews USED.
        decode_coded: what `decode` does, where some of the payloads are in the coded form.
    """

    encode: Callable[[Rows, Array], None]
    decode: Callable[[Rows, Array, np.float32], int]
    shorten: Callable[[Rows], None] | None = None
    decode_coded: Callable[[Rows, Array, np.float32], int] | None = None


class DeviceKernels(NamedTuple):
    """The kernels of a compressor with its settings for tables in device memory, see `hvd_compress.kernels.cuda`.

    Each takes a `Launch`, and none waits.

    Args:
        encode: (launch); makes whole payloads.
        verify: (launch); checks the bodies of payloads whose headers are good, so that `decode` need not.
        decode: (launch, scale, force); with `force` also bodies that are not sent, since a value is not finite.
    """

    encode: Callable[[Any], None]
    verify: Callable[[Any], None]
    decode: Callable[[Any, float, bool], None]


def row(x: int, numel: int, group: int, payload: Bytes) -> Rows:
    """Return a table of one row, for the array at the address `x`; all other fields are 0."""
    rows = np.zeros((1, table.COLUMNS), np.int64)
    rows[0, :3] = x, 0, numel
    rows[0, table.GROUP], rows[0, PAYLOAD], rows[0, ROOM] = group, table.address_of(payload), payload.size
    rows[0, table.DIMENSIONS] = 1
    return rows


def encode(
    compressor: Compressor, kernels: Kernels | None, rows: Rows, like: Array, key_of: Callable[[int], Key]
) -> None:
    """Encode the tensors of a table by the kernels for their groups; fills USED. Kernels want at least one element.

    `key_of` a row is what its random choices depend on.

    Raises:
        ContractError: the compressor does not do what `Compressor` asks of it; USED of the rows before are filled.
    """
    rows[:, USED] = 0
    if kernels is None:
        for i, row in enumerate(rows):
            _encode_row(compressor, row, like, key_of(i))
        return
    if compressor.draws:
        fill_keys(rows, lambda i: compressor.drawing_key(key_of(i)))
    kernels.encode(rows, like)
    if compressor.coding is not None and kernels.shorten is not None:
        kernels.shorten(rows)


def fill_keys(rows: Rows, key_of: Callable[[int], Key]) -> None:
    """Fill KEY; `key_of` a row is what its random numbers depend on."""
    rows.view(np.uint32).reshape(len(rows), -1)[:, 2 * table.KEY : 2 * table.KEY + 2] = [
        key_of(i).words() for i in range(len(rows))
    ]


def _encode_row(compressor: Compressor, row: Rows, like: Array, key: Key) -> None:
    numel = row[NUMEL]
    x = array_at(row[X], numel, like.dtype)
    gradient, residual = (x, None) if not row[GRADIENT] else (array_at(row[GRADIENT], numel, like.dtype), x)
    payload = bytes_at(row[PAYLOAD], row[ROOM])
    row[USED] = compressor.encode_into(gradient, residual, payload, int(row[table.GROUP]), key)


def check(compressor: Compressor, rows: Rows) -> int:
    """Check payloads that have come, and fill FLAGS; returns the number of the first that is damaged, or -1."""
    coded = -1 if compressor.coded_codec is None else compressor.coded_codec
    return int(table.check(rows, compressor.codec, coded))


def decode(compressor: Compressor, kernels: Kernels | None, rows: Rows, like: Array, scale: float = 1.0) -> int:
    """Decode payloads that are checked into X; returns the number of one whose body is damaged, or -1."""
    if kernels is not None:
        is_coded = kernels.decode_coded is not None and np.bitwise_or.reduce(rows[:, FLAGS]) & table.CODED
        run = kernels.decode_coded if is_coded and kernels.decode_coded is not None else kernels.decode
        return int(run(rows, like, np.float32(scale)))
    # in the order of the rows: sums depend on it
    for i, of_tensor in enumerate(rows):
        out = array_at(of_tensor[X], of_tensor[NUMEL], like.dtype)
        payload = bytes_at(of_tensor[PAYLOAD], of_tensor[ROOM])
        try:
            compressor.decode_into(payload, out, scale, bool(of_tensor[ADD]))
        except WireError:
            return i
    return -1


def take_back(compressor: Compressor, kernels: Kernels | None, rows: Rows, like: Array) -> None:
    """Restore residuals, X, to what they were before `encode` made the payloads, see `Compressor.take_back`.

    GRADIENT is 0 where the gradient is lost; it then remains part of the residual.
    """
    rows = rows[rows[:, USED] > 0]
    rows[:, ROOM], rows[:, ADD] = rows[:, USED], 1
    check(compressor, rows)
    # what is not finite was taken back by the encoder
    rows = rows[rows[:, FLAGS] & (table.NONFINITE | table.ABSENT) == 0]
    if len(rows):
        decode(compressor, kernels, rows, like)
        table.take_all_back(rows, like)


def explain(compressor: Compressor, row: Rows, like: Array) -> WireError:
    """Return the error that says what is wrong with a payload that `check` or `decode` has refused."""
    payload = bytes_at(row[PAYLOAD], row[ROOM])
    try:
        header, body = wire.open_payload(payload)
        if header.codec not in (compressor.codec, compressor.coded_codec) or header.numel != row[NUMEL]:
            return WireError(
                f"payload of codec {header.codec} and {header.numel} elements, expected codec {compressor.codec} and "
                f"{row[NUMEL]} elements"
            )
        compressor.decode_opened(header, body, np.zeros(header.numel, like.dtype))
    except WireError as error:
        return error
    return WireError(f"payload of {compressor.id}: its header and its body do not fit together")


def array_at(address: int, numel: int, dtype: npt.DTypeLike) -> Array:
    """Return the flat array that begins at an address; whoever made the address keeps its memory."""
    dtype = np.dtype(dtype)
    return bytes_at(address, int(numel) * dtype.itemsize).view(dtype)


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return the memory that begins at an address."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * int(nbytes)).from_address(int(address)), np.uint8)
