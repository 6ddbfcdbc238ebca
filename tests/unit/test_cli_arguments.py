"""Arguments that nobody should give: one plain line, exit code 2, no traceback; and what is printed when."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_compress.cli import bench, build_horovod, check, main, ranks
from hvd_compress.cost import Line, Speed

PAPER = ["--bandwidth", "1gbit", "--ranks", "4"]


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


MODELS = """
import sys
class T:
    shape = (None, 3)
class Lazy:
    @property
    def shape(self): raise RuntimeError("uninitialized parameter")
    requires_grad = True
class Empty:
    shape = (0, 3)
class Net:
    def __init__(self, *of): self.trainable_variables = of
class TorchNet:
    def named_parameters(self): yield "w", Lazy()
number = 3
def raises(): raise KeyError("weights")
def ends(): sys.exit("no data here")
def wants(size): return Net()
def unbuilt(): return Net(T)
def lazy(): return TorchNet()
def empty(): return Net(Empty)
def nothing(): return None
"""


def shapes(*text: str) -> list[str]:
    return ["--shapes", *text, *PAPER]


def model(place: str) -> list[str]:
    return ["--model", place, *PAPER]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (shapes("0x5"), "0x5"), (shapes("-1"), "shape '-1'"), (shapes("axb"), "axb"), (shapes(""), "no shape"),
        (shapes(" "), "no shape"), (shapes("4*0"), "4*0"), (shapes("4x4*99999999999"), "at most 10,000 tensors"),
        (shapes("9999999x9999999"), "elements"), (shapes("1" * 10_000), "1111..."), (shapes(), "expected one argument"),
        (["--shapes-file", "gone", *PAPER], "No such file"), (["--shapes-file", "", *PAPER], "shapes file"),
        (["--shapes-file", ".", *PAPER], "directory"), (["--shapes-file", "binary", *PAPER], "not a text"),
        (["--shapes-file", "nul\0", *PAPER], "not a text"), (["--shapes-file", "blank", *PAPER], "no shape"),
        (model(""), "module:function"), (model(":"), "module:function"), (model("models_here"), "module:function"),
        (model("models_here:"), "module:function"), (model("models_here:gone"), "gone"), (model("..:f"), "module:"),
        (model("no_such_module:f"), "no_such_module"), (model("models_broken:f"), "SyntaxError"),
        (model("models_ending:f"), "SystemExit"), (model("models_here:number"), "is int"),
        (model("models_here:raises"), "KeyError: 'weights'"), (model("models_here:ends"), "SystemExit: no data here"),
        (model("models_here:wants"), "size"), (model("models_here:unbuilt"), "no shape yet"),
        (model("models_here:lazy"), "uninitialized parameter"), (model("models_here:empty"), "no trainable tensor"),
        (model("models_here:nothing"), "NoneType"),
        (PAPER, "one of the arguments"), ([*shapes("8"), "--model", "a:b"], "not allowed with"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "0"], "--ranks 0"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "-2"], "--ranks -2"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "1e3"], "whole number"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "nan"], "whole number"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "10001"], "1 to 10000"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "9" * 5000], "--ranks"),
        ([*shapes("8"), "--ranks-per-host", "3"], "multiple"), ([*shapes("8"), "--ranks-per-host", "0"], "multiple"),
        ([*shapes("8"), "--ranks-per-host", "-4"], "multiple"), ([*shapes("8"), "--ranks-per-host", "8"], "multiple"),
        ([*shapes("8"), "--ranks-per-host", "4"], "of one host"),
        (["--shapes", "8", "--bandwidth", "-1gbit", "--ranks", "2"], "bandwidth '-1gbit'"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "2.5"], "'2.5': must be a whole number, such as 4"),
        (["--shapes", "8", "--bandwidth", "1gbit", "--ranks", "two"], "'two': must be a whole number"),
        ([*shapes("8"), "--latency", "-5us"], "time '-5us'"), ([*shapes("8"), "--step-seconds", "-.5"], "0 or more"),
        ([*shapes("8"), "--step-seconds", "10ms"], "'10ms': must be a number of seconds, such as 0.25"),
        ([*shapes("8"), "--trial-seconds", "long"], "'long': must be a number of seconds"),
        (shapes("-1x3"), "shape '-1x3'"), (["--shapes-file", "words", *PAPER], "shapes file 'words': shape 'layer1'"),
        (model("models_framework:f"), "models_framework needs torch_of_tomorrow, which is not installed"),
        (["--shapes", "8", "--bandwidth", "", "--ranks", "2"], "100mbit"),
        (["--shapes", "8", "--bandwidth", "inf", "--ranks", "2"], "100mbit"),
        ([*shapes("8"), "--latency", ""], "50us"), ([*shapes("8"), "--latency", "nan"], "50us"),
        ([*shapes("8"), "--latency", "1e99s"], "hour"), ([*shapes("8"), "--step-seconds", "soon"], "--step-seconds"),
        ([*shapes("8"), "--step-seconds", "nan"], "0 or more"), ([*shapes("8"), "--step-seconds=-0.1"], "0 or more"),
        ([*shapes("8"), "--step-seconds", "1e400"], "--step-seconds"), ([*shapes("8"), "--nonsense"], "--nonsense"),
        ([*shapes("8"), "more"], "more"),
    ],
)  # fmt: skip
def test_one_plain_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "models_here.py").write_text(MODELS)
    (tmp_path / "models_broken.py").write_text("def f(:\n")
    (tmp_path / "models_ending.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "models_framework.py").write_text("import torch_of_tomorrow\ndef f(): pass\n")
    (tmp_path / "words").write_text("layer1 layer2\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "blank").write_text("# nothing\n\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("models_here", "models_broken", "models_ending", "models_framework"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        code = main(["advise", *arguments, "--json"])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert len(printed.err) < 500


@pytest.mark.parametrize(
    ("arguments", "page"),
    [(["check", "x"], "hvd-compress check --help"), (["bench", "--ranks", "2"], "hvd-compress bench --help"),
     (["build-horovod", "torch"], "hvd-compress build-horovod --help"),
     (["build-horovod", "--gpu", "rocm"], "hvd-compress build-horovod --help"),
     (["nonsense"], "hvd-compress --help"), ([], "hvd-compress --help"), (["--nonsense"], "hvd-compress --help")],
)  # fmt: skip
def test_the_other_subcommands_too(arguments: list[str], page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"see {page}")


def test_whoever_ends_it_sees_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", ended)
    assert main(["bench"]) == 130


# -- what is printed when --------------------------------------------------------------------------------------------


def findings(*verdicts: str) -> list[check.Finding]:
    return [check.Finding(f"thing {i}", "found", v, "mend it" if v != check.OK else "") for i, v in enumerate(verdicts)]


@pytest.fixture
def quiet_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_here", lambda: findings(check.OK, check.NOTE))
    monkeypatch.setattr(check, "_horovod", lambda: findings(check.MISSING))
    monkeypatch.setattr(check, "_kernels", list)


@pytest.mark.usefixtures("quiet_check")
def test_check_prints_each_line_as_it_finds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def horovod() -> Iterator[check.Finding]:
        seen.append(capsys.readouterr().out)
        yield from findings(check.OK)
        seen.append(capsys.readouterr().out)

    monkeypatch.setattr(check, "_horovod", horovod)
    assert main(["check"]) == 0
    assert [line.split()[:2] for line in seen[0].splitlines()] == [["what", "found"], ["thing", "0"], ["thing", "1"]]
    assert len(seen[1].splitlines()) == 1


def test_check_does_not_wait_for_a_full_buffer(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom hvd_compress.cli import check, main\n"
        "check._horovod = lambda: (time.sleep(60) for _ in range(1))\nmain(['check'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begin = time.monotonic()
        lines = [process.stdout.readline() for _ in range(3)]
        process.kill()
    assert [line.split()[0] for line in lines] == ["what", "hvd_compress", "numpy"]
    assert time.monotonic() - begin < 55


@pytest.mark.usefixtures("quiet_check")
def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["missing"], found["rank"]) == (True, 0)
    assert [f["verdict"] for f in found["findings"]] == ["ok", "note", "MISSING", "note"]
    fields = {"what", "found", "verdict", "remedy"}
    assert all(f.keys() == fields for f in found["findings"])
    assert all(f'"{name}"' in (check.__doc__ or "") for name in [*found, *fields])


@pytest.mark.usefixtures("quiet_check")
def test_other_ranks_leave_stdout_to_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    for framework in ("torch", "tensorflow"):
        monkeypatch.setitem(sys.modules, f"horovod.{framework}.mpi_ops", None)
    assert main(["check", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "MISSING" in printed.err


def test_what_was_built_without_a_framework_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # horovod.torch prints it and goes on, horovod.tensorflow raises
    text = "Extension horovod.{0} has not been built: mpi_lib.so not found"
    monkeypatch.setattr(check, "_PROBE", f"print('{text}'); import horovod.gone")
    assert check._probe("torch") == "built without it"
    monkeypatch.setattr(check, "_PROBE", f"raise ImportError('{text}\\nreinstall')")
    assert check._probe("tensorflow") == "built without it"


def test_remedies_are_what_a_user_of_the_wheel_has() -> None:
    folder = Path(check.__file__).parent
    for file in folder.glob("*.py"):
        if file.name != "build_horovod.py":
            assert "ci/" not in file.read_text(), file


def test_bench_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "speed_of", lambda _: Speed(Line(0, 1e-9), Line(0, 2e-9), Line(), 0.5))
    monkeypatch.setattr(bench, "copy_speed", lambda: Line(0, 5e-10))
    assert main(["bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["kernels"]) == len(bench._CASES)
    assert found["kernels"][0] == {
        "compressor": "OneBit()",
        "bytes_per_element": 0.5,
        "encode": {"gb_per_second": pytest.approx(4.0), "copies": pytest.approx(2.0)},
        "decode": {"gb_per_second": pytest.approx(2.0), "copies": pytest.approx(4.0)},
        "decode_and_add": {"gb_per_second": None, "copies": None},
    }
    assert all(f'"{name}"' in (bench.__doc__ or "") for name in [*found, *found["kernels"][0], "copies"])


# -- build-horovod ---------------------------------------------------------------------------------------------------


def test_build_horovod_is_the_builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[argparse.Namespace] = []

    def run(options: argparse.Namespace) -> int:
        seen.append(options)
        return 7

    monkeypatch.setattr(build_horovod, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["build-horovod", "--wheel-dir", str(tmp_path / "dist"), "--force"]) == 7
    assert (seen[0].wheel_dir, seen[0].force) == (tmp_path / "dist", True)


def test_the_builder_runs_where_it_was_copied_to(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.py"
    copy.write_bytes(Path(build_horovod.__file__).read_bytes())
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-I", copy, "--help"], capture_output=True, text=True, timeout=60,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--wheel-dir" in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"], ["build-horovod", "--help"]])
def test_what_does_not_build_makes_no_cache_folder(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_whoever_reads_may_stop_reading() -> None:
    command = [sys.executable, "-W", "error", "-c",
               "import sys; from hvd_compress.cli import check, main; check._kernels = check._horovod = list; "
               "sys.stdin.read(); sys.exit(main(['check']))"]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors == ""


@pytest.mark.parametrize(
    ("variables", "is_rank", "size", "local"),
    [
        ({}, False, 1, 0),
        ({"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, True, 4, 1),
        # `srun --pty bash`, and a command that is typed there
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, False, 1, 0),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, True, 2, 1),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True, 1, 0),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, True, 1, 0),
    ],
    ids=["alone", "srun", "a shell of srun", "MPICH", "one rank of MPICH", "one rank of Open MPI"],
)
def test_who_is_a_rank(
    variables: dict[str, str], is_rank: bool, size: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "MPI_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks.is_launched() == is_rank
    assert (ranks.launched("size"), ranks.launched("local rank")) == (size, local)
