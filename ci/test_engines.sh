#!/usr/bin/env bash
# Ranks as actors of Ray and as tasks of Spark. Their packages are large, and change what others may be installed: so they
# lie in .venv-engines, which finds all else in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/.venv-engines
if [[ ! -x $venv/bin/python ]]; then
    .venv/bin/python -m venv "$venv"
fi
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/of_venv.pth"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r ci/requirements-engines.lock
command -v java >/dev/null || printf 'no java on PATH: the test with Spark is left out (Debian: openjdk-17-jre-headless)\n'
# Ray would report its use over the network
export RAY_USAGE_STATS_ENABLED=0
PATH="$venv/bin:$PWD/.venv/bin:$PATH" "$venv/bin/python" -m pytest tests/parallel/test_guides.py -k engine -rs
