"""An asynchronous parameter server in one process: every order of arrival against loops typed from the definition."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import BF16, FP16, QSGD, Adaptive, Auto, NoCompression, OneBit, Policy, TopK
from hvd_compress.async_server import AsyncServerSettings, Server, ServerMember, Worker, queue_connections
from hvd_compress.async_server.message import HEADER_BYTES, Kind, open_message, seal_message
from hvd_compress.errors import HvdCompressError, StateError, UnsupportedError, WireError
from hvd_compress.kernels.checksum import checksum
from hvd_compress.tensors import ParameterSpec

TENSORS = [ParameterSpec("w", (40, 30)), ParameterSpec("b", (40,)), ParameterSpec("v", (3, 5, 7), "float64")]
RATE = 0.1


def start(seed=0, tensors=TENSORS):
    random = np.random.default_rng(seed)
    return [random.normal(size=t.numel).astype(t.dtype) for t in tensors]


def gradients_at(x, worker, number):
    """Of a quadratic that is another one for each worker and step; float operations in one order."""
    target = start([worker, number])
    return [values - t for values, t in zip(x, target, strict=True)]


def updated(x, gradients):
    return [values - values.dtype.type(RATE) * g for values, g in zip(x, gradients, strict=True)]


class Values:
    """Parameters as `async_server.Values`; the server notes what it applies."""

    has_update = True

    def __init__(self, x):
        self.x = x
        self.applied = []

    def arrays(self):
        return self.x

    def take(self, arrays):
        assert all(a is x for a, x in zip(arrays, self.x, strict=True))

    def update(self, gradients):
        self.applied.append([None if g is None else g.copy() for g in gradients])
        for x, g in zip(self.x, gradients, strict=True):
            if g is not None:
                x -= x.dtype.type(RATE) * g


class Simulated:
    """A server and its workers; messages arrive in the order in which `step` is called."""

    def __init__(self, workers, tensors=TENSORS, **asked):
        self.settings = AsyncServerSettings(**{"staleness": 1000, **asked})
        self.now = 0.0
        self.connections = [queue_connections() for _ in range(workers)]
        self.values = Values(start(tensors=tensors))
        self.of_workers = [Values([np.full_like(x, 99) for x in self.values.x]) for _ in range(workers)]
        self.server = Server(
            tensors,
            self.settings,
            self.values,
            [mine for mine, _ in self.connections],
            range(1, workers + 1),
            lambda: self.now,
        )
        self.workers = [
            Worker(
                tensors,
                self.settings,
                values,
                theirs,
                rank,
            )
            for rank, (values, (_, theirs)) in enumerate(zip(self.of_workers, self.connections, strict=True), 1)
        ]
        assert all(worker.poll() for worker in self.workers)

    def step(self, worker, gradients=None, now=0.0):
        """What `ServerMember.step` does, and the server's turn; the answer is left on its way."""
        w = self.workers[worker]
        computed_from = w.version
        if gradients is None:
            gradients = gradients_at(self.of_workers[worker].x, worker, w.number)
        assert w.poll()
        w.send(gradients, computed_from)
        self.now = now
        self.server.turn()
        if self.settings.staleness == 0:
            w.poll()

    def turn(self, now):
        """Listen until then."""
        while self.now < now:
            self.now = min(now, self.now + 0.5)
            self.server.turn()

    def is_ready(self, worker):
        connection = self.workers[worker]._connection
        return not self.workers[worker].is_waiting or bool(connection._incoming)


def oracle(limit, workers, order):
    """Asynchronous SGD with bounded staleness. `held` is what a worker computes with, `given` what it was answered."""
    x = start()
    held, given, clock, waits = [start() for _ in range(workers)], [None] * workers, [0] * workers, [False] * workers
    for choice in order:
        ready = [w for w in range(workers) if not waits[w]]
        w = ready[choice % len(ready)]
        x = updated(x, gradients_at(held[w], w, clock[w]))
        held[w] = given[w] or held[w]
        clock[w], waits[w], given[w] = clock[w] + 1, True, None
        for v in range(workers):
            if waits[v] and clock[v] - min(clock) <= max(0, limit - 1):
                waits[v], given[v] = False, x
                if limit == 0:
                    held[v] = x
    return x, [given[w] or held[w] for w in range(workers)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.tobytes() == b.tobytes(), np.abs(a - b).max()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(0, 2**16), max_size=40))
def test_every_order_of_arrival_is_asynchronous_sgd_bit_for_bit(limit, workers, order):
    run = Simulated(workers, staleness=limit)
    for choice in order:
        ready = [w for w in range(workers) if run.is_ready(w)]
        run.step(ready[choice % len(ready)])
        if limit == 0:
            for worker in run.workers:
                worker.poll()
    expected, of_workers = oracle(limit, workers, order)
    assert_equal(run.values.x, expected)
    for worker, values, x in zip(run.workers, run.of_workers, of_workers, strict=True):
        worker.poll()
        assert_equal(values.x, x)


def test_one_worker_in_lockstep_is_sgd_bit_for_bit():
    run = Simulated(1, staleness=0)
    x = start()
    for number in range(20):
        run.step(0)
        x = updated(x, gradients_at(x, 0, number))
        assert_equal(run.of_workers[0].x, x)
    assert run.server.tally.report(20, [20])["staleness"] == {"mean": 0.0, "max": 0, "histogram": {0: 20}}


def test_staleness_is_counted_in_updates():
    run = Simulated(2, staleness=3)
    for worker in [0, 0, 1, 0]:
        run.step(worker)
    report = run.server.tally.report(run.server.clocks.version, run.server.clocks.clocks)
    # worker 0: at once; beside its own first one; computed after the first answer, beside its own second and that of 1
    assert report["workers"][1]["staleness"]["histogram"] == {0: 1, 1: 1, 2: 1}
    assert report["workers"][2]["staleness"]["histogram"] == {2: 1}
    assert report["staleness"] == {"mean": 1.25, "max": 2, "histogram": {0: 1, 1: 1, 2: 2}}
    assert report["updates"] == 4


LOSSY = [OneBit(), Adaptive(pi=8), TopK(0.05), BF16(), TopK(0.1, coding="golomb")]


@pytest.mark.parametrize("compression", LOSSY, ids=repr)
def test_what_was_applied_and_what_is_owed_are_all_gradients(compression):
    run = Simulated(2, compression=compression)
    total = [np.zeros(t.numel) for t in TENSORS]
    for number in range(12):
        given = gradients_at(run.of_workers[number % 2].x, number % 2, number)
        run.step(number % 2, given)
        total = [a + g for a, g in zip(total, given, strict=True)]
    for i in range(len(TENSORS)):
        applied = np.sum([g[i].astype(np.float64) for g in run.values.applied], axis=0)
        owed = [w.encoder._residuals[i] for w in run.workers]
        assert any(r is not None and r.any() for r in owed) or i == 1
        owed = sum(r.astype(np.float64) for r in owed if r is not None)
        np.testing.assert_allclose(applied + owed, total[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("answer", [*LOSSY, QSGD(bits=4), FP16()], ids=repr)
def test_compressed_answers_leave_nothing_out_for_ever(answer):
    run = Simulated(2, answer=answer)
    for number in range(10):
        run.step(number % 2)
    for copies, worker, values in zip(run.server._answers, run.workers, run.of_workers, strict=True):
        worker.poll()
        for own, x, kept in zip(copies._copies.own, values.x, run.values.x, strict=True):
            # what the server believes that the worker has is what it has
            assert (kept if own is None else own).tobytes() == x.tobytes()
    apart = distance(run)
    # nothing changes any more: the worker comes ever nearer
    for _ in range(150):
        run.step(0, [None] * 3)
        run.workers[0].poll()
    # one-bit moves outliers by a mean only; halves below 6e-8 are rounded to nothing
    assert distance(run) < max((0.05 if answer == OneBit() else 1e-3) * apart, 1e-5)


def distance(run):
    pairs = zip(run.of_workers[0].x, run.values.x, strict=True)
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs)))


def test_a_policy_chooses_by_name_and_messages_are_smaller():
    policy = Policy([("w", TopK(0.01))], default=NoCompression())
    run = Simulated(1, compression=policy, answer=policy)
    run.step(0)
    run.workers[0].poll()
    run.step(0)
    tally = run.workers[0].tally
    # w has 1,200 elements, of which 12 are sent; the others have 40 and 105
    assert tally.bytes_sent < 2 * (HEADER_BYTES + 3 * 48 + 12 * 8 + 4 * 40 + 8 * 105)
    assert tally.dense_bytes_sent == 2 * (HEADER_BYTES + 3 * 40 + 4 * 1200 + 4 * 40 + 8 * 105)
    assert tally.bytes_received < tally.dense_bytes_received


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compression", [*LOSSY, NoCompression(), FP16(), QSGD(bits=4), QSGD(bits=1)], ids=repr)
def test_a_gradient_that_is_not_finite_changes_nothing(compression, bad):
    run = Simulated(1, compression=compression)
    run.step(0)
    run.workers[0].poll()
    before = [x.copy() for x in run.values.x]
    owed = run.workers[0].encoder.state_dict()
    spoilt = start(7)
    spoilt[2][50] = bad
    kept = [g.copy() for g in spoilt]
    run.step(0, spoilt)
    assert run.workers[0].poll()
    assert_equal(spoilt, kept)
    assert_equal(run.values.x, before)
    assert_states_equal(run.workers[0].encoder.state_dict(), owed)
    assert run.workers[0].tally.not_finite == run.server.tally.workers[0].not_finite == 1
    assert run.server.clocks.version == 1
    run.step(0)
    assert run.server.clocks.version == 2


def test_halves_that_overflow_are_not_applied_and_other_residuals_are_as_before():
    run = Simulated(1, compression=Policy([("w", TopK(0.05))], default=FP16()))
    run.step(0)
    run.workers[0].poll()
    owed = run.workers[0].encoder.state_dict()
    large = start(7)
    large[2][3] = 1e5
    run.step(0, large)
    assert run.workers[0].poll()
    assert_states_equal(run.workers[0].encoder.state_dict(), owed)
    assert run.server.tally.workers[0].not_finite == 1
    assert len(run.values.applied) == 1


def assert_states_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        assert found[name]["values"].tobytes() == entry["values"].tobytes(), name


def test_a_tensor_without_gradient_is_left_out_and_its_residual_stays():
    run = Simulated(1, compression=TopK(0.05))
    run.step(0)
    run.workers[0].poll()
    owed = run.workers[0].encoder.state_dict()["w"]["values"]
    before = run.values.x[0].copy()
    given = start(5)
    run.step(0, [None, *given[1:]])
    assert run.values.applied[-1][0] is None
    assert run.values.x[0].tobytes() == before.tobytes()
    assert run.workers[0].encoder.state_dict()["w"]["values"].tobytes() == owed.tobytes()


def given_up():
    """Worker 1 has been silent, and worker 0 has gone on without it."""
    run = Simulated(2, staleness=0, patience=10.0, compression=TopK(0.05))
    run.step(0)
    run.step(1)
    for worker in run.workers:
        assert worker.poll()
    run.step(0)
    assert run.workers[0].is_waiting
    with pytest.warns(RuntimeWarning, match=r"rank 2 has sent no gradient for more than patience=10 seconds"):
        run.turn(11.0)
    assert run.workers[0].poll()
    return run


def test_a_silent_worker_is_given_up_and_its_stale_gradient_is_owed_and_not_lost():
    run = given_up()
    run.step(0, now=12.0)
    assert not run.workers[0].is_waiting
    encoder = run.workers[1].encoder
    owed = [r.copy() for r in encoder._residuals if r is not None]
    given, applied = start(8), len(run.values.applied)
    run.step(1, given, now=13.0)
    assert run.workers[1].poll()
    # two updates since its parameters; in lockstep one of two workers is at most one update late
    assert len(run.values.applied) == applied
    assert run.workers[1].tally.too_stale == 1
    found = [r for r in encoder._residuals if r is not None]
    lossy = [g for g, r in zip(given, encoder._residuals, strict=True) if r is not None]
    for residual, before, gradient in zip(found, owed, lossy, strict=True):
        np.testing.assert_allclose(residual, before + gradient, rtol=1e-6, atol=1e-6)
    # it has the present parameters now, and takes part again
    assert_equal(run.of_workers[1].x, run.values.x)
    run.step(1, now=14.0)
    assert len(run.values.applied) == applied + 1
    assert run.workers[1].is_waiting
    run.step(0, now=15.0)
    assert run.workers[1].poll()
    counters = run.server.tally.report(0, [0, 0])["workers"][2]
    assert (counters["given_up"], counters["returned"], counters["too_stale"]) == (1, 1, 1)


def test_a_silent_worker_does_not_keep_the_server_from_its_end_and_is_told_of_it():
    run = given_up()
    run.workers[0].finish()
    run.turn(12.0)
    assert run.server.is_over
    assert not run.server.is_alone
    run.server.say_farewell()
    applied = len(run.values.applied)
    run.step(1, now=1000.0)
    assert run.workers[1].poll()
    assert run.workers[1].is_over
    assert len(run.values.applied) == applied
    assert_equal(run.of_workers[1].x, run.values.x)
    run.workers[1].finish()
    run.turn(1001.0)
    assert run.server.is_alone


def test_who_sends_while_an_update_takes_long_is_not_silent():
    run = Simulated(2, staleness=1, patience=10.0)
    for worker in range(2):
        run.step(worker)
    for worker in run.workers:
        assert worker.poll()

    def slow(count):
        run.server.on_update = None
        run.now += 100.0
        run.workers[0].send(start(), 0)

    run.server.on_update = slow
    run.workers[1].send(start(), 0)
    # a warning that somebody was given up would be an error
    while run.server.turn():
        pass
    assert all(worker.poll() for worker in run.workers)


def test_a_server_that_stood_still_does_not_take_that_for_its_workers_silence():
    run = Simulated(2, staleness=0, patience=10.0)
    run.step(0)
    # nothing of worker 1 is seen in the first turn after it
    run.now = 100.0
    assert not run.server.turn()
    run.turn(109.0)
    with pytest.warns(RuntimeWarning, match="rank 2 has sent no gradient"):
        run.turn(111.0)


def test_a_worker_that_finishes_while_it_is_held_is_answered_at_once():
    run = Simulated(2, staleness=1)
    run.step(0)
    assert not run.workers[0].poll()
    run.workers[0].finish()
    run.server.turn()
    assert run.workers[0].poll()
    assert_equal(run.of_workers[0].x, run.values.x)
    assert not run.server.is_over


def test_the_layout_of_a_message_is_frozen():
    """As the table in the module has it: a change needs another version."""
    fields = struct.pack("<4sBB2xQQQI", b"hvda", 1, 17, 48, 3, 5, 1)
    words = np.frombuffer(fields + bytes(4), np.uint64)
    message = seal_message(np.zeros(48, np.uint8), 48, Kind.TOO_STALE, 3, 5, 1)
    assert message[:36].tobytes() == fields
    assert message[36:40].view("<u4")[0] == checksum(words, 4)
    numbers = {k.name: int(k) for k in Kind}
    assert numbers == {
        "GRADIENT": 0, "BAD_GRADIENT": 1, "FINISHED": 2,
        "APPLIED": 16, "TOO_STALE": 17, "NOT_FINITE": 18, "OVER": 19, "FAILED": 20,
    }  # fmt: skip


# -- payloads are not trusted ----------------------------------------------------------------------------------------


def messages():
    """A gradient on its way to the server, and the ends of the connection."""
    run = Simulated(1, compression=TopK(0.05))
    mine, theirs = run.connections[0]
    run.workers[0].send(gradients_at(run.values.x, 0, 0), 0)
    return run, mine._incoming, theirs


@pytest.mark.parametrize("at", [0, 4, 5, 8, 16, 24, 32, 36, HEADER_BYTES, HEADER_BYTES + 60, -1])
def test_a_damaged_gradient_is_refused_and_nothing_is_updated(at):
    run, incoming, _ = messages()
    before = [x.copy() for x in run.values.x]
    incoming[0][at] ^= 0x40
    with pytest.raises(WireError, match="message of rank 1 to the server"):
        run.server.turn()
    assert_equal(run.values.x, before)


@pytest.mark.parametrize("nbytes", [0, 8, 39, HEADER_BYTES, HEADER_BYTES + 40, -8])
def test_a_truncated_gradient_is_refused(nbytes):
    run, incoming, _ = messages()
    incoming[0] = incoming[0][:nbytes]
    with pytest.raises(WireError, match="message of rank 1 to the server"):
        run.server.turn()
    assert run.values.applied == []


def forged(run, kind=Kind.GRADIENT, number=1, version=0):
    incoming = run.connections[0][0]._incoming
    message = incoming.pop()
    opened = open_message(message, len(TENSORS))
    incoming.append(seal_message(message, message.size, kind, number, version, len(opened.payloads)))


@pytest.mark.parametrize("what", [{"number": 2}, {"number": 0}, {"version": 1}, {"kind": Kind.APPLIED}])
def test_a_message_that_makes_no_sense_is_refused(what):
    run, _, _ = messages()
    forged(run, **what)
    with pytest.raises(WireError, match=r"was expected|a worker sends no"):
        run.server.turn()


def test_a_gradient_of_another_compressor_is_refused_by_name():
    run = Simulated(1, compression=TopK(0.05))
    other = Simulated(1, compression=OneBit())
    other.workers[0].send(start(), 0)
    run.connections[0][0]._incoming.append(other.connections[0][0]._incoming.pop())
    with pytest.raises(WireError, match=r"message of rank 1 to the server: 'w'"):
        run.server.turn()


@pytest.mark.parametrize("at", [0, 5, 16, 24, HEADER_BYTES + 8, HEADER_BYTES + 60])
def test_a_damaged_answer_is_refused(at):
    run = Simulated(1)
    run.step(0)
    before = [x.copy() for x in run.of_workers[0].x]
    run.connections[0][1]._incoming[0][at] ^= 0x40
    with pytest.raises(WireError, match="rank 1, answer of the server, rank 0"):
        run.workers[0].poll()
    assert_equal(run.of_workers[0].x, before)


# -- ranks that wait ---------------------------------------------------------------------------------------------------


def run_threads(workers, train, serve=lambda member, values: member.serve(), **asked):
    """The server in this thread, workers in others: (values of the server, what `train` returned)."""
    asked = AsyncServerSettings(**asked)
    connections = {rank: queue_connections() for rank in range(1, workers + 1)}
    values = Values(start())
    server = ServerMember(
        TENSORS, asked, values, {rank: mine for rank, (mine, _) in connections.items()}, 0, workers + 1
    )

    def work(rank):
        own = Values(start(1000 + rank))
        member = ServerMember(TENSORS, asked, own, {0: connections[rank][1]}, rank, workers + 1)
        try:
            return train(member, own, rank)
        finally:
            member.close()

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, rank) for rank in connections]
        try:
            serve(server, values)
        finally:
            server.close()
        return values, [future.result(60) for future in futures]


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_members_train_to_the_known_solution(limit):
    target = start(5)

    def train(member, own, rank):
        for _ in range(60):
            given = [x - t for x, t in zip(own.x, target, strict=True)]
            member.step(lambda given=given: given)
        return member.stats()

    values, stats = run_threads(3, train, staleness=limit, compression=TopK(0.5))
    for x, t in zip(values.x, target, strict=True):
        np.testing.assert_allclose(x, t, atol=1e-3)
    assert [s["steps"] for s in stats] == [60] * 3
    assert len(values.applied) == 180


def test_a_slow_worker_holds_the_others_back_by_the_limit_and_no_more():
    limit, ahead, slow_may_go = 3, [], threading.Event()

    def train(member, own, rank):
        if rank == 1:
            slow_may_go.wait(60)
        for number in range(10):
            member.step(lambda: start())
            if rank == 2 and not slow_may_go.is_set():
                ahead.append(number + 1)
                if number + 1 == limit:
                    # the next step waits for the answer to this one, which is held back
                    assert not member._worker.poll()
                    slow_may_go.set()

    run_threads(2, train, staleness=limit)
    assert ahead == [1, 2, 3]


def test_workers_of_a_server_that_fails_are_told_so():
    def train(member, own, rank):
        def train_for_ever():
            while True:
                member.step(lambda: start())

        with pytest.raises(HvdCompressError, match="the parameter server, rank 0, has ended before its workers"):
            train_for_ever()
        member.step(lambda: pytest.fail("a gradient after the end"))
        return "told"

    def serve(member, values):
        def fail(count):
            if count == 5:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            member.serve(fail)

    assert run_threads(2, train, serve)[1] == ["told", "told"]


def test_wrong_calls_are_refused_with_the_remedy():
    def train(member, own, rank):
        with pytest.raises(UnsupportedError, match=r"serve\(\) on rank 1, which is a worker"):
            member.serve()
        member.close()
        with pytest.raises(UnsupportedError, match=r"step\(\) on rank 1 after close\(\)"):
            member.step(lambda: start())

    def serve(member, values):
        with pytest.raises(UnsupportedError, match=r"step\(\) on rank 0, which is the server"):
            member.step(lambda: start())
        member.serve()

    run_threads(1, train, serve)


def test_residuals_are_saved_and_restored_by_rank():
    saved = {}

    def train(member, own, rank):
        for _ in range(5):
            member.step(lambda: start(3))
        saved[rank] = member.state_dict()
        with pytest.raises(StateError, match=r"state of rank 1 of 4 given to rank 1 of 3"):
            member.load_state_dict({**saved[rank], "size": 4, "rank": 1} if rank == 1 else {**saved[rank], "size": 4})

    def resume(member, own, rank):
        member.load_state_dict(saved[rank])
        again = member.state_dict()
        assert_states_equal(again["residuals"], saved[rank]["residuals"])
        assert again["steps"] == 5
        wrong = {**saved[rank], "residuals": {"other": {"shape": [1], "values": np.zeros(1)}}}
        with pytest.raises(StateError, match="'other'"):
            member.load_state_dict(wrong)

    def train_one(member, own, rank):
        return train(member, own, rank) if rank == 1 else None

    run_threads(2, train_one, compression=TopK(0.05))
    saved[2] = {**saved[1], "rank": 2}
    assert saved[1]["residuals"]["w"]["values"].any()
    run_threads(2, resume, compression=TopK(0.05))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"staleness": -1}, ValueError),
        ({"patience": 0}, ValueError),
        ({"server": -1}, ValueError),
        ({"compression": 3}, TypeError),
        ({"answer": Auto()}, TypeError),
    ],
)
def test_settings_out_of_range(asked, error):
    with pytest.raises(error, match=next(iter(asked))):
        AsyncServerSettings(**asked)


def test_an_elastic_run_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match="elastic"):
        AsyncServerSettings()
