"""An asynchronous parameter server on NumPy arrays, without Horovod."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hvd_compress import QSGD, NoCompression, OneBit, Policy, TopK
from hvd_compress.errors import MismatchError, UnsupportedError
from hvd_compress.mpi import AsyncParameterServer
from hvd_compress.schedules import BoundedStaleness
from tests.parallel.cases import Cases

FRAMEWORK = "mpi"

cases = Cases()

world = MPI.COMM_WORLD
# of each worker; together they make as many whatever their number
STEPS = 1500 // max(1, world.size - 1)
ROWS, COLUMNS = 400, 24


def problem():
    """A least-squares problem with an exact solution, as two parameters of different types."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(ROWS, COLUMNS))
    solution = random.normal(size=COLUMNS)
    return matrix, matrix @ solution, solution


def gradients_of(parameters, rows, matrix, right):
    x = np.concatenate([parameters["head"].reshape(-1).astype(np.float64), parameters["tail"]])
    gradient = matrix[rows].T @ (matrix[rows] @ x - right[rows]) / len(rows)
    return {"head": gradient[:8].reshape(2, 4), "tail": gradient[8:]}


def begin(rank):
    """Other values on each rank: all must start from those of the server."""
    return {"head": np.full((2, 4), rank, np.float32), "tail": np.full(COLUMNS - 8, -rank, np.float64)}


def sgd(parameters, rate=0.02):
    def update(gradients):
        for name, gradient in gradients.items():
            parameters[name] -= parameters[name].dtype.type(rate) * gradient

    return update


WAYS = {
    "plain": {},
    "lockstep": {"staleness": 0},
    "next-gradient": {"staleness": 1},
    "far": {"staleness": 16},
    "topk": {"compression": TopK(0.25)},
    "qsgd": {"compression": QSGD(bits=8)},
    "both-ways": {"compression": OneBit(group="tensor"), "answer": TopK(0.5)},
    "policy": {"compression": Policy([("head", TopK(0.5))]), "answer": Policy([("tail", TopK(0.5))])},
    "last-serves": {"server": world.size - 1},
}


@cases.each(WAYS)
def all_find_the_known_solution(settings) -> None:
    matrix, right, solution = problem()
    parameters = begin(world.rank)
    place = settings.get("server", 0)
    with AsyncParameterServer(parameters, sgd(parameters), **settings) as server:
        assert server.is_server == (world.rank == place)
        assert (parameters["head"] == place).all()
        if server.is_server:
            server.serve()
        random = np.random.default_rng(world.rank)
        for _ in range(0 if server.is_server else STEPS):
            server.step(gradients_of(parameters, random.integers(ROWS, size=32), matrix, right))
    stats = server.stats()
    found = np.concatenate([parameters["head"].reshape(-1), parameters["tail"]])
    tolerance = 0.05 if "answer" in settings else 2e-3
    # a worker's parameters are those of its last answer, when others may have had some steps to go
    if server.is_server or "staleness" not in settings or settings["staleness"] <= 4:
        np.testing.assert_allclose(found, solution, atol=tolerance)
    if server.is_server:
        workers = world.size - 1
        assert stats["updates"] == server.version == STEPS * workers
        assert sum(stats["staleness"]["histogram"].values()) == STEPS * workers
        assert stats["staleness"]["max"] <= BoundedStaleness(settings.get("staleness", 4)).most_staleness(workers)
        assert set(stats["workers"]) == set(range(world.size)) - {place}
        assert all(w["applied"] == STEPS and w["given_up"] == 0 for w in stats["workers"].values())
        assert stats["bytes_received"] > 0
    else:
        assert stats["steps"] == STEPS
        assert stats["too_stale"] == stats["not_finite"] == 0
        if settings.get("staleness") == 0:
            assert stats["waited_steps"] > 0


@cases.add
def a_slow_worker_holds_the_others_back_by_the_limit_and_no_more() -> None:
    if world.size < 3:
        return
    limit, slow = 3, world.size - 1
    parameters = begin(0)
    fast_ones = world.size - 2
    clocks = []
    with AsyncParameterServer(parameters, sgd(parameters), staleness=limit) as server:

        def note(count):
            clocks.append(list(server._member._server.clocks.clocks))
            if count == limit * fast_ones:
                # if they could not come so far, nobody would ever send this
                world.send("go", slow)

        if server.is_server:
            server.serve(note)
        elif world.rank == slow:
            world.recv(source=0)
        for _ in range(0 if server.is_server else 12):
            server.step({name: np.ones_like(p) for name, p in parameters.items()})
    if server.is_server:
        assert clocks[limit * fast_ones - 1] == [limit] * fast_ones + [0]
        live = [[c for c in row if c < 12] for row in clocks]
        assert all(max(row) - min(row) <= limit for row in live if row)


@cases.add
def gradients_that_are_not_finite_or_left_out_change_nothing() -> None:
    parameters = begin(3)
    with AsyncParameterServer(parameters, sgd(parameters), staleness=0, compression=TopK(0.25)) as server:
        if server.is_server:
            server.serve()
            assert (parameters["head"] == 3).all()
            counters = server.stats()["workers"].values()
            assert all((w["not_finite"], w["applied"]) == (2, 1) for w in counters)
            return
        good = np.ones(COLUMNS - 8)
        server.step({"tail": np.where(np.arange(good.size) == 3, np.nan, good)})
        server.step({"head": np.full((2, 4), np.inf), "tail": good})
        assert server.version == 0
        assert (parameters["tail"] == -3).all()
        server.step({"tail": good})
        # error feedback begins with this one
        kept = server.state_dict()["residuals"]["tail"]["values"]
        assert kept.sum() == pytest.approx(0.75 * good.size)
        assert server.stats()["not_finite"] == 2


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    odd = world.rank == world.size - 1
    shape = {"w": np.zeros(5 if odd else 4)}
    with pytest.raises(MismatchError, match=r"disagree on parameters.*\[4\].*\[5\]|disagree on parameters.*4.*5"):
        AsyncParameterServer(shape, sgd(shape))
    with pytest.raises(MismatchError, match="disagree on staleness"):
        AsyncParameterServer({"w": np.zeros(4)}, print, staleness=1 + odd)
    with pytest.raises(MismatchError, match="disagree on the number of parameters"):
        AsyncParameterServer({"w": np.zeros(4), **({"v": np.zeros(1)} if odd else {})}, print)


@cases.add
def what_cannot_be_is_refused_on_all_ranks() -> None:
    with pytest.raises(ValueError, match=f"must be one of the ranks 0 to {world.size - 1}"):
        AsyncParameterServer({"w": np.zeros(4)}, print, server=world.size)
    with pytest.raises(TypeError, match="rank 0 is the server and was given update=None"):
        AsyncParameterServer({"w": np.zeros(4)}, None if world.rank == 0 else print)
    with pytest.raises(ValueError, match="no parameters"):
        AsyncParameterServer({}, print)
    with pytest.raises(TypeError, match=r"'w': must be a NumPy array of float32 or float64, got one of int64"):
        AsyncParameterServer({"w": np.zeros(4, np.int64)}, print)
    with pytest.raises(TypeError, match="got list"):
        AsyncParameterServer({"w": [0.0]}, print)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="C-contiguous and writeable"):
        AsyncParameterServer({"w": np.zeros((4, 4)).T[:2]}, print)
    alone = world.Split(world.rank)
    with pytest.raises(UnsupportedError, match="with one rank"):
        AsyncParameterServer({"w": np.zeros(4)}, print, comm=alone)


@cases.add
def wrong_gradients_are_refused_by_name() -> None:
    parameters = begin(0)
    with AsyncParameterServer(parameters, sgd(parameters)) as server:
        if server.is_server:
            server.serve()
            return
        with pytest.raises(ValueError, match="'heads', which is no parameter"):
            server.step({"heads": np.zeros((2, 4))})
        with pytest.raises(ValueError, match=r"gradient 'head' has shape \(4, 2\)"):
            server.step({"head": np.zeros((4, 2))})


@cases.add
def two_servers_at_a_time_do_not_mix_their_messages() -> None:
    if world.size < 3:
        return
    one, other = {"w": np.zeros(3)}, {"w": np.zeros(3)}
    first = AsyncParameterServer(one, sgd(one, 1.0), staleness=0, server=0)
    second = AsyncParameterServer(other, sgd(other, 1.0), staleness=0, server=0, answer=NoCompression())
    if first.is_server:
        # the workers finish with the first one before they go on with the second
        first.serve()
        second.serve()
        assert (one["w"] == -2.0 * (world.size - 1)).all()
        assert (other["w"] == -5.0 * (world.size - 1)).all()
    else:
        for _ in range(2):
            first.step({"w": np.ones(3)})
        first.close()
        for _ in range(5):
            second.step({"w": np.ones(3)})
    second.close()
    first.close()


@cases.add
def a_message_of_some_megabytes_arrives_whole() -> None:
    numel = 3_000_000
    parameters = {"w": np.zeros(numel, np.float32)}
    with AsyncParameterServer(parameters, sgd(parameters, 1.0), staleness=2) as server:
        if server.is_server:
            server.serve()
            expected = -3.0 * sum(np.arange(1, world.size)) * np.ones(numel)
            np.testing.assert_allclose(parameters["w"], expected + 0 * np.arange(numel))
            return
        for _ in range(3):
            server.step({"w": np.full(numel, world.rank, np.float32)})
            # whatever has come has come whole
            assert (parameters["w"] == parameters["w"][0]).all()
