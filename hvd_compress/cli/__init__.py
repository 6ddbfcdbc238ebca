"""The command `hvd-compress`: does compression pay for a model (`advise`), can this Horovod do it (`check`), how fast
are the kernels here (`bench`).

Frameworks and Horovod are imported by the subcommand that needs them, when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvd_compress import __version__
from hvd_compress.cli import advise, bench, check
from hvd_compress.errors import HvdCompressError

__all__ = ["main"]

_SUBCOMMANDS = {"advise": advise, "check": check, "bench": bench}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the arguments of the command line, or `argv`.

    Returns:
        Exit code: 0, 1 where `check` found something missing, 2 for arguments that do not fit.
    """
    parser = argparse.ArgumentParser(prog="hvd-compress", description="Gradient compression for Horovod.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, module in _SUBCOMMANDS.items():
        module.add_arguments(
            subparsers.add_parser(
                name,
                help=module.HELP,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    options = parser.parse_args(argv)
    try:
        return _SUBCOMMANDS[options.subcommand].run(options)
    except (HvdCompressError, ValueError) as error:
        print(f"hvd-compress {options.subcommand}: {error}", file=sys.stderr)
        return 2
