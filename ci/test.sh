#!/usr/bin/env bash
# `ci/test.sh` runs every test that is not marked as thorough, `ci/test.sh rest` the others; `python` is that of .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not thorough"
if [[ ${1:-} == rest ]]; then
    marks=thorough
fi

pid=
log=$(mktemp)
trap '[[ -z $pid ]] || kill -- "-$pid" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
# Ranks wait for each other for half of the time. So two starts of ranks run at once, and beside them the tests of one
# process, in several processes of up to 2 GB, with the lowest priority, so that ranks do not wait for them.
# `set -m`: in a process group of its own, which ends as a whole
set -m
nice -n 19 python -m pytest -m "$marks" --numprocesses logical --maxprocesses 4 --ignore tests/parallel >"$log" 2>&1 &
pid=$!
set +m
status=0
printf 'The tests of one process run beside those of ranks, and are shown after them.\n'
python -m pytest -m "$marks" --numprocesses 2 tests/parallel || status=$?
wait "$pid" || status=$?
pid=
cat "$log"
exit "$status"
