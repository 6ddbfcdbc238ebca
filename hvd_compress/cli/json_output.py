"""Print results for programs: JSON alone on stdout, whatever else would print there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

__all__ = ["add_json_argument", "print_json", "working"]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with the fields described above")


@contextmanager
def working(as_json: bool) -> Iterator[None]:
    """Send to stderr what models, frameworks and Horovod print meanwhile, where stdout is for JSON."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(result: Any) -> None:
    """Print a result; raises ValueError for a number that JSON does not have."""
    print(json.dumps(result, indent=2, allow_nan=False), flush=True)
