"""Show what compression costs in test accuracy: the same training, dense and with each compressor, same seed.

Full MNIST, 784-1024-1024-1024-10, 4 ranks, 5 epochs; about an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import launcher

SETTINGS = ["none", "OneBit()", "Adaptive(pi=64)", "QSGD(bits=4)", "TopK(ratio=0.01)", "Threshold(tau=0.003)"]
# Chosen by trial. Error feedback delays what it sends by some dozens of steps, so a run needs many of them: with
# batches of 64 and momentum 0.9 (1170 steps instead of 2340), Adaptive stays further behind dense.
TRAINING = ["--batch-size", "32", "--lr", "0.3"]
# ranks that wait leave the core to those that compute
MPI_ARGUMENTS = "--oversubscribe --mca mpi_yield_when_idle 1" + " --allow-run-as-root" * (os.geteuid() == 0)
LIMIT_SECONDS = 1500  # per training


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=SETTINGS, help="compressors; the first is compared with")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--keras", action="store_true", help="train with Keras, on the backend of KERAS_BACKEND")
    parser.add_argument("--mpi", action="store_true", help="run over MPI instead of Gloo: faster on one machine")
    parser.add_argument("--json", type=Path, help="write all results there")
    known, rest = parser.parse_known_args()
    known.rest = rest  # for the example, such as --epochs 1
    return known


def main() -> int:
    options = arguments()
    launch = ("--mpi", f"--mpi-args={MPI_ARGUMENTS}") if options.mpi else ("--gloo",)
    script = "keras_mnist.py" if options.keras else "pytorch_mnist.py"
    own = [] if options.keras else ["--momentum", "0"]
    results = []
    for setting in options.settings:
        given = ["--compression", setting, "--epochs", "5", "--width", "1024", *TRAINING, *own, *options.rest]
        results.append(launcher.train(options.ranks, *given, limit_seconds=LIMIT_SECONDS, launch=launch, script=script))
        if options.json:
            options.json.write_text(json.dumps(results, indent=2))
    first = results[0]
    print(f"\n{first['data']}, {first['ranks']} ranks, {first['steps']} steps")
    print(f"{'':<24}{'test acc.':>11}{'difference':>12}{'fewer bytes':>13}{'replicas':>12}")
    for result in results:
        percent = 100 * result["test_accuracy"]
        print(
            f"{result['compression']:<24}{percent:>9.2f} %{percent - 100 * first['test_accuracy']:>+12.2f}"
            f"{result['dense_bytes_per_step'] / result['bytes_per_step']:>11.1f} x"
            f"{'identical' if result['replicas_identical'] else 'DIFFER':>12}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
