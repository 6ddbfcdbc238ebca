#!/usr/bin/env bash
# `ci/test.sh` runs each guarantee once. `ci/test.sh rest` shows them among other ranks, under other launchers and with
# other settings; `ci/test.sh exhaustive` repeats them with what those two leave out. `python` is that of .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    "") marks="not thorough and not exhaustive" ;;
    rest) marks="thorough and not exhaustive" ;;
    exhaustive) marks=exhaustive ;;
    *)
        printf 'ci/test.sh: %s: must be rest, exhaustive, or nothing\n' "$1" >&2
        exit 2
        ;;
esac
elastic=(tests/parallel/test_elastic*.py)

# Ranks wait for each other for a third of the time, and those of elastic runs for half of it. So the tests of one
# process run beside them, in several processes, of up to 2 GB, with the lowest priority: ranks do not wait for these.
# Elastic runs come after the starts of other ranks, since they have limits of time of Horovod's.
beside() {
    nice -n 19 python -m pytest -m "$marks" --numprocesses logical --maxprocesses 4 --ignore tests/parallel
}

pid=
log=$(mktemp)
trap '[[ -z $pid ]] || kill -- "-$pid" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
# in a process group of its own, which ends as a whole
set -m
beside >"$log" 2>&1 &
pid=$!
set +m
status=0
printf 'The tests of one process run beside those of ranks, and are shown after them.\n'
python -m pytest -m "$marks" tests/parallel "${elastic[@]/#/--ignore=}" || status=$?
python -m pytest -m "$marks" "${elastic[@]}" || status=$?
wait "$pid" || status=$?
pid=
cat "$log"
exit "$status"
