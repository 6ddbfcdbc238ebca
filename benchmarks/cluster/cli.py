"""Run the command line: up, run, status, down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .cluster import STAYS, Cluster, build, remove_leftovers, take_down
from .errors import ClusterError, UnavailableError
from .launch import LAUNCHERS
from .links import format_rate, parse_rate
from .system import exclusive, terminated_as_exit
from .topology import MOST_HOSTS, host_name

__all__ = ["main", "parse"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; all after `--` is the ranks' command."""
    import cluster

    parser = argparse.ArgumentParser(
        prog="cluster", description=cluster.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="make the hosts; they stay until `down`")
    up.add_argument("--hosts", type=int, default=2, help=f"1 to {MOST_HOSTS}")
    up.add_argument("--rate", default="1gbit", type=_rate, help="of each link: 1mbit to 100gbit, or unlimited")
    run = actions.add_parser("run", help="run a command on ranks on the hosts")
    run.add_argument("-np", dest="ranks", type=int, help="ranks in all; as many as the hosts hold if not given")
    run.add_argument("--ranks-per-host", type=int, default=1)
    run.add_argument("--timeout", type=float, default=600.0, help="seconds")
    for launcher in LAUNCHERS:
        run.add_argument(f"--{launcher}", dest="launcher", action="store_const", const=launcher)
    run.set_defaults(launcher=LAUNCHERS[0])
    run.add_argument("command", nargs="+", metavar="-- COMMAND")
    actions.add_parser("status", help="hosts, rate, processes, and bytes so far")
    actions.add_parser("down", help="end all processes on the hosts and remove these")
    return parser.parse_args(arguments)


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status: 1 if it failed, 2 if this machine cannot do it."""
    options = parse(arguments)
    try:
        _ACTIONS[options.action](options)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    except (ClusterError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _up(options: argparse.Namespace) -> None:
    with terminated_as_exit(), exclusive():
        remove_leftovers()
        build(options.hosts, options.rate)
        STAYS.touch()
    first, last = host_name(1), host_name(options.hosts)
    print(f"{options.hosts} hosts, {first} to {last}, on links of {options.rate}; `down` removes them")


def _run(options: argparse.Namespace) -> None:
    with Cluster.attached() as cluster:
        run = cluster.run(
            options.command,
            ranks=options.ranks,
            ranks_per_host=options.ranks_per_host,
            launcher=options.launcher,
            timeout=options.timeout,
            echo=sys.stdout,
        )
    print(f"{run.seconds:.1f} s")
    _print_bytes(list(zip(run.sent, run.received, strict=True)))


def _status(options: argparse.Namespace) -> None:
    with Cluster.attached() as cluster:
        print(f"{cluster.hosts} hosts on links of {format_rate(cluster.rate)}, {len(cluster.pids())} processes")
        _print_bytes(cluster.counters())


def _down(options: argparse.Namespace) -> None:
    with terminated_as_exit(), exclusive():
        removed = take_down()
    print(f"removed {', '.join(sorted(removed))}" if removed else "nothing was up")


def _print_bytes(links: Sequence[tuple[int, int]]) -> None:
    print(f"{'host':8}{'bytes sent':>20}{'received':>20}")
    for i, (sent, received) in enumerate(links, 1):
        print(f"{host_name(i):8}{sent:20,}{received:20,}")


_ACTIONS = {"up": _up, "run": _run, "status": _status, "down": _down}
