"""Run the command line: which experiments, in which form, and where records and page lie."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import RESULTS

from . import page
from .experiments import EXPERIMENTS, SEEDS, settings_of
from .runner import run, work
from .store import Store

__all__ = ["main"]

FOLDER = RESULTS / "reproduce"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reproductions.md"


def main(given: Sequence[str] | None = None) -> int:
    """Make what is missing, then the page; returns 1 if a start has failed."""
    options = _parsed(given)
    if options.task:
        work(json.loads(options.task))
        return 0
    store = Store(options.results)
    failed = []
    if not options.page_only:
        command = ["python", "-m", "benchmarks.reproduce", *(sys.argv[1:] if given is None else given)]
        for name in options.experiments:
            settings = settings_of(name, options.form, options.changes)
            units = EXPERIMENTS[name].plan(settings, range(options.seeds))
            failed += run(name, units, store, command, fresh=options.fresh, jobs=options.jobs)
    page.write(options.page, store)
    print(f"written: {options.page}")
    for problem in failed:
        print(f"failed, and left out of the page: {problem}\n", file=sys.stderr)
    return 1 if failed else 0


def _parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(given)
    options.form = options.form or "short"
    options.seeds = SEEDS[options.form] if options.seeds is None else options.seeds
    having_form = [name for name, experiment in EXPERIMENTS.items() if options.form in experiment.forms]
    options.experiments = options.experiments or having_form
    unknown = [name for name in options.experiments if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no experiment {unknown[0]!r}: give some of {', '.join(EXPERIMENTS)}")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: give 1 or more")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more")
    if options.form == "tiny" and (options.results == FOLDER or options.page == PAGE):
        parser.error("--tiny shows that all works, and no results: give --results and --page of its own")
    for name in options.experiments:
        try:
            settings_of(name, options.form, options.changes)
        except ValueError as error:
            parser.error(str(error))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description="Repeat the papers' experiments. What is recorded is not made again.",
    )
    parser.add_argument("experiments", nargs="*", help=f"some of {', '.join(EXPERIMENTS)}; all by default")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", dest="form", action="store_const", const="full", help="the papers' sizes: days")
    form.add_argument("--tiny", dest="form", action="store_const", const="tiny", help="a few steps, to try it out")
    form.add_argument(
        "--gpu", dest="form", action="store_const", const="gpu", help="sizes that want a GPU; gpt has them"
    )
    parser.add_argument("--seeds", type=int, help="number of seeds; 1, with --full 3")
    parser.add_argument("--jobs", type=int, default=1, help="starts of ranks at the same time; 1 by default")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=JSON", dest="changes",
        help="another value of a setting of the form, such as epochs=20 or 'workers=[4]'",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="make again what is recorded")
    parser.add_argument("--page-only", action="store_true", help="make the page of the records that there are")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of records and plots")
    parser.add_argument("--page", type=Path, default=PAGE, help="the file that is written")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser
