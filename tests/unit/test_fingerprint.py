from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import Any

import pytest

import hvd_compress
from hvd_compress import fingerprint, wire
from hvd_compress.errors import MismatchError
from hvd_compress.fingerprint import DIGEST_BYTES, agree, check_agreement, digest, serialize, versions


def test_equal_descriptions_agree_whatever_the_order_of_their_keys() -> None:
    a = serialize({"op": "Average", "min_numel": 7})
    b = serialize({"min_numel": 7, "op": "Average"})
    assert a == b
    check_agreement([a, b, a])


def test_digests_have_a_fixed_size_and_differ() -> None:
    a, b = (digest(serialize({"min_numel": n})) for n in (7, 8))
    assert len(a) == len(b) == DIGEST_BYTES
    assert a != b


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"op": "Average"}, {"op": "Sum"}, "op: rank 0 has 'Average', rank 1 has 'Sum'"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c: rank 0 has 1, rank 1 has 2"),
        ({"p": ["x", "y"]}, {"p": ["x", "z"]}, "p[1]: rank 0 has 'y', rank 1 has 'z'"),
        ({"p": [["w", [2, 3]]]}, {"p": [["w", [2, 4]]]}, "p[0][1][1]: rank 0 has 3, rank 1 has 4"),
        ({"p": ["x"]}, {"p": ["x", "y"]}, "the number of p: rank 0 has 1, rank 1 has 2"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: rank 0 has None, rank 1 has 2"),
        ({"c": {"a": 1, "id": "x"}}, {"c": {"b": 1, "id": "y"}}, "c.id: rank 0 has 'x', rank 1 has 'y'"),
        ({"a": {"b": 1}}, {"a": "fp16"}, "a: rank 0 has {'b': 1}, rank 1 has 'fp16'"),
    ],
)
def test_the_first_difference_is_named(first: dict, second: dict, said: str) -> None:
    with pytest.raises(MismatchError) as error:
        check_agreement([serialize(first), serialize(second)])
    assert f"the ranks disagree on {said}." in str(error.value)


def test_the_rank_that_differs_is_named() -> None:
    descriptions = [serialize({"a": 1}), serialize({"a": 1}), serialize({"a": 3}), serialize({"a": 4})]
    with pytest.raises(MismatchError, match="rank 0 has 1, rank 2 has 3"):
        check_agreement(descriptions)


def test_a_mismatch_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        check_agreement([serialize({"a": 1}), serialize({"a": 2})])


def agreed(descriptions: list[dict[str, Any]], of_version: list[dict[str, Any]], monkeypatch: Any) -> list[str]:
    """What each rank is told when all compare, each of a release of its own; an allgather is a list in one process."""
    ranks = len(descriptions)
    barrier, given, here = Barrier(ranks, timeout=20), [b""] * ranks, local()
    monkeypatch.setattr(fingerprint, "versions", lambda: of_version[here.rank])

    def of_rank(rank: int) -> str:
        def allgather(data: bytes, name: str) -> bytes:
            given[rank] = data
            barrier.wait()
            joined = b"".join(given)
            barrier.wait()
            return joined

        here.rank = rank
        try:
            agree(descriptions[rank], allgather, "test")
        except MismatchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks)))


@pytest.mark.parametrize("key", ["package version", "wire version"])
def test_another_release_is_told_first_and_on_all_ranks(key: str, monkeypatch: Any) -> None:
    """Whatever else is different: it may follow from the release."""
    other = {**versions(), key: "0.0.1"}
    settings = [{"compression": "a"}, {"compression": "b", "id": "x"}, {"compression": "a"}]
    told = agreed(settings, [versions(), other, versions()], monkeypatch)
    assert len(set(told)) == 1
    assert f"disagree on {key}: rank 0 has {versions()[key]!r}, rank 1 has '0.0.1'" in told[0]
    assert "Install the same release of hvd_compress wherever ranks run" in told[0]


def test_versions_are_those_of_this_package() -> None:
    assert versions() == {"package version": hvd_compress.__version__, "wire version": wire.VERSION}
