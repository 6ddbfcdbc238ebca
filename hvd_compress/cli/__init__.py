"""The command `hvd-compress`: does compression pay for a model (`advise`), can this Horovod do it (`check`), how fast
are the kernels here (`bench`), and a Horovod for the frameworks that are here (`build-horovod`).

Frameworks and Horovod are imported by the subcommand that needs them, when it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from hvd_compress import __version__
from hvd_compress.cli import advise, bench, build_horovod, check
from hvd_compress.errors import HvdCompressError

__all__ = ["main"]

_SUBCOMMANDS = {"advise": advise, "check": check, "bench": bench, "build-horovod": build_horovod}


_MOST_CHARACTERS = 300


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        # a message that quotes an argument is as long as the argument
        short = message if len(message) <= _MOST_CHARACTERS else message[:_MOST_CHARACTERS] + "..."
        self.exit(2, f"{self.prog}: {' '.join(short.split())}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the arguments of the command line, or `argv`.

    Returns:
        Exit code: 0, 1 where `check` found something missing or a build failed, 2 for arguments that do not fit,
        130 where the user has ended it.
    """
    parser = _Parser(prog="hvd-compress", description="Compressed gradients for Horovod and PyTorch's DDP.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="subcommand")
    for name, module in _SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
    options, unknown = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    if unknown:
        subparsers.choices[options.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _SUBCOMMANDS[options.subcommand].run(options)
    except (HvdCompressError, ValueError) as error:
        print(f"hvd-compress {options.subcommand}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader has seen enough; Python would complain again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join "--option -1" to "--option=-1": argparse would take the number for an option, and say nothing of it."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.match(r"--[a-z-]+$", joined[-1]) and re.match(r"-[0-9.]", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
