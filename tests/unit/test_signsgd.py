from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hvd_compress import AdaGrad, Key, OneBit, ParameterServer, Policy, SignSGD
from hvd_compress.engine.choice import check_settings, exchange_of
from hvd_compress.errors import UnsupportedError, WireError
from hvd_compress.exchange import make_plan, plan_together
from hvd_compress.loopback import Loopback
from tests.arrays import make
from tests.forge import forge

OWNED = ["two_phase", "parameter_server", "auto"]


def arrays_of(ranks: int, numel: int = 3000) -> list[np.ndarray]:
    return [np.random.default_rng([7, rank]).standard_normal(numel).astype(np.float32) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 255, 257, 5000])
def test_signs_times_the_scale_for_every_length(n, dtype):
    x = make("normal", (n,), dtype)
    y = SignSGD(scale=0.125).decode(SignSGD(scale=0.125).encode(x))
    assert (y == np.where(x.astype(np.float64) > 0, 0.125, -0.125)).all()


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("exchange", OWNED)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_majority_vote(exchange, op, ranks):
    """Bernstein et al. 2018, algorithm 1: sign(sum over m of sign(g_m)), here of odd numbers of ranks.

    Peers answer with 1 in one framework, and with 1 / ranks in another.
    """
    arrays = arrays_of(ranks)
    vote = np.sign(np.sum([np.sign(x) for x in arrays], axis=0))
    results = Loopback(ranks, SignSGD(scale=0.5), exchange, op).allreduce(arrays)
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], 0.5 * vote * (ranks if op == "sum" else 1), rtol=1e-6)


@pytest.mark.parametrize("op", ["average", "sum"])
def test_hosts_vote_with_the_signs_of_their_sums(op):
    arrays = arrays_of(6)
    vote = np.sign(sum(np.sign(arrays[i] + arrays[i + 1]) for i in (0, 2, 4)))
    results = Loopback(6, SignSGD(), "hierarchical", op, ranks_per_host=2).allreduce(arrays)
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], vote * (6 if op == "sum" else 1), rtol=1e-6)


def test_ties_are_decided_at_random_and_alike_on_all_ranks():
    x = np.ones(4000, np.float32)
    ranks = Loopback(2, SignSGD(), "two_phase")
    steps = [ranks.allreduce([x, -x]) for _ in range(4)]
    for first, second in steps:
        assert first.tobytes() == second.tobytes()
        assert set(np.unique(first)) == {-1, 1}
        # 6 standard errors of 4000 coins
        assert abs(first.mean()) < 6 / np.sqrt(4000)
    assert len({first.tobytes() for first, _ in steps}) == 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_of_either_sign_push_nowhere(dtype):
    x = np.zeros(64 * 100 + 9, dtype)
    x[::2] = -0.0
    x[5], x[6] = 1, -1
    draws = np.array([SignSGD().decode(SignSGD().encode(x, key=Key(step=step))) for step in range(400)])
    assert (draws[:, 5] == 1).all()
    assert (draws[:, 6] == -1).all()
    assert (np.abs(np.delete(draws, [5, 6], axis=1).mean(axis=0)) < 6 / np.sqrt(400)).all()


def test_denormals_have_their_signs():
    x = np.resize(np.array([1e-45, -1e-45], np.float32), 200)
    assert (SignSGD().decode(SignSGD().encode(x)) == np.sign(x)).all()


def test_signs_of_zeros_depend_on_seed_tensor_step_and_rank():
    x = np.zeros(500, np.float32)
    base = Key(seed=3, name="w", step=5, rank=1, hop=0)
    others = [dataclasses.replace(base, **{f: v}) for f, v in
              (("seed", 4), ("name", "v"), ("step", 6), ("rank", 2), ("hop", 1), ("chunk", 1))]  # fmt: skip
    assert len({SignSGD().encode(x, key=key).tobytes() for key in (base, *others)}) == 7


def test_error_feedback_brings_means_across():
    """With a scale about the magnitude of gradients; over two hops, between which nothing is lost."""
    arrays = [0.1 * x for x in arrays_of(3, 500)]
    ranks = Loopback(3, SignSGD(scale=0.5, error_feedback=True), "two_phase")
    mean = np.mean([ranks.allreduce(arrays)[0] for _ in range(400)], axis=0)
    np.testing.assert_allclose(mean, np.mean(arrays, axis=0), atol=0.02)


def test_an_allgather_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedError, match=r"SignSGD.*AllGather.*two_phase"):
        Loopback(2, SignSGD(), "allgather").allreduce(arrays_of(2))
    with pytest.raises(UnsupportedError, match="decides the vote"):
        Loopback(2, SignSGD(), ParameterServer(answer="dense")).allreduce(arrays_of(2))
    settings = {"min_numel": 0, "bucket_bytes": 0, "averages": True, "gradient_predivide_factor": 1.0}
    rest = {"backward_passes_per_step": 1, "groups": None, "rocm": False}
    for compression in (SignSGD(), "signsgd", Policy([("w", OneBit())], default=SignSGD())):
        with pytest.raises(UnsupportedError, match="decides the vote"):
            check_settings(compression, "allgather", **settings, **rest)
        for exchange in (*OWNED, "hierarchical"):
            check_settings(compression, exchange, **settings, **rest)
        with pytest.raises(UnsupportedError, match="no size that AdaGrad"):
            exchange_of(AdaGrad(), "two_phase", compression)


def test_auto_takes_two_phases_also_for_what_shares_the_bucket():
    shape = (20, 1000)
    assert make_plan("auto", OneBit(), shape, 2).exchange.id == "allgather"
    assert make_plan("auto", SignSGD(), shape, 2).exchange.id == "two_phase"
    plans = plan_together("auto", {"a": (shape, OneBit()), "b": (shape, SignSGD())}, 2)
    assert {plan.exchange.id for plan in plans.values()} == {"two_phase"}


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_is_none_is_refused(scale):
    payload = SignSGD().encode(np.ones(100, np.float32))
    parameter = int(np.float32(scale).view(np.uint32))
    with pytest.raises(WireError, match="signsgd with a scale of"):
        SignSGD().decode(forge(payload, {}, parameter=parameter))


def test_size():
    assert SignSGD().encode(make("normal", (6400,), "float32")).size == 40 + 800
