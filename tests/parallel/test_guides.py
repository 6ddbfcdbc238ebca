"""Every program that the site shows runs, on as many ranks as its page says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.launch import BIN, LAUNCHERS, ROOT, thorough

EXAMPLES = ROOT / "examples"
# without ranks: seconds
ALONE = ["start/without_ranks.py", "guides/own_compressor.py"]
# the first compiles kernels of all compressors
ALONE_TOO = ["guides/choose.py", "guides/own_exchange.py", "launch/from_python.py"]
# one start of two ranks each
CHEAP = ["guides/training_loop.py"]
OTHERS = [
    "reference/torch_names.py",
    "start/pytorch.py",
    "start/keras_fit.py",
    "start/tensorflow_loop.py",
    "guides/adagrad.py",
    "guides/adam.py",
    "guides/auto.py",
    "guides/compiled.py",
    "guides/counters.py",
    "guides/daso.py",
    "guides/eventgrad.py",
    "guides/freeze_and_grow.py",
    "guides/gpus.py",
    "guides/loss_scaling.py",
    "guides/parameter_server.py",
    "guides/slow_links.py",
    "reference/tensorflow_names.py",
    "reference/keras_names.py hvd_compress.keras",
    "reference/keras_names.py hvd_compress.tensorflow.keras",
]
# ranks that torchrun starts, without Horovod; README has a shorter form of the second
WITHOUT_HOROVOD = ["reference/ddp_names.py", "start/ddp.py", "guides/diloco_ddp.py"]
# what these need or return is checked below with the engines
APART = [
    "guides/async_server.py",
    "guides/checkpoints.py",
    "guides/elastic.py",
    "guides/elastic_ray.py",
    "guides/virtual_cluster.py",
    "launch/on_ray.py",
    "launch/on_spark.py",
    "launch/training.py",
    "reference/mpi_names.py",
]


# guides whose first program stands in the page, and not in a file
WRITTEN_OUT = [
    page.name
    for page in sorted((ROOT / "docs" / "guides").glob("*.md"))
    if "```python\nimport " in page.read_text().partition("{literalinclude}")[0]
]


def run(program: str, *launch: str, path: str = "", limit_seconds: float = 120.0) -> str:
    """Run a program of the examples to its end; returns what it prints."""
    file, *arguments = program.split()
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [path])]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    }
    command = [*launch, sys.executable, str(EXAMPLES / file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    # what is ours is Python, also inside of a tf.function
    assert "AutoGraph could not transform" not in done.stderr, done.stderr[-4000:]
    return done.stdout


def test_every_program_is_run_by_a_test() -> None:
    folders = ("start", "guides", "reference", "launch")
    found = {str(f.relative_to(EXAMPLES)) for folder in folders for f in (EXAMPLES / folder).glob("*.py")}
    under_torchrun = {*WITHOUT_HOROVOD}
    assert found == {program.split()[0] for program in (*ALONE, *ALONE_TOO, *CHEAP, *OTHERS, *APART)} | under_torchrun


@pytest.mark.parametrize("program", [*ALONE, *map(thorough, ALONE_TOO)])
def test_a_program_without_a_launcher(program: str) -> None:
    assert run(program)


@pytest.mark.parametrize("program", [*CHEAP, *map(thorough, OTHERS)])
def test_a_program_on_two_ranks(program: str) -> None:
    assert run(program, *LAUNCHERS["gloo"](2))


@pytest.mark.thorough
@pytest.mark.parametrize("program", WITHOUT_HOROVOD)
def test_a_program_under_torchrun(program: str) -> None:
    assert run(program, *LAUNCHERS["torchrun"](2))


@pytest.mark.thorough
@pytest.mark.parametrize("page", WRITTEN_OUT)
def test_a_program_in_a_page(tmp_path: Path, page: str) -> None:
    text = (ROOT / "docs" / "guides" / page).read_text()
    source = "import " + text.partition("```python\nimport ")[2].partition("```")[0]
    launcher = "torchrun" if "torch.distributed" in source else "gloo"
    program = tmp_path / "train.py"
    program.write_text(source)
    run(str(program), *LAUNCHERS[launcher](2))


@pytest.mark.thorough
def test_a_training_whose_ranks_may_come_and_go(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    elastic = ["--min-np", "1", "--max-np", "4", "--host-discovery-script", str(hosts), "--network-interface", "lo"]
    said = run("guides/elastic.py", str(shutil.which("horovodrun", path=str(BIN))), "-np", "2", *elastic)
    assert all(f"rank {rank} of 2: step 60, owes" in said for rank in range(2))
    assert "lost 0.00" in said


@pytest.mark.thorough
def test_a_training_goes_on_with_its_ranks_and_with_others(tmp_path: Path) -> None:
    program = f"guides/checkpoints.py {tmp_path / 'saved'}"
    assert "rank 1 of 2: epochs 0 to 1" in run(program, *LAUNCHERS["gloo"](2))
    assert "rank 1 of 2: epochs 2 to 3" in run(program, *LAUNCHERS["gloo"](2))
    said = run(program, *LAUNCHERS["gloo"](3))
    assert all(f"rank {rank} of 3: epochs 4 to 5" in said for rank in range(3))


@pytest.mark.thorough
def test_workers_and_their_server() -> None:
    assert run("guides/async_server.py", *LAUNCHERS["mpi"](3)).count("is_server") == 3
    assert run("reference/mpi_names.py", *LAUNCHERS["mpi"](3)).count("is_server") == 3


@pytest.mark.thorough
def test_on_virtual_hosts() -> None:
    unavailable = importlib.import_module("cluster").unavailable()
    if unavailable:
        pytest.skip(f"no virtual hosts here: {unavailable}")
    said = run("guides/virtual_cluster.py", path=str(ROOT / "benchmarks"))
    assert all(name in said for name in ("float32", "one-bit", "bytes that each host sent"))


def need(engine: str) -> None:
    """Leave a test out where an engine is not installed."""
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: `make test-engines` makes an environment that has it")


@pytest.mark.parametrize("program", ["launch/on_ray.py", "launch/on_spark.py"])
def test_an_engine_starts_ranks_that_agree(program: str) -> None:
    """In the environment of `make test-engines`; elsewhere these are left out."""
    needed = {"launch/on_ray.py": "ray", "launch/on_spark.py": "pyspark"}[program]
    need(needed)
    if needed == "pyspark" and shutil.which("java") is None:
        pytest.skip("Spark needs a Java on PATH")
    assert "2 ranks agree bit for bit" in run(program, limit_seconds=280)


def test_an_engine_replaces_a_rank_that_dies() -> None:
    """On Ray two of three ranks go on, and the new one begins at their last commit."""
    need("ray")
    said = run("guides/elastic_ray.py", limit_seconds=280)
    assert said.count("ranks lost: 1, which owed") == 3
    assert "ranks lost: 1, which owed 0.00" not in said
    # two made the steps after the commit twice, of which the last may have failed on them; the new one began there
    made = sorted(int(steps) for steps in re.findall(r"of 3: step 60, made (\d+) steps", said))
    assert len(made) == 3
    assert made[0] == 40
    assert {64, 65} >= {*made[1:]}
    assert "3 ranks agree bit for bit" in said
