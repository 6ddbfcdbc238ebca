"""Read a compressor, and what the Keras and TensorFlow examples share, from the command line."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

import hvd_compress


def compressor(text: str) -> Any:
    """Make the compressor that `text` writes down, such as "OneBit()" or "TopK(ratio=0.01)"; "none" and "fp16" too.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    if text in ("none", "fp16"):
        return hvd_compress.NoCompression() if text == "none" else hvd_compress.FP16()
    try:
        call = ast.parse(text, mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.func.id not in dir(hvd_compress)
        ):
            raise ValueError("expected none, fp16 or a compressor such as Adaptive(pi=64)")
        positional = [ast.literal_eval(value) for value in call.args]
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        return getattr(hvd_compress, call.func.id)(*positional, **named)
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def mnist_arguments(description: str | None, nodes: bool = False, outer: bool = False) -> argparse.Namespace:
    """Declare the options of a short training on MNIST; with `nodes` also how many ranks each has.

    With `outer` also when ranks that train on their own synchronize.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", type=compressor, default="Adaptive(pi=64)", help="an expression, none or fp16")
    parser.add_argument("--width", type=int, default=1024, help="of the three hidden layers")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.3, help="at the start; falls linearly to 0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="holds MNIST's four idx.gz files, or a folder mnist/ with them")
    parser.add_argument("--limit-train", type=int, help="use only so many training images")
    parser.add_argument("--json", type=Path, help="rank 0 writes its results there")
    if nodes:
        parser.add_argument("--ranks-per-node", type=int, help="those of each host by default")
    if outer:
        parser.add_argument("--sync-every", type=int, default=20, help="steps from one synchronization to the next")
        parser.add_argument("--fragments", type=int, default=1, help="parts that are synchronized in turns")
        parser.add_argument("--delay", type=int, default=0, help="steps until an average arrives")
        parser.add_argument("--alpha", type=float, default=0.0, help="weight of a rank's own parameters then")
    return parser.parse_args()
