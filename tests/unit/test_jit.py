from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from numba.core.errors import TypingError

from hvd_compress.kernels import jit

PROCESSES = 4
TURN = f"{__name__}.doubled.turn"
TYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64"]
MODULE = """
    from hvd_compress.kernels.jit import kernel

    @kernel
    def size(a):
        return a.itemsize
"""
# each begins with another type; all begin at once
PROCESS = """
    import json, sys
    import numpy as np
    import sized

    first, names = int(sys.argv[1]), json.loads(sys.argv[2])
    arrays = [np.zeros(1, name) for name in names[first:] + names[:first]]
    print("ready", flush=True)
    sys.stdin.readline()
    right = [sized.size(a) == a.itemsize for a in arrays]
    print(json.dumps({"right": right, "found": sum(sized.size.stats.cache_hits.values())}))
"""


class Spy:
    """Takes what is saved, and asks whether another process could save now."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "hvd_compress.lock"
        self.was_locked: list[bool] = []

    def save(self, key: object, data: object) -> None:
        with self.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.was_locked.append(True)
            else:
                self.was_locked.append(False)

    def load(self, key: object) -> None:
        return None


def doubled(a):
    return 2 * a


@pytest.fixture
def spied(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    compiled = jit.kernel(doubled)
    folder = Path(compiled._cache.cache_path)
    assert folder.is_relative_to(tmp_path)
    compiled._cache._cache_file = Spy(folder)
    return compiled


def test_one_process_saves_at_a_time(spied):
    assert spied(np.float32(2)) == 4
    assert spied(2) == 4
    assert spied._cache._cache_file.was_locked == [True, True]
    with spied._cache._cache_file.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back


def test_what_cannot_be_compiled_leaves_the_turn_to_others(spied):
    with pytest.raises(TypingError):
        spied(None)
    with spied._cache._cache_file.lock.with_name(TURN).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_process_that_is_stopped_in_its_turn_is_waited_for_once(spied, monkeypatch):
    monkeypatch.setattr(jit, "_turns", jit._Turns())
    monkeypatch.setattr(jit, "_SECONDS_TO_WAIT", 0.1)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(slept))
    with spied._cache._cache_file.lock.with_name(TURN).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert spied(np.float32(2)) == 4
        waited = len(slept)
        assert waited > 1
        assert spied(2) == 4
        assert len(slept) == waited


def test_another_kernel_is_not_waited_for(spied, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with spied._cache._cache_file.lock.with_name(f"{__name__}.tripled.turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert spied(np.float32(2)) == 4
    assert slept == []


def test_without_locks_kernels_compile_all_the_same(spied):
    # a folder has this name: as if the file system refused
    spied._cache._cache_file.lock.mkdir()
    spied._cache._cache_file.lock.with_name(TURN).mkdir()
    spied._cache._cache_file.save = lambda key, data: None
    assert spied(np.float32(2)) == 4


@pytest.fixture
def unkept(monkeypatch):
    reasons: list[str] = []
    monkeypatch.setattr(jit, "unkept", reasons)
    return reasons


def test_without_a_folder_kernels_are_compiled_anew(unkept, monkeypatch):
    # as in a container whose user has no home, and does not own the package
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as told:
        compiled = [jit.kernel(doubled), jit.kernel(doubled)]
    assert len(told) == 1
    assert len(unkept) == 2
    assert [c(np.float32(2)) for c in compiled] == [4, 4]


def test_a_full_disk_ends_no_training(spied, unkept):
    def full(key, data):
        raise OSError(28, "No space left on device")

    spied._cache._cache_file.save = full
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert spied(np.float32(2)) == 4


def test_processes_that_compile_other_types_do_not_mix_up_their_code(tmp_path):
    (tmp_path / "sized.py").write_text(textwrap.dedent(MODULE))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment.pop("NUMBA_CACHE_DIR", None)

    def started(first: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(first), json.dumps(TYPES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def read(processes: list[subprocess.Popen[str]]) -> list[dict]:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=100)[0]) for process in processes]

    share = len(TYPES) // PROCESSES
    at_once = read([started(number * share) for number in range(PROCESSES)])
    for told in at_once:
        assert all(told["right"])
    # each type is compiled by one process, and found by the others
    assert sum(told["found"] for told in at_once) == (PROCESSES - 1) * len(TYPES)
    (later,) = read([started(0)])
    assert later == {"right": [True] * len(TYPES), "found": len(TYPES)}
