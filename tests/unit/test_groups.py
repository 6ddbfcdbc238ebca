from __future__ import annotations

import pytest

from hvd_compress import QSGD, Adaptive, OneBit
from hvd_compress.compressors.groups import LEAST_ROW_GROUP, group_numel


@pytest.mark.parametrize(
    ("shape", "group", "most", "expected"),
    [
        # a row is what one index of the first dimension selects
        ((1000, 784), "row", 65536, 784),
        ((64, 32, 5, 5), "row", 65536, 800),
        ((512, 512), "row", 65536, 512),
        # short rows are taken together, whole ones
        ((64, 3, 7, 7), "row", 65536, 4 * 147),
        ((4096, 1), "row", 65536, 512),
        ((10, 300), "row", 65536, 600),
        # one dimension is one row; the last group of a tensor may be all of it
        ((5000,), "row", 65536, 5000),
        ((100,), "row", 65536, 100),
        ((3, 100), "row", 65536, 300),
        # rows that 16-bit indices do not reach are divided evenly
        ((100000,), "row", 65536, 50000),
        ((2, 100001), "row", 32768, 25001),
        # others
        ((1000, 784), "tensor", 32768, 784000),
        ((1000, 784), 100, 32768, 100),
        ((50,), 100, 32768, 50),
        ((), "row", 32768, 1),
        ((1,), "tensor", 32768, 1),
        ((0,), "row", 32768, 1),
        ((0, 7), 5, 32768, 1),
    ],
)
def test_group_numel(shape, group, most, expected):
    assert group_numel(shape, group, most) == expected


def test_compressors_use_their_limits():
    assert LEAST_ROW_GROUP == 512
    assert OneBit().group_numel((65536,)) == 65536
    assert OneBit().group_numel((65537,)) == 32769
    assert Adaptive().group_numel((32768,)) == 32768
    assert Adaptive().group_numel((32769,)) == 16385
    assert QSGD(bucket_numel=64).group_numel((3,)) == 64


@pytest.mark.parametrize("n", [1, 511, 512, 513, 32768, 32769, 99991, 3_000_017])
@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_row_groups_stay_within_their_limits(n, rows):
    group = group_numel((rows, n), "row", 32768)
    assert min(rows * n, LEAST_ROW_GROUP) <= group <= 32768
    if 512 <= n <= 32768:
        assert group == n
