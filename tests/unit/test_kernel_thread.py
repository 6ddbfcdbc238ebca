"""The thread of the kernels: order, failures, and when there is one."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest

from hvd_compress.engine import KernelThread, has_cores


@pytest.mark.parametrize("threaded", [True, False])
def test_calls_run_in_their_order(threaded: bool) -> None:
    worker, seen = KernelThread(threaded), []
    for number in range(200):
        worker.run(seen.append, number)
    worker.drain()
    assert seen == list(range(200))


def test_a_thread_runs_while_others_go_on() -> None:
    worker, go_on, seen = KernelThread(threaded=True), threading.Event(), []
    worker.run(go_on.wait)
    worker.run(lambda: seen.append(threading.current_thread().name))
    assert not seen
    go_on.set()
    worker.drain()
    assert seen[0].startswith("hvd_compress")


def test_two_workers_share_a_thread() -> None:
    names = []
    for worker in (KernelThread(threaded=True), KernelThread(threaded=True)):
        worker.run(lambda: names.append(threading.get_ident()))
        worker.drain()
    assert names[0] == names[1] != threading.get_ident()


def fail(what: str) -> None:
    raise ValueError(what)


def test_what_failed_first_is_raised_when_all_have_ended() -> None:
    worker, seen = KernelThread(threaded=True), []
    for call in (partial(fail, "first"), partial(time.sleep, 0.02), partial(fail, "second"), partial(seen.append, 1)):
        worker.run(call)
    with pytest.raises(ValueError, match="first"):
        worker.drain()
    assert seen == [1]
    worker.drain()  # it was told


def test_forgetting_waits_and_tells_nothing() -> None:
    worker, seen = KernelThread(threaded=True), []
    worker.run(partial(fail, "told to nobody"))
    worker.run(lambda: (time.sleep(0.02), seen.append(1))[0])  # type: ignore[func-returns-value]
    worker.forget()
    assert seen == [1]
    worker.drain()


def test_without_a_thread_a_call_raises_itself() -> None:
    with pytest.raises(ValueError, match="at once"):
        KernelThread(threaded=False).run(partial(fail, "at once"))


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(2, 1, True), (2, 2, False), (16, 8, True), (16, 9, False)])
def test_cores_decide(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, expected: bool) -> None:
    monkeypatch.delenv("HVD_COMPRESS_KERNEL_THREAD", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert has_cores(ranks) == expected


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("HVD_COMPRESS_KERNEL_THREAD", said)
        assert has_cores(1) == has_cores(10**6) == expected
    monkeypatch.setenv("HVD_COMPRESS_KERNEL_THREAD", "yes")
    with pytest.raises(ValueError, match=r"HVD_COMPRESS_KERNEL_THREAD='yes': must be 1 .* or 0"):
        has_cores(1)
