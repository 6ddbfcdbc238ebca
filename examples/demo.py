"""Run `make demo`: one training with compressed gradients, the same one with Horovod's own, and a table of both."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import launcher
import mnist_data

LIMIT_SECONDS = 200  # per training; each takes well below a minute on two cores


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compression", default="Adaptive(pi=64)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data-dir", help="see pytorch_mnist.py")
    return parser.parse_args()


def row(result: dict[str, Any], name: str) -> str:
    ratio = result["dense_bytes_per_step"] / result["bytes_per_step"]
    return (
        f"{name:<18}{100 * result['test_accuracy']:>9.2f} %{result['bytes_per_step']:>17,.0f}"
        f"{ratio:>11.1f} x{1000 * result['seconds_per_step']:>10.1f} ms{result['residual_norm']:>15.4g}"
    )


def main() -> int:
    options = arguments()
    # the bundled digits are 40 times fewer: smaller batches and more epochs make as many steps of them
    few = len(mnist_data.load(options.data_dir).train_y) < 10_000
    common = ["--epochs", str(options.epochs * (10 if few else 1)), "--batch-size", "32" if few else "128"]
    common += ["--data-dir", options.data_dir] if options.data_dir else []
    start = time.monotonic()
    print(f"Training twice on {options.ranks} ranks of this machine: compressed, then dense.", flush=True)
    try:
        results = {
            name: launcher.train(options.ranks, "--compression", name, *common, limit_seconds=LIMIT_SECONDS)
            for name in (options.compression, "none")
        }
    except launcher.RunError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1

    compressed, dense = results.values()
    print(f"\n{dense['data']}; {dense['parameters']:,} parameters, {dense['steps']} steps on {dense['ranks']} ranks")
    print(f"{'':<18}{'test acc.':>11}{'bytes sent/step':>17}{'fewer':>13}{'per step':>13}{'residual norm':>15}")
    print(row(compressed, options.compression))
    print(row(dense, "dense"))
    print("All ranks held the same bytes at the end of both trainings.")
    print(
        f"Both ran over this machine's memory, where bytes cost nothing: compression pays on a network. "
        f"{time.monotonic() - start:.0f} s in all."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
