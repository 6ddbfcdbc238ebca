"""What the command line does with real ranks; runs on torch here, and on TensorFlow in `cli_tensorflow`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from typing import Any
from unittest import mock

import numpy as np

from hvd_compress import FP16, Adaptive, NoCompression, OneBit
from hvd_compress.cli import check, main
from hvd_compress.cli.ranks import is_launched, launched, ranks_of
from hvd_compress.compressors import Compressor
from hvd_compress.cost import COLLECTIVES, measure, measure_link
from hvd_compress.ranks import Ranks
from tests.parallel.cases import Cases


def cases_of(framework: str) -> Cases:
    """The cases that both frameworks must pass."""
    cases = Cases()

    @cases.add
    def the_launcher_told_who_is_who() -> None:
        opened = ranks_of(framework)
        assert is_launched()
        assert opened.ranks.position == launched("rank")
        assert opened.per_host == launched("local size") == opened.ranks.size

    @cases.add
    def every_collective_that_is_measured_runs_again_and_again() -> None:
        ranks = ranks_of(framework).ranks
        for collective in COLLECTIVES:
            seconds = measure._seconds(ranks, measure._prepared(ranks, collective, 16 * ranks.size), 2)
            assert len(seconds) == 2

    return cases


cases = cases_of("torch")


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that all ranks run."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(arguments)
    return code, output.getvalue()


@cases.add_thorough
def a_measured_link_is_the_same_on_all_ranks() -> None:
    ranks = ranks_of("torch").ranks
    link = measure_link(ranks)
    numbers = [value for line in link.get_config().values() for value in line.values()]
    assert ranks.maximum(numbers) == numbers
    assert ranks.maximum([-n for n in numbers]) == [-n for n in numbers]


@cases.add_thorough
def advise_measures_and_speaks_once() -> None:
    code, output = command("advise", "--shapes", "512x512,512", "--measure", "--trial-seconds", "1")
    assert code == 0
    if launched("rank"):
        assert output == ""
        return
    first, link, _, dense, *rows, sentence = output.splitlines()
    size = os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"]
    assert first == f"2 tensors, 262,656 elements, {size} ranks, {size} on each host"
    assert "measured just now" in link
    assert float(re.findall(r"([\d.]+) ms", dense)[0]) > 0
    assert len(rows) == 11
    # a trial has hundreds of steps, which take a millisecond at least (Horovod looks that often): twelve take longer
    assert {row.split()[-1] for row in (dense, *rows)} == {"tried", "predicted"}
    assert sentence.startswith(("Use compression=", "Don't compress"))


@cases.add_thorough
def advise_as_json_is_that_of_rank_0_alone() -> None:
    code, output = command("advise", "--shapes", "512x512,512", "--measure", "--trial-seconds", "0", "--json")
    assert code == 0
    if launched("rank"):
        assert output == ""
        return
    found = json.loads(output)
    assert (found["tensors"], found["link"], len(found["rows"])) == (2, "measured", 12)
    assert found["advice"].startswith(("Use compression=", "Don't compress"))


@cases.add
def ranks_with_other_shapes_are_told_so_before_they_try_them() -> None:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code, output = command("advise", "--shapes", f"512x{512 + launched('rank')}", "--measure")
    assert (code, output) == (2, "")
    assert "different shapes" in errors.getvalue()


@cases.add
def a_trial_is_a_step_with_its_exchange() -> None:
    from hvd_compress.cli import rehearse  # of torch, which `cli_tensorflow` does without

    ranks = ranks_of("torch").ranks
    shapes = [(300, 200), (300,), ()]
    # more blocks would tell the same
    with mock.patch.multiple(rehearse, _LEAST_BLOCKS=1, _MOST_BLOCKS=1):
        rehearsal = rehearse.Rehearsal(ranks, shapes, step=0.02)
        for compressor, exchange in ((NoCompression(), "dense"), (FP16(), "dense"), (Adaptive(), "two_phase")):
            seconds = rehearsal.seconds(compressor, exchange)
            # of its step, and of one collective at least, each of which Horovod looks for once in a millisecond
            assert 0.02 <= seconds < 1.0
            assert ranks.maximum([seconds, -seconds]) == [seconds, -seconds]


@cases.add
def one_disturbed_trial_of_three_decides_nothing() -> None:
    from hvd_compress.cli import rehearse

    rehearsal = rehearse.Rehearsal(ranks_of("torch").ranks, [(300,)], step=0.0)
    state = {"disturbance": 0.0, "block": 0}

    def block(step: Any, steps: int) -> float:
        # every other one is without communication
        state["block"] += 1
        return state["disturbance"] * (state["block"] % 2)

    def trial(compressor: Compressor, disturbance: float) -> float:
        state["disturbance"] = disturbance
        return rehearsal.seconds(compressor, "dense")

    rehearsal._block = block  # type: ignore[method-assign]
    # how many blocks a trial has depends on the time that a step takes here
    with mock.patch.multiple(rehearse, _LEAST_BLOCKS=4, _MOST_BLOCKS=4):
        assert [trial(NoCompression(), seconds) for seconds in (0.0, 9.0, 0.0)][-1] == 0.0
        assert not rehearsal.is_certain(NoCompression(), "dense")
        assert trial(FP16(), 5.0) == 5.0
        assert not rehearsal.is_certain(FP16(), "dense"), "one trial"
        assert trial(FP16(), 5.1) == 5.05
        assert rehearsal.is_certain(FP16(), "dense")


@cases.add_thorough
def a_trial_compresses_gradients_of_the_given_shapes() -> None:
    import hvd_compress.torch as hvd
    from hvd_compress.cli.rehearse import Rehearsal

    made: list[Any] = []
    make = hvd.DistributedOptimizer
    hvd.DistributedOptimizer = lambda *given, **settings: made.append(make(*given, **settings)) or made[-1]  # type: ignore[assignment,func-returns-value]
    try:
        Rehearsal(ranks_of("torch").ranks, [(300, 200), (300,)], step=0.0).seconds(OneBit(), "allgather")
    finally:
        hvd.DistributedOptimizer = make
    (optimizer,) = made  # steps without communication have none
    total = optimizer.compression_stats()["total"]
    assert total["steps"] > 10
    assert 60_000 / 8 < total["bytes_sent"] / total["steps"] < 60_000 / 4
    # normal deviates lose with one bit
    assert total["residual_norm"] > 10


@cases.add
def check_tries_the_collectives_of_an_exchange() -> None:
    code, output = command("check")
    assert code == 0, output
    if launched("local rank") == 0:
        assert re.search(r"alltoall +right +ok", output)
        assert re.search(r"allgather +right +ok", output)
        assert "All that is needed is here." in output
    else:
        assert output == ""


@cases.add
def what_one_rank_misses_fails_on_all() -> None:
    run = Ranks.run

    def wrong(self: Ranks, collective: str, *given: Any) -> np.ndarray:
        return run(self, collective, *given) + (collective == "alltoall" and launched("rank") == 1)

    # what is installed was looked at above, in programs of its own
    with mock.patch.object(Ranks, "run", wrong), mock.patch.object(check, "_horovod", return_value=[]):
        code, output = command("check")
    assert code == 1
    assert ("wrong values" in output) == (launched("rank") == 1)
    assert ("Something is missing." in output) == (launched("rank") == 0)
