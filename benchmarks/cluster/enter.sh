#!/bin/sh
# HOST COMMAND...: runs a command line on a virtual host; Open MPI calls this in place of ssh.
# Ranks count as being on one host if their host names are equal, so each host has a UTS namespace with its name in it.
# Gloo looks its own host name up: the file of names lies over /etc/hosts, for what runs in here alone.
set -e
host=$1
shift
ulimit -c 0
exec ip netns exec "$host" unshare --uts -- sh -c '
    echo "$0" >/proc/sys/kernel/hostname && mount --bind /run/hvdc-cluster/hosts /etc/hosts && exec sh -c "$1"
' "$host" "$*"
