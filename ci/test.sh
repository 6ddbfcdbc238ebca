#!/usr/bin/env bash
# `ci/test.sh` runs every test that is not marked as thorough, `ci/test.sh rest` the others; `python` is that of .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == rest ]]; then
    exec python -m pytest -m thorough
fi
status=0
# several processes at once, of up to 2 GB; but ranks need the cores for themselves
python -m pytest -m "not thorough" --numprocesses logical --maxprocesses 4 --ignore tests/parallel || status=$?
python -m pytest -m "not thorough" tests/parallel || status=$?
exit "$status"
