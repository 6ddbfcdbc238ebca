#!/usr/bin/env bash
# Tries the README's first command as a newcomer would: makes a clean Debian in a temporary folder, with a compiler, make,
# git, Python and certificates and no more (no ssh, no MPI, no package cache or settings of this machine), puts a clone
# of the last commit in, and runs `make demo` there. Prints a table; its exit code is 1 if a run failed.
#
#     ci/fresh.sh [-c COMMAND] [SYSTEM...]     SYSTEM is a Debian release, or release:user for a run without root
#
# Needs root and debootstrap; each run takes a quarter of an hour on 2 cores and 12 GB of disk, which are freed again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command="make demo"
while getopts c: option; do
    case $option in
        c) command=$OPTARG ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
(($#)) || set -- bookworm trixie testing trixie:user

die() {
    printf '[fresh] FAILED: %s\n' "$*" >&2
    exit 2
}

((EUID == 0)) || die "a root folder can be entered by root only: run this as root"
command -v debootstrap >/dev/null || die "debootstrap is not on PATH (Debian: apt-get install debootstrap)"

logs=$PWD/build/fresh
mkdir -p "$logs"
work=$(mktemp -d "${TMPDIR:-/tmp}/fresh.XXXXXX")
table=()
child=
trap 'rm -rf --one-file-system "$work"' EXIT
# unshare holds the milder signals back while it waits
trap '[[ -z $child ]] || kill -KILL "$child"; exit 130' INT TERM

# Mounts and processes of what runs in namespaces of its own end with it, however this script ends.
apart() {
    local status=0
    # in the background, so that a signal is heeded at once
    unshare --mount --propagation private --pid --fork --kill-child -- "$@" &
    child=$!
    wait "$child" || status=$?
    child=
    return "$status"
}

# inside ROOT USER COMMAND: what a container gives: /proc, /sys, /dev/shm, an empty environment; certificates as they are
# here.
inside() {
    local home=/root certificates=()
    [[ $2 == root ]] || home=/home/$2
    [[ -z ${SSL_CERT_FILE:-} ]] || certificates=("PIP_CERT=/etc/ssl/certs/ca-certificates.crt")
    # shellcheck disable=SC2016  # expanded by the shell inside
    apart bash -c '
        set -e; root=$1 user=$2; shift 2
        mount -t proc proc "$root/proc"; mount -t sysfs -o ro sysfs "$root/sys"
        mount -t tmpfs tmpfs "$root/dev/shm"
        exec chroot --userspec="$user:$user" "$root" env -i "$@"' \
        - "$1" "$2" HOME="$home" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        "${certificates[@]}" bash -c "cd; $3"
}

make_root() {
    local root=$1 release=$2
    apart debootstrap --variant=minbase \
        --include=ca-certificates,python3-venv,python3-dev,gcc,g++,make,git "$release" "$root"
    printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$root/etc/hosts"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    [[ -z ${SSL_CERT_FILE:-} ]] || cp -L "$SSL_CERT_FILE" "$root/etc/ssl/certs/ca-certificates.crt"
    install -d -m 1777 "$root/dev/shm"
    chroot "$root" useradd --create-home user
}

try() {
    local system=$1 release=${1%%:*} user=root root=$work/root home log versions begun result=ok
    [[ $system != *:user ]] || user=user
    log=$logs/${system/:/-}.log
    printf '[fresh] %s: making a clean root (a minute); log: %s\n' "$system" "$log"
    if ! make_root "$root" "$release" >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        die "no root of $system could be made; whole log: $log"
    fi
    home=$root/root
    [[ $user == root ]] || home=$root/home/$user
    git clone --quiet --no-local . "$home/hvd_compress"
    [[ $user == root ]] || chroot "$root" chown -R "$user:$user" "/home/$user"
    # shellcheck disable=SC2016
    versions=$(inside "$root" root 'cat /etc/debian_version; gcc -dumpfullversion
        python3 -c "import platform; print(platform.python_version())"' | paste -sd ' ')
    printf '[fresh] %s: %s\n' "$system" "$command"
    begun=$SECONDS
    inside "$root" "$user" "cd hvd_compress && { $command; }" >>"$log" 2>&1 </dev/null || result="failed ($?)"
    [[ $result == ok ]] || tail -n 20 "$log" >&2
    # shellcheck disable=SC2086  # three words
    table+=("$(printf '%-16s %-12s %-8s %-8s %-6s %-12s %5.1f' "$release" $versions "$user" "$result" \
        "$(((SECONDS - begun) * 10 / 60))e-1")")
    printf '[fresh] %s: %s after %d s\n' "$system" "$result" $((SECONDS - begun))
    rm -rf --one-file-system "$root"
}

for system in "$@"; do
    try "$system"
done
printf '\n%-16s %-12s %-8s %-8s %-6s %-12s %s\n' release version GCC Python user result minutes
printf '%s\n' "${table[@]}"
! printf '%s\n' "${table[@]}" | grep -q ' failed '
