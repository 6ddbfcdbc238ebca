from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster import Cluster, unavailable
from cluster.cli import main, parse


def test_a_run_takes_all_behind_the_dashes_as_its_command() -> None:
    options = parse(["run", "-np", "4", "--gloo", "--ranks-per-host", "2", "--", "python", "x.py", "--rate", "7"])
    assert (options.ranks, options.launcher, options.ranks_per_host) == (4, "gloo", 2)
    assert options.command == ["python", "x.py", "--rate", "7"]
    assert parse(["run", "--", "true"]).launcher == "mpi"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--rate", "fast"], "rate 'fast': give 1mbit to 100gbit"),
        (["run", "-np", "2"], "required"),
        (["sideways"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_wrong_command_line_is_told_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("hosts", "rate", "said"), [(0, None, "0 hosts: give"), (2, "fast", "rate 'fast': give")])
def test_a_cluster_checks_its_settings_before_anything_is_built(hosts: int, rate: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster(hosts, rate)


def test_without_root_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in (["up"], ["status"], ["down"], ["run", "--", "true"]):
        assert main(action) == 2
        assert "needs root" in capsys.readouterr().err


def test_missing_tools_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up"]) == 2
    assert "ip (iproute2), tc (iproute2), unshare (util-linux)" in capsys.readouterr().err


def test_what_the_kernel_refuses_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shell = shutil.which("sh")
    for tool in ("ip", "tc", "unshare"):
        program = tmp_path / tool
        program.write_text(f"#!{shell}\necho 'Specified qdisc kind is unknown.' >&2\nexit 2\n")
        program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = unavailable()
    assert reason is not None
    assert "tbf" in reason
    assert reason.endswith("Specified qdisc kind is unknown.")
