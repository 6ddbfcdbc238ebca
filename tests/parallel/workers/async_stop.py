"""One worker of an asynchronous parameter server is stopped, ends or fails in the middle, as the argument says."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.mpi import AsyncParameterServer

FRAMEWORK = "mpi"

SERVER, VICTIM = 0, 1
STEPS = 40
WRONG_AT = 10
PATIENCE = 4.0


class UserError(Exception):
    """What a user's code may raise."""


def train(server: AsyncParameterServer, how: str) -> int:
    """The steps of a worker until it has enough, or is told."""
    world = MPI.COMM_WORLD
    step = 0
    while not server.is_over:
        if how == "returns":
            # until the server has seen the victim come back
            if world.Iprobe(SERVER):
                world.recv(source=SERVER)
                break
        elif step == STEPS:
            break
        if how == "raises" and world.rank == VICTIM and step == WRONG_AT:
            raise UserError("the user's own mistake")
        if how == "dies" and world.rank == VICTIM and step == WRONG_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        server.step({"w": np.ones(1000)})
        step += 1
    return step


def main(report: Any, how: str) -> None:
    """Train; the server stops the victim after some updates, and lets it go on when the others have gone on."""
    if how == "stays-open":
        leave_open(report)
        return
    world = MPI.COMM_WORLD
    compile_kernels()
    parameters = {"w": np.zeros(1000)}
    pid = world.bcast(os.getpid(), root=VICTIM)
    updates: list[int] = []

    def update(gradients: dict[str, np.ndarray]) -> None:
        parameters["w"] -= gradients["w"]

    server = AsyncParameterServer(
        parameters, update, staleness=2, patience=600.0 if how in ("raises", "dies") else PATIENCE
    )

    def note(count: int) -> None:
        counters = server.stats()["workers"][VICTIM]
        if count == WRONG_AT and how in ("stays", "returns"):
            os.kill(pid, signal.SIGSTOP)
        if how == "returns" and counters["given_up"] and not updates:
            updates.append(count)
            os.kill(pid, signal.SIGCONT)
        if how == "returns" and counters["returned"] and len(updates) == 1:
            updates.append(counters["applied"])
        if how == "returns" and len(updates) == 2 and counters["applied"] == updates[1] + 5:
            updates.append(count)
            for rank in range(1, world.size):
                world.send("enough", rank)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps = server.serve(note) if server.is_server else train(server, how)
    stats = server.stats()
    if server.is_server and how == "stays":
        report(left=[rank for rank, w in stats["workers"].items() if w["clock"] < STEPS])
        os.kill(pid, signal.SIGCONT)
    server.close()
    if how in ("stays", "returns"):
        texts = [str(w.message) for w in told if issubclass(w.category, RuntimeWarning)]
        report(told=texts, steps=steps, over=server.is_over, value=float(parameters["w"][0]), stats=stats)


def leave_open(report: Any) -> None:
    """Two servers on two ranks, which workers close at exit only."""
    world = MPI.COMM_WORLD
    values = [{"w": np.zeros(8)} for _ in range(2)]

    def update_of(parameters: dict[str, np.ndarray]) -> Any:
        def update(gradients: dict[str, np.ndarray]) -> None:
            parameters["w"] -= gradients["w"]

        return update

    # no worker is held back by one that serves elsewhere still
    first, second = (
        AsyncParameterServer(v, update_of(v), staleness=10, server=place) for place, v in enumerate(values)
    )
    for server, parameters in ((first, values[0]), (second, values[1])):
        if not server.is_server:
            for _ in range(5):
                server.step({"w": np.ones(8)})
        if world.rank < 2:
            # who serves the other one must finish with this one first, all others need not
            if server.is_server:
                server.serve()
            else:
                server.close()
            report(updates=server.version if server.is_server else None, value=float(parameters["w"][0]))


def compile_kernels() -> None:
    """Make some steps before anybody's patience counts."""
    parameters = {"w": np.zeros(1000)}
    with AsyncParameterServer(parameters, lambda gradients: None) as server:
        if server.is_server:
            server.serve()
            return
        for _ in range(3):
            server.step(parameters)
