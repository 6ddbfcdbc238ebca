"""Run all benchmarks, and write the page of their results.

    python benchmarks [--long] [--only allreduce scaling]

The short form takes a quarter of an hour on two cores, the long one some hours. Needs root for the virtual cluster;
without it links are unlimited and the benchmarks say so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = (
    "kernels", "allreduce", "minibatch", "scaling", "auto", "overlap", "rivals", "eventgrad", "daso", "adam", "memory",
    "links",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="all cases, more rounds")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    options = parser.parse_args()
    form = [] if options.long else ["--short"]
    minutes, failed = {}, []
    for name in (*options.only, "page"):
        script = Path(__file__).with_name(f"{name}.py")
        began = time.monotonic()
        # a process of its own: what one has loaded must not count for the next
        ended = _ended([sys.executable, str(script), *(form if name != "page" else [])])
        # one that cannot run, such as a paper's on MNIST where there is none, must not cost the others and the page
        failed += [name] if ended else []
        minutes[name] = (time.monotonic() - began) / 60
    each = ", ".join(f"{name} {of_name:.1f}" for name, of_name in minutes.items())
    print(f"{sum(minutes.values()):.1f} minutes: {each}")
    if failed:
        sys.exit(f"failed, see above: {', '.join(failed)}; the page shows what is recorded of them")


def _ended(command: list[str]) -> int:
    """Run a command; returns its exit code. On Ctrl-C, which it gets too, it has the time to clean up."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


if __name__ == "__main__":
    main()
