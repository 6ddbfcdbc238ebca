"""Exchanges whose arrays lie on a device: the same stages, and the same sums, as on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hvd_compress import Blockwise, ChunkedTopK, Natural, OneBit, RandomK, SignSGD, TernGrad, Threshold
from hvd_compress._torch.device import DeviceMemory, _joined
from hvd_compress.compressors import Compressor
from hvd_compress.errors import WireError
from hvd_compress.exchange import Account, Bucket, Pack, plan_together
from hvd_compress.kernels.cuda import onebit
from hvd_compress.memory import HOST, Memory
from tests.device import DEVICE, ON_GPU, on_device
from tests.stages import allgather, alltoall
from tests.streams import LateStreams
from tests.thorough import shown_by

# fewer where Triton's interpreter takes its time for each of them
SHAPES = {"w": (4, 600), "b": (1100,), "v": (2, 513)} if ON_GPU else {"w": (4, 150), "b": (275,), "v": (2, 129)}
COMPRESSORS = [OneBit(), OneBit(error_feedback=False), Threshold(0.5)]
COMPRESSORS += [SignSGD(), SignSGD(scale=0.5, error_feedback=True), Natural(), TernGrad(clip=None)]
COMPRESSORS += [Blockwise(bits=4, block=64, hadamard=True), ChunkedTopK(0.05, 256), RandomK(0.1)]


def memory() -> Memory:
    return DeviceMemory(torch.device(DEVICE, 0) if ON_GPU else torch.device("cpu"), None if ON_GPU else LateStreams())


def buckets(compressor: Compressor, exchange: str, ranks: int, where: Memory, small: bool = True) -> list[Bucket]:
    together: dict[str, Any] = {name: (shape, compressor) for name, shape in SHAPES.items()}
    members = {"s": (7,), "t": (3, 5)} if small else {}
    if small:
        together["pack"] = (Pack.shape_of(members), Pack.compressor)
    plans = plan_together(exchange, together, ranks)
    made = []
    for rank in range(ranks):
        accounts = {n: Account(n, plans[n], compressor, rank, memory=where) for n in SHAPES}
        pack = Pack("pack", members, plans["pack"], rank, memory=where) if small else None
        made.append(Bucket(accounts, pack))
    return made


def gradients(rng: np.random.Generator, kind: str = "float32") -> dict[str, np.ndarray[Any, Any]]:
    values = {n: rng.standard_normal(s).astype(np.float32).reshape(-1) for n, s in SHAPES.items()}
    values |= {"s": rng.standard_normal(7).astype(np.float32), "t": rng.standard_normal(15).astype(np.float32)}
    return values


def exchanged(made: list[Bucket], given: list[dict[str, Any]]) -> bool:
    """Give gradients to the buckets of all ranks, and run the collectives; returns whether all is finite."""
    for bucket, of_rank in zip(made, given, strict=True):
        small = {n: g for n, g in of_rank.items() if bucket.pack is not None and n not in SHAPES}
        done = [bucket.give(n, g) for n, g in of_rank.items() if n in SHAPES]
        done.append(bucket.give_small(small) if small else False)
        assert done.count(True) == 1
    for collective in made[0].collectives[:-1]:
        assert collective == "alltoall"
        for bucket, received in zip(made, alltoall([bucket.parcel() for bucket in made]), strict=True):
            bucket.proceed(collective, received)
    received = allgather([bucket.parcel() for bucket in made])
    finite = [bucket.arrive(received.copy()) for bucket in made]
    assert len(set(finite)) == 1
    return finite[0]


def held(bucket: Bucket) -> dict[str, np.ndarray[Any, Any]]:
    """Return the residuals of all tensors, on the host."""
    found = {}
    for account in bucket.accounts.values():
        for kind in ("residual", "owner_residual"):
            array = getattr(account, kind)
            if array is not None:
                found[account.name, kind] = np.array(account.memory.to_host(array))
    return found


def to_host(array: Any) -> np.ndarray[Any, Any]:
    if ON_GPU:
        # what an edge does by letting its stream wait
        torch.cuda.synchronize()
    return array.float().cpu().numpy() if isinstance(array, torch.Tensor) else array


@pytest.mark.parametrize(
    ("ranks", "compressor", "exchange"),
    [
        (ranks, c, e)
        for ranks in (2, 1, 3)
        for c in COMPRESSORS
        for e in ("two_phase", "allgather")
        # votes need an owner; how many ranks there are is nothing to most compressors
        if (e == "two_phase" or not c.votes) and (ranks == 2 or ON_GPU or isinstance(c, OneBit | Threshold | SignSGD))
    ],
    ids=repr,
)
def test_steps_are_those_of_the_host(compressor: Compressor, ranks: int, exchange: str) -> None:
    rng = np.random.default_rng(0)
    here, there = buckets(compressor, exchange, ranks, HOST), buckets(compressor, exchange, ranks, memory())
    for _ in range(2):
        values = [gradients(rng) for _ in range(ranks)]
        on_host = [{n: v.copy() for n, v in of.items()} for of in values]
        on_there = [{n: on_device(v) for n, v in of.items()} for of in values]
        assert exchanged(here, on_host)
        assert exchanged(there, on_there)
        results = [b.finish(True, 1 / ranks) for b in here], [b.finish(True, 1 / ranks) for b in there]
        for rank in range(ranks):
            for name in SHAPES:
                one, other = to_host(results[0][rank][name]), to_host(results[1][rank][name])
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
                assert np.array_equal(other, to_host(results[1][0][name])), "replicas"
            np.testing.assert_array_equal(to_host(there[rank].pack.buffer), here[rank].pack.buffer)
            assert held(here[rank]).keys() == held(there[rank]).keys()
            for key, residual in held(here[rank]).items():
                np.testing.assert_allclose(held(there[rank])[key], residual, atol=2e-6)


# each kernel tells of bad numbers in its own test; the bucket has residuals, none, or draws
@pytest.mark.parametrize(
    "compressor", shown_by(lambda c: isinstance(c, OneBit | Natural), [(c,) for c in COMPRESSORS]), ids=repr
)
def test_a_bad_number_is_nan_everywhere_and_residuals_are_what_they_were(compressor: Compressor) -> None:
    rng = np.random.default_rng(1)
    there = buckets(compressor, "two_phase", 2, memory())
    for bad in (None, "w", "s"):
        before = [held(bucket) for bucket in there]
        given = [{n: on_device(v) for n, v in gradients(rng).items()} for _ in there]
        if bad is not None:
            given[1][bad][3] = float("inf")
        finite = exchanged(there, given)
        assert finite == (bad is None)
        results = [b.finish(finite, 0.5) for b in there]
        if bad is not None:
            for bucket, old in zip(there, before, strict=True):
                for key, residual in held(bucket).items():
                    np.testing.assert_allclose(residual, old[key], atol=4e-6)
        if bad == "w":
            assert all(np.isnan(to_host(result["w"])).any() for result in results)


def test_damage_is_told_before_anything_is_final() -> None:
    rng = np.random.default_rng(2)
    there = buckets(OneBit(), "two_phase", 2, memory())
    given = [{n: on_device(v) for n, v in gradients(rng).items()} for _ in there]
    for bucket, of_rank in zip(there, given, strict=True):
        for n in SHAPES:
            bucket.give(n, of_rank[n])
        bucket.give_small({n: of_rank[n] for n in ("s", "t")})
    message = alltoall([bucket.parcel() for bucket in there])[0]
    message[100] ^= 4
    there[0].proceed("alltoall", message)
    with pytest.raises(WireError, match=r"'w'.*checksum"):
        there[0].parcel()
    for bucket in there:
        bucket.abandon()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_gradients_of_16_bits_are_read_and_written_as_they_are(kind: str) -> None:
    rng = np.random.default_rng(3)
    here, there = buckets(OneBit(), "two_phase", 2, HOST), buckets(OneBit(), "two_phase", 2, memory())
    for _ in range(2):
        values = [gradients(rng) for _ in range(2)]
        on_there = [{n: on_device(v, kind if n in SHAPES else "float32") for n, v in of.items()} for of in values]
        on_host = [{n: to_host(v).copy() for n, v in of.items()} for of in on_there]
        assert exchanged(here, on_host)
        assert exchanged(there, on_there)
        results = [b.finish(True, 0.5) for b in here], [b.finish(True, 0.5) for b in there]
        for name in SHAPES:
            rounded = to_host(on_device(results[0][0][name], kind))
            np.testing.assert_allclose(to_host(results[1][0][name]), rounded, rtol=2e-2 if kind == "bfloat16" else 2e-3)
            assert np.array_equal(to_host(results[1][0][name]), to_host(results[1][1][name]))


def test_ranks_of_both_kinds_of_memory_understand_each_other() -> None:
    rng = np.random.default_rng(4)
    one, other = buckets(OneBit(), "two_phase", 2, HOST)[0], buckets(OneBit(), "two_phase", 2, memory())[1]
    for _ in range(2):
        values = [gradients(rng) for _ in range(2)]
        given: list[Mapping[str, Any]] = [values[0], {n: on_device(v) for n, v in values[1].items()}]
        assert exchanged([one, other], given)
        results = one.finish(True, 0.5), other.finish(True, 0.5)
        for name in SHAPES:
            assert np.array_equal(to_host(results[0][name]).view(np.int32), to_host(results[1][name]).view(np.int32))


def test_a_tensor_that_is_left_out_is_said_to_be_absent() -> None:
    rng = np.random.default_rng(5)
    there = buckets(OneBit(), "two_phase", 2, memory())
    given = [{n: on_device(v) for n, v in gradients(rng).items()} | {"b": None} for _ in there]
    assert exchanged(there, given)
    results = [b.finish(True, 0.5) for b in there]
    assert results[0]["b"] is None
    assert np.array_equal(to_host(results[0]["w"]), to_host(results[1]["w"]))


def test_a_step_that_is_abandoned_leaves_residuals_as_they_were() -> None:
    rng = np.random.default_rng(6)
    there = buckets(OneBit(), "two_phase", 2, memory())
    given = [{n: on_device(v) for n, v in gradients(rng).items()} for _ in there]
    exchanged(there, given)
    for bucket in there:
        bucket.finish(True, 0.5)
    before = [held(bucket) for bucket in there]
    exchanged(there, [{n: on_device(v) for n, v in gradients(rng).items()} for _ in there])
    for bucket, old in zip(there, before, strict=True):
        bucket.abandon()
        for key, residual in held(bucket).items():
            np.testing.assert_allclose(residual, old[key], atol=4e-6)


def test_what_could_not_be_encoded_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    bucket = buckets(OneBit(), "allgather", 1, memory(), small=False)[0]
    exchanged([bucket], [{n: on_device(v) for n, v in gradients(rng).items() if n in SHAPES}])
    bucket.finish(True, 1.0)
    before = held(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(onebit, "start", mock.Mock(side_effect=MemoryError("no memory on the device")))
        given = [(n, on_device(v)) for n, v in gradients(rng).items() if n in SHAPES]
        *first, last = given
        for name, gradient in first:
            bucket.give(name, gradient)
        with pytest.raises(MemoryError, match="no memory"):
            bucket.give(*last)
    bucket.abandon()
    for key, residual in held(bucket).items():
        assert np.array_equal(residual, before[key])


def test_payloads_that_lie_near_are_copied_together() -> None:
    far = 2**20
    places = np.array([0, 1000, far, far + 5000, 3 * far])
    assert _joined(places, np.array([40, 80, 48, 0, 64])) == [(0, 1080), (far, far + 48), (3 * far, 3 * far + 64)]
    assert _joined(places, np.array([0, 0, 48, 0, 0])) == [(far, far + 48)]
