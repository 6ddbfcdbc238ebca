"""Two virtual hosts with a link of 1 Gbit/s between them, and a program on them (root, Linux, iproute2):

PYTHONPATH=benchmarks python examples/guides/virtual_cluster.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import Cluster

PROGRAM = Path(__file__).with_name("slow_links.py")

if __name__ == "__main__":
    with Cluster(hosts=2, rate="1gbit") as cluster:
        run = cluster.run([sys.executable, str(PROGRAM)], launcher="gloo", timeout=120)
    print(run.stdout[0])
    print("bytes that each host sent:", run.sent)
