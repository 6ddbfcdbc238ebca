"""Let ranks go wrong in every way of the matrix, beside plain Horovod: `make test-faults ARGS="--jobs 2 --every 3"`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.matrix import ANY_STEPS, EQUAL_REPLICAS, HOWS, Case, cases
from tests.parallel.launch import Outcome, run

LIMIT_SECONDS = 120.0
BEYOND_SECONDS = 30.0
"""What the others may take longer than with plain Horovod."""
RANKS = 2
_SHARED_MEMORY = Path("/dev/shm")
# the folder in which Horovod was built stands in its errors
_BUILT_IN = re.compile(r"/\S*/(?=horovod-)")
# Horovod looks after 10 seconds for ranks that do not come, and ends the others after 30
_STALL_SECONDS = 45.0


def measured(case: Case) -> dict[str, Any]:
    """Start the ranks of a case, and tell how they ended."""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        outcome = run(
            case.what, RANKS, case.launcher, case.how, case.when, str(case.victim), limit_seconds=LIMIT_SECONDS,
            environment={"TMPDIR": temporary}, program="tests.faults.rank",
        )  # fmt: skip
        litter = sorted(f.name for f in Path(temporary).rglob("*") if f.is_file() and not f.name.startswith("saved-"))
    return {**case._asdict(), **_told(outcome), "litter": litter}


def _told(outcome: Outcome) -> dict[str, Any]:
    wrong = list(outcome.value("wrong").values())
    # of a start in which every rank makes the same steps, the one that does more may be anyone's mistake
    errors = {r: _BUILT_IN.sub("", error.splitlines()[0])[:400] for r, error in outcome.value("error").items()}
    return {
        "returncode": outcome.returncode,
        "seconds": round(outcome.seconds, 1),
        "after": round(outcome.ended - wrong[0], 1) if wrong else None,
        "errors": errors,
        "ended": sorted(outcome.value("end")),
        "checksums": sorted(set(outcome.value("checksum").values())),
        "left": outcome.left,
        # what `hvd_compress.waiting` says of a wait that is long
        "word": "Some rank is elsewhere" in outcome.output,
        "crashed": "signal 11" in outcome.output or "Segmentation fault" in outcome.output,
        "last": outcome.output.strip().splitlines()[-25:],
    }


def judged(of: dict[str, Any], beside: dict[str, Any] | None) -> str:
    """Say what is wrong with how a case ended; empty if nothing is."""
    is_odd, what = of["how"] not in HOWS, of["what"]
    if is_odd and (of["word"] or any("MismatchError" in error for error in of["errors"].values())):
        return ""
    if of["returncode"] is None:
        return f"no end within {LIMIT_SECONDS:.0f} s"
    if of["after"] is None:
        return "the rank never went wrong"
    if of["left"]:
        return f"ranks {of['left']} were left"
    if of["crashed"]:
        return "a rank crashed"
    if of["how"] == "one step more" and what in ANY_STEPS and of["returncode"] == 0:
        return ""
    if of["how"] == "stop":
        if of["returncode"] or of["ended"] != [*range(RANKS)]:
            return "did not go on"
        if what in EQUAL_REPLICAS and len(of["checksums"]) > 1:
            return "ranks ended with other parameters"
        return ""
    if of["returncode"] == 0:
        return "called a success"
    if not of["errors"] and of["how"] != "kill":
        return "nobody was told"
    allowed = _STALL_SECONDS if is_odd else BEYOND_SECONDS + ((beside or {}).get("after") or 0)
    if of["after"] > allowed:
        return f"the end came after {of['after']:.0f} s, {allowed:.0f} are allowed"
    return ""


def _show(done: dict[str, Any]) -> None:
    case = ", ".join(str(done[key]) for key in Case._fields)
    print(f"{case}: returned {done['returncode']}, {done['after']} s after; {done['errors']}", flush=True)


def main() -> int:
    """Run, write the record and the table; returns how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3, help="starts at once; most of a start is waiting")
    parser.add_argument("--every", type=int, default=1, help="run every so many-th case alone")
    parser.add_argument("--what", action="append", help="only what trains with this")
    parser.add_argument("--how", action="append", help="only this kind of fault")
    parser.add_argument("--when", action="append", help="only this moment")
    parser.add_argument("--add", action="store_true", help="keep what the record has of other cases")
    parser.add_argument("--minutes", type=float, default=20.0, help="start nothing after this time; the rest is said")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.json"))
    options = parser.parse_args()
    chosen = [
        case
        for case in cases()
        if (not options.what or case.what in options.what)
        and (not options.how or case.how in options.how)
        and (not options.when or case.when in options.when)
    ][:: options.every]
    beside = list(dict.fromkeys(case.beside for case in chosen if case.how in HOWS))
    # each case of ours follows the one that it is compared with
    order = sorted([*beside, *chosen], key=lambda case: (case.how not in HOWS, case.how, case.when, case.launcher))
    begin, shared = time.monotonic(), set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.exists() else set()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = [r for r in pool.map(partial(_before, begin + 60 * options.minutes), order) if r]
    before = json.loads(options.out.read_text()) if options.add else {"cases": [], "minutes": 0.0}
    of_plain = {_key(r): r for r in [*before["cases"], *results]}
    results = list(of_plain.values())
    for result in results:
        case = Case(*(result[key] for key in Case._fields))
        result["verdict"] = judged(result, of_plain.get(tuple(case.beside)))
        # with the paths of this machine: not for the record
        last = result.pop("last", [])
        if result["verdict"]:
            print(f"FAILED {result['verdict']}: {', '.join(case)}", *last, sep="\n")
    left = sorted(set(os.listdir(_SHARED_MEMORY)) - shared) if _SHARED_MEMORY.exists() else []
    record = {
        "setting": {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": sys.version.split()[0], "ranks": RANKS},
        "minutes": round(before["minutes"] + (time.monotonic() - begin) / 60, 1),
        "not run": [list(case) for case in cases() if tuple(case) not in of_plain],
        "shared memory left": left,
        "cases": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(results))
    failed = [r for r in results if r["verdict"] and r["what"] not in ("horovod", "ddp alone")]
    print(
        f"{len(results)} starts in {record['minutes']} minutes, {len(record['not run'])} not run, {len(failed)} failed"
    )
    return len(failed)


def _key(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(result[field]) for field in Case._fields)


def _before(deadline: float, case: Case) -> dict[str, Any] | None:
    if time.monotonic() > deadline:
        return None
    done = measured(case)
    _show(done)
    return done


def table(results: list[dict[str, Any]]) -> str:
    """One row for each case: how long the others took to end, beside plain Horovod."""
    plain = {(r["how"], r["when"], r["launcher"], r["what"]): r for r in results}
    rows = [
        "| trains with | fault | moment | launcher | ended after | plain | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r["what"] in ("horovod", "ddp alone"):
            continue
        beside = plain.get((r["how"], r["when"], r["launcher"], "ddp alone" if r["what"] == "ddp" else "horovod"))
        theirs = "" if beside is None else f"{beside['after']} s{', ' + beside['verdict'] if beside['verdict'] else ''}"
        rows.append(
            f"| {r['what']} | {r['how']} | {r['when']} | {r['launcher']} | {r['after']} s | {theirs} | "
            f"{r['verdict'] or 'as promised'} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(min(main(), 1))
