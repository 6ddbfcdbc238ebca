#!/usr/bin/env bash
# `ci/test.sh` runs every test that is not marked as thorough, `ci/test.sh rest` the others; `python` is that of .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not thorough"
if [[ ${1:-} == rest ]]; then
    marks=thorough
fi
# Ranks wait for each other for a third of the time. The tests of one process use that: they have the lowest priority,
# so that ranks do not wait for them, and run in several processes, of up to 2 GB.
beside=
log=$(mktemp)
trap '[[ -z $beside ]] || kill "$beside" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
nice -n 19 python -m pytest -m "$marks" --numprocesses logical --maxprocesses 4 --ignore tests/parallel \
    >"$log" 2>&1 &
beside=$!
status=0
printf 'The tests of one process run beside those of real ranks, and are shown after them.\n'
python -m pytest -m "$marks" tests/parallel || status=$?
wait "$beside" || status=$?
beside=
cat "$log"
exit "$status"
