#!/usr/bin/env bash
# Builds Horovod with CUDA and NCCL from packages of the index alone, on any machine, in an environment of its own
# (.venv-cuda), imports it, and trains two ranks with it on tensors of the CPU: none of that needs a card.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/.venv-cuda
python=$venv/bin/python
unset MAKEFLAGS MFLAGS MAKELEVEL PYTHONHOME PYTHONPATH CUDA_HOME HOROVOD_CUDA_HOME HOROVOD_NCCL_HOME
# a folder or an index of wheels for the CPU would win over the build with CUDA
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=$venv/bin:$PATH

say() { printf '[cuda] %s\n' "$*"; }

say "1/3 environment, and torch with CUDA (3 GB)"
[[ -x $python ]] || "${PYTHON:-python3}" -m venv "$venv"
"$python" -m pip install --quiet -r ci/requirements-torch.txt --constraint ci/requirements.txt -e '.[torch]'

say "2/3 Horovod with CUDA and NCCL"
"$python" hvd_compress/cli/build_horovod.py --gpu cuda "$@"

say "3/3 two ranks"
timeout 300 horovodrun -np 2 --gloo "$python" ci/train_two_ranks.py
