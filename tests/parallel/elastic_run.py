"""Start ranks that come and go, on hosts that are all this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.parallel import launch

__all__ = ["elastic_run"]

_LIMIT_SECONDS = 240.0


def elastic_run(
    folder: Path, hosts: str, ranks: str, worker: list[str], **environment: str
) -> dict[int, list[dict[str, Any]]]:
    """Run a worker until all of its processes have ended.

    Args:
        folder: of the run, where each process writes its lines, as the number of the process and `.jsonl`.
        hosts: the script that says which hosts there are.
        ranks: to begin with, at least, and at most: arguments of `horovodrun`.
        worker: the module, and its arguments.
        environment: beside that of all starts.

    Returns:
        The lines by the numbers of the processes, in their order: who began first comes first.
    """
    script = folder / "hosts.sh"
    script.write_text(hosts)
    script.chmod(0o755)
    environment = {**launch._environment(), **environment}
    command = [
        str(shutil.which("horovodrun", path=environment["PATH"])), *ranks.split(),
        "--host-discovery-script", str(script), sys.executable, "-m", *worker,
    ]  # fmt: skip
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=launch.ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        returncode = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = process.wait(_LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                launch._end(process)
    assert returncode == 0, f"returned {returncode}\n{(folder / 'output').read_text(errors='replace')[-4000:]}"
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    return {int(file.stem): [json.loads(line) for line in file.read_text().splitlines()] for file in files}
