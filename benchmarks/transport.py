"""Count in the kernel the bytes that one gradient costs on the network, against Horovod's own ring allreduce.

    python benchmarks/transport.py [--ranks 4] [--rows 4096] [--cols 4096] [--steps 5] [--launcher gloo|mpi]

All ranks run on this machine and talk TCP over the loopback interface, whose byte counters are read before and after.
Where `unshare` is allowed to make one, they run in a network namespace of their own, so that nothing else is counted.
The table holds bytes per rank and step, TCP's and Horovod's overhead included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "Horovod fp32": "none",
    "Horovod fp16": "fp16",
    "one-bit": '{"id": "onebit"}',
    "adaptive(64)": '{"id": "adaptive", "pi": 64}',
    "top-k 1 %": '{"id": "topk", "ratio": 0.01}',
    "qsgd 4 bits": '{"id": "qsgd", "bits": 4}',
    "bf16": '{"id": "bf16"}',
}


def loopback_bytes() -> int:
    """Return the bytes sent so far over `lo` of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise RuntimeError("no loopback interface in /proc/net/dev")


def worker(options: argparse.Namespace) -> None:
    import torch

    import hvd_compress.torch as hvd
    from hvd_compress import from_config

    hvd.init()
    gradient = torch.randn(options.rows, options.cols, generator=torch.Generator().manual_seed(hvd.rank()))
    rows = {}
    for case, config in CASES.items():
        compression = getattr(hvd.Compression, config) if config.isalnum() else from_config(json.loads(config))
        parameter = torch.nn.Parameter(torch.zeros(options.rows, options.cols))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], compression)
        for step in range(-1, options.steps):
            if step == 0:  # after a step that compiles and fills Horovod's caches
                hvd.barrier()
                before = loopback_bytes()
            (parameter * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.barrier()
        rows[case] = {
            "measured": (loopback_bytes() - before) / options.steps / hvd.size(),
            "stated": optimizer.compression_stats()["total"]["bytes_sent"] / (options.steps + 1),
        }
    if hvd.rank() == 0:
        Path(options.worker).write_text(json.dumps(rows))


def isolated(command: list[str]) -> list[str]:
    """Return the command in a network namespace of its own, where that is possible."""
    if shutil.which("unshare") and shutil.which("ip"):
        for flags in (["--net"], ["--net", "--map-root-user"]):
            probe = ["unshare", *flags, "ip", "link", "set", "lo", "up"]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return ["unshare", *flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    print("no network namespace to be had: other programs' traffic over the loopback interface is counted too")
    return command


def launch(options: argparse.Namespace) -> list[str]:
    ranks = str(options.ranks)
    if options.launcher == "gloo":
        return ["horovodrun", "-np", ranks, "--gloo", "--network-interface", "lo", sys.executable]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    tcp = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
    return ["mpirun", "-np", ranks, "--oversubscribe", "--bind-to", "none", *root, *tcp, sys.executable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--launcher", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [*launch(options), __file__, *sys.argv[1:], "--worker", str(result)]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        subprocess.run(isolated(command), check=True, env=environment, timeout=600)
        rows = json.loads(result.read_text())
    dense = rows["Horovod fp32"]["measured"]
    print(f"{options.rows}x{options.cols} float32, {options.ranks} ranks, {options.launcher}: bytes per rank and step")
    print(f"{'':16}{'on the network':>16}{'fewer than fp32':>18}{'compression_stats':>20}")
    for case, row in rows.items():
        ratio = dense / row["measured"]
        print(f"{case:16}{row['measured']:16,.0f}{ratio:17.1f}x{row['stated']:20,.0f}")


if __name__ == "__main__":
    main()
