#!/usr/bin/env bash
# `ci/docs.sh html` makes the site in build/docs, `ci/docs.sh linkcheck` tries its links to other sites. Sphinx and its
# theme are added to .venv on the first call, since autodoc imports the frameworks that are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

builder=${1:?usage: ci/docs.sh html|linkcheck}
python=.venv/bin/python
"$python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r ci/requirements-docs.lock
PYTHONPATH=$PWD "$python" -m sphinx --builder "$builder" --fail-on-warning --keep-going --nitpicky --quiet \
    --doctree-dir build/doctrees docs "build/$([[ $builder == html ]] && printf docs || printf %s "$builder")"
if [[ $builder == html ]]; then
    printf 'the site is in build/docs/index.html\n'
fi
