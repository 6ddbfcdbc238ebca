#!/usr/bin/env bash
# `ci/test.sh` runs every test that is not marked as thorough, `ci/test.sh rest` the others; `python` is that of .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not thorough"
if [[ ${1:-} == rest ]]; then
    marks=thorough
fi
elastic=(tests/parallel/test_elastic*.py)

# Ranks wait for each other for a third of the time, and those of elastic runs for most of it. So two things run beside
# the starts of other ranks: first the tests of one process, in several processes, of up to 2 GB, with the lowest
# priority, so that ranks do not wait for them; and then the elastic runs.
beside() {
    local status=0
    nice -n 19 python -m pytest -m "$marks" --numprocesses logical --maxprocesses 4 --ignore tests/parallel || status=$?
    python -m pytest -m "$marks" "${elastic[@]}" || status=$?
    return "$status"
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
printf 'The tests of one process and those of elastic runs run beside those of other ranks, and are shown after them.\n'
python -m pytest -m "$marks" tests/parallel "${elastic[@]/#/--ignore=}" || status=$?
wait "$pid" || status=$?
pid=
cat "$log"
exit "$status"
