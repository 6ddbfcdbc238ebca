"""Reads a compressor from the command line."""

from __future__ import annotations

import argparse
import ast
from typing import Any

import hvd_compress


def compressor(text: str) -> Any:
    """The compressor that `text` writes down, such as "OneBit()" or "TopK(ratio=0.01)"; "none", "fp16": no expression.

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
