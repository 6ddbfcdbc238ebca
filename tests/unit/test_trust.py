"""What comes from others is data: no code of theirs runs, no link of theirs is followed, no memory goes to a claim."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hvd_compress
from hvd_compress import BF16, FP16, Adaptive, NoCompression, OneBit, TopK
from hvd_compress.cli.build_horovod import begin_file
from hvd_compress.compressors import Key
from hvd_compress.errors import WireError
from hvd_compress.feedback import read_state, write_state
from hvd_compress.gossip.copies import Copies
from hvd_compress.kernels import jit
from hvd_compress.tensors import ParameterSpec
from hvd_compress.wire import HEADER_BYTES
from tests.forge import forge
from tests.unit.test_feedback import states

PACKAGE = Path(hvd_compress.__file__).parent
UNPICKLING = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "allgather_object", "broadcast_object", "bcast"}
# these hand Horovod's own function to Horovod's own states of elastic runs, or name it in an error
HOROVODS_OWN = {"_keras/edge.py", "_keras/elastic.py", "tensorflow/_elastic.py"}


def test_nothing_that_comes_is_unpickled() -> None:
    for file in PACKAGE.rglob("*.py"):
        where = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            names = {
                alias.name.partition(".")[0] for alias in getattr(node, "names", []) if isinstance(node, ast.Import)
            }
            if isinstance(node, ast.ImportFrom):
                names = {str(node.module).partition(".")[0]}
            if isinstance(node, ast.Attribute):
                names = {node.attr}
            assert where in HOROVODS_OWN or not names & UNPICKLING, (where, node.lineno, names & UNPICKLING)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                assert call not in ("torch.load", "np.load"), (where, node.lineno)
                # mpi4py's lower-case collectives pickle
                assert not (call.startswith(("comm.", "self._comm.")) and node.func.attr.islower() and node.args), (
                    where,
                    node.lineno,
                    call,
                )


# -- the limit of decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [hvd_compress.decode, TopK(k=1).decode], ids=["any", "own"])
def test_the_caller_sets_how_many_elements_are_believed(decode: object) -> None:
    payload = TopK(k=1).encode(np.array([[0.5, -2.0, 1.0]], np.float32))
    assert decode(payload, max_numel=3).tolist() == [[0.0, -2.0, 0.0]]  # type: ignore[operator]
    with pytest.raises(WireError, match="claims 3 elements, and 2 are allowed"):
        decode(payload, max_numel=2)  # type: ignore[operator]
    for wrong in (-1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="max_numel="):
            decode(payload, max_numel=wrong)  # type: ignore[operator]


def test_forty_bytes_that_claim_a_gigabyte_are_refused_where_the_caller_says_so() -> None:
    nothing = np.zeros(HEADER_BYTES, np.uint8)
    used = OneBit().say_absent(nothing, 2**28, 64)
    assert used == HEADER_BYTES
    with pytest.raises(WireError, match="claims 268435456 elements, and 1000000 are allowed"):
        hvd_compress.decode(nothing, max_numel=10**6)
    OneBit().say_absent(nothing, 2**28 + 1, 64)
    with pytest.raises(WireError, match="268435457 elements, and 268435456 are allowed"):
        hvd_compress.decode(nothing)


# -- values that are not finite under a good checksum ----------------------------------------------------------------

BAD = {"nan": np.uint32(0x7FC00000), "inf": np.uint32(0x7F800000)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("compressor", [OneBit(), Adaptive(pi=4), TopK(0.5)], ids=lambda c: c.id)
def test_a_payload_of_such_values_is_refused(compressor: hvd_compress.Compressor, bad: str) -> None:
    payload = compressor.encode(np.linspace(-1, 1, 64, dtype=np.float32))
    refused = 0
    for at in range(HEADER_BYTES, payload.size, 4):
        forged = forge(payload, {at: ("<u4", int(BAD[bad]))})
        try:
            values = hvd_compress.decode(forged)
        except WireError as error:
            refused += "not finite" in str(error)
        else:
            assert np.isfinite(values).all()
    assert refused >= 1


def test_honest_ones_say_so_or_overflow_in_half_precision() -> None:
    assert np.isnan(hvd_compress.decode(OneBit().encode(np.array([1.0, np.nan], np.float32)))).all()
    assert hvd_compress.decode(FP16().encode(np.array([1.0, 7e4], np.float32))).tolist() == [1.0, np.inf]
    assert hvd_compress.decode(BF16().encode(np.array([1.0, 3.4e38], np.float32))).tolist() == [1.0, np.inf]
    # these travel as they are
    assert np.isnan(hvd_compress.decode(NoCompression().encode(np.array([1.0, np.nan], np.float32)))[1])


def test_a_neighbours_copy_is_not_poisoned_in_silence() -> None:
    tensors = [ParameterSpec("w", (64,))]
    sender, receiver = (Copies(tensors, [OneBit()], senders=1, position=p, keeps_own=True) for p in range(2))
    x, buffer = np.linspace(-1, 1, 64, dtype=np.float32), np.zeros(4096, np.uint8)
    sender.needs_whole[:] = False
    used = sender.encode(0, x, 1, buffer)
    forged = forge(buffer[:used], {HEADER_BYTES: ("<u4", int(BAD["nan"])), HEADER_BYTES + 4: ("<u4", int(BAD["nan"]))})
    with pytest.raises(WireError, match="'w': payload decodes to values that are not finite"):
        receiver.decode(0, 0, *receiver.open(0, forged))


def test_a_forged_gradient_leaves_every_residual_finite() -> None:
    compressor, x = OneBit(), np.linspace(-1, 1, 64, dtype=np.float32)
    total, residual = np.zeros(64, np.float32), np.zeros(64, np.float32)
    payload = compressor.encode(x)
    forged = forge(payload, {at: ("<u4", int(BAD["nan"])) for at in range(HEADER_BYTES, HEADER_BYTES + 8, 4)})
    compressor.decode_into(forged, total, add=True)
    # the owner of a chunk encodes what it has summed: all ranks are told, and nothing stays
    answer = np.zeros(compressor.capacity(64, 64), np.uint8)
    used = compressor.encode_into(total, residual, answer, 64, Key())
    assert np.isnan(hvd_compress.decode(answer[:used])).all()
    assert not residual.any()


# -- files in folders that others can write to -----------------------------------------------------------------------


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    state = states(1)[0]
    (tmp_path / "state.npz.partial").symlink_to(victim)
    write_state(tmp_path / "state.npz", state)
    (tmp_path / "linked.npz").symlink_to(victim)
    write_state(tmp_path / "linked.npz", state)
    assert not (tmp_path / "linked.npz").is_symlink()
    (tmp_path / "build.log").symlink_to(victim)
    with begin_file(tmp_path / "build.log") as log:
        log.write(b"x")
    missing = tmp_path / "would be made"
    (tmp_path / jit._LOCK).symlink_to(missing)
    with jit._alone(str(tmp_path)):
        pass
    assert not missing.exists()
    assert victim.read_text() == "untouched"
    assert read_state(tmp_path / "state.npz")["steps"] == state["steps"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path, state = tmp_path / "state.npz", states(1)[0]
    write_state(path, state)
    before = path.read_bytes()
    larger = {**state, "residuals": {"w": {"shape": [20000], "values": np.ones(20000, np.float32)}}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal, and writing fails as on a full disk
    for limit in (0, 100, 5000, 79_000, 80_300):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_state(path, larger)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


_ON_A_FULL_FILESYSTEM = """
import sys
from pathlib import Path
import numpy as np
from hvd_compress.feedback import read_state, write_state
from tests.unit.test_feedback import states

folder, state = Path(sys.argv[1]), states(1)[0]
path, filler = folder / "state.npz", folder / "filler"
write_state(path, state)
before = path.read_bytes()
larger = {**state, "residuals": {"w": {"shape": [20000], "values": np.ones(20000, np.float32)}}}
for free in (0, 4096, 20480, 77824):
    filler.write_bytes(bytes(4096))
    with filler.open("ab", 0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(file.tell() - free)
    try:
        write_state(path, larger)
    except OSError as error:
        print(error.strerror)
    assert path.read_bytes() == before
    assert sorted(file.name for file in folder.iterdir()) == ["filler", "state.npz"]
filler.unlink()
write_state(path, larger)
assert read_state(path)["residuals"]["w"]["values"].size == 20000
"""


def test_a_full_filesystem_leaves_the_old_file(tmp_path: Path) -> None:
    """A small one in memory, in a namespace of this user's, where the system lets users have one."""
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = 'mount -t tmpfs -o size=256k tmpfs "$1"'
    can_mount = (
        shutil.which("unshare")
        and not subprocess.run([*mount, small, "sh", tmp_path], capture_output=True, check=False).returncode
    )
    if not can_mount:
        pytest.skip("this user may not mount a filesystem of its own; the limit on the size of files stands for it")
    told = subprocess.run(
        [*mount, f'{small} && exec "$2" -c "$3" "$1"', "sh", tmp_path, sys.executable, _ON_A_FULL_FILESYSTEM],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["No space left on device"] * 4


# -- states of an optimizer ------------------------------------------------------------------------------------------


def test_an_optimizers_state_travels_as_json() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    from collections import OrderedDict

    from hvd_compress.torch._plain import Sent, dumps, loads

    value = {
        "lr": 0.1, "inf": float("inf"), (0, 1): [None, True, 10**30], "bytes": b"\xff", "z": 1 + 2j, "set": {1, 2},
        "of torch": (torch.float32, torch.Size([2, 3]), torch.device("cpu"), torch.strided),
        "ordered": OrderedDict(b=1, a=2), "numpy": np.float64(0.3), "sent": Sent((2,), torch.int64, True),
    }  # fmt: skip
    found = loads(dumps(value))
    assert found == value
    assert [type(of) for of in found.values()] == [type(of) for of in value.values()]
    assert loads(dumps(np.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
    for wrong in (print, ParameterSpec("w", (1,)), np.array([print])):
        with pytest.raises(TypeError, match=r"state\['x'\]\[0\] is of .* never unpickled"):
            dumps({"x": [wrong]})
