"""Make the names, addresses, and `ip` and `tc` commands that lay a cluster out; nothing here runs them.

       eth0 ── port1                          ctl0 ── ctl1
hvdc-1                hvdc-switch (bridge data)              hvdc-switch (bridge control) ── ctl0  hvdc-head
       (shaped at both ends)                  (not shaped)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from .links import Shape

__all__ = [
    "CONTROL",
    "DATA",
    "HEAD",
    "HEAD_ADDRESS",
    "MOST_HOSTS",
    "SWITCH",
    "build_commands",
    "host_name",
    "host_names",
    "host_slots",
    "hosts_among",
    "link_bytes",
    "qdisc_rate",
    "shape_commands",
]

PREFIX = "hvdc-"
SWITCH = f"{PREFIX}switch"
HEAD = f"{PREFIX}head"
DATA = "eth0"
CONTROL = "ctl0"
MOST_HOSTS = 64
HEAD_ADDRESS = "10.78.0.254"

# Neighbour discovery and router solicitations would be counted with what ranks send.
_NO_IPV6 = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e $f ] || echo 1 >$f; done"


def host_name(number: int) -> str:
    """Return the namespace and host name of a host; the first is 1."""
    return f"{PREFIX}{number}"


def host_names(hosts: int) -> str:
    """Return the text of every host's `/etc/hosts`: names stand for addresses on the links that are counted."""
    lines = [f"10.77.0.{i} {host_name(i)}" for i in range(1, hosts + 1)]
    return "\n".join(["127.0.0.1 localhost", f"{HEAD_ADDRESS} {HEAD}", *lines, ""])


def hosts_among(namespaces: Iterable[str]) -> int:
    """Count the namespaces that are hosts of ours.

    Example:
        >>> hosts_among(["hvdc-switch", "hvdc-1", "hvdc-2", "hvdc-head", "other"])
        2
    """
    return sum(re.fullmatch(rf"{PREFIX}\d+", name) is not None for name in namespaces)


def host_slots(hosts: int, ranks: int, ranks_per_host: int) -> list[tuple[str, int]]:
    """Return (host, ranks) of the hosts that a run takes: the first are filled up, the last may get fewer.

    Raises:
        ValueError: the ranks do not fit the hosts.

    Example:
        >>> host_slots(4, ranks=5, ranks_per_host=2)
        [('hvdc-1', 2), ('hvdc-2', 2), ('hvdc-3', 1)]
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host}: at least 1")
    if not 1 <= ranks <= hosts * ranks_per_host:
        most = hosts * ranks_per_host
        raise ValueError(
            f"{ranks} ranks on {hosts} hosts with {ranks_per_host} each: give 1 to {most} ranks, more hosts, or more "
            "ranks per host"
        )
    return [
        (host_name(i + 1), min(ranks_per_host, ranks - first))
        for i, first in enumerate(range(0, ranks, ranks_per_host))
    ]


def build_commands(hosts: int) -> list[list[str]]:
    """Return the commands that make namespaces, bridges and links, still without a rate.

    Raises:
        ValueError: not between 1 and 64 hosts.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"{hosts} hosts: give 1 to {MOST_HOSTS}")
    commands = []
    for name in (SWITCH, HEAD, *map(host_name, range(1, hosts + 1))):
        commands.append(_words(f"ip netns add {name}"))
        commands.append([*_words(f"ip netns exec {name} sh -c"), _NO_IPV6])
        commands.append(_words(f"ip -n {name} link set lo up"))
    for bridge in ("data", "control"):
        commands.append(_words(f"ip -n {SWITCH} link add {bridge} type bridge mcast_snooping 0"))
        commands.append(_words(f"ip -n {SWITCH} link set {bridge} up"))
    commands += _link(HEAD, CONTROL, "ctl-head", "control", f"{HEAD_ADDRESS}/24")
    for i in range(1, hosts + 1):
        commands += _link(host_name(i), DATA, f"port{i}", "data", f"10.77.0.{i}/24")
        commands += _link(host_name(i), CONTROL, f"ctl{i}", "control", f"10.78.0.{i}/24")
    return commands


def _link(host: str, interface: str, port: str, bridge: str, address: str) -> list[list[str]]:
    # both ends are made where they belong: the root namespace sees neither of them
    return [
        _words(f"ip -n {SWITCH} link add {port} type veth peer name {interface} netns {host}"),
        _words(f"ip -n {SWITCH} link set {port} master {bridge} up"),
        _words(f"ip -n {host} address add {address} dev {interface}"),
        _words(f"ip -n {host} link set {interface} up"),
    ]


def shape_commands(hosts: int, shape: Shape | None) -> list[list[str]]:
    """Return the commands that give both directions of every host's link a rate, or take it away.

    Example:
        >>> [" ".join(c) for c in shape_commands(1, None)][1]
        'tc -n hvdc-1 qdisc replace dev eth0 root noqueue'
    """
    commands = []
    for i in range(1, hosts + 1):
        for namespace, interface in ((host_name(i), DATA), (SWITCH, f"port{i}")):
            packet = shape.packet if shape else 65536
            commands.append(_words(f"ip -n {namespace} link set {interface} gso_max_size {packet}"))
            bucket = f"tbf rate {shape.rate}bit burst {shape.burst}b limit {shape.queue}b" if shape else "noqueue"
            commands.append(_words(f"tc -n {namespace} qdisc replace dev {interface} root {bucket}"))
    return commands


def link_bytes(text: str) -> tuple[int, int]:
    """Return the bytes sent and received by an interface, from what `ip -json -s link show` prints.

    The kernel counts packets as they reach the interface: one header for all segments that it cuts from one packet.

    Example:
        >>> link_bytes('[{"stats64": {"rx": {"bytes": 7}, "tx": {"bytes": 42}}}]')
        (42, 7)
    """
    stats: Mapping[str, Mapping[str, int]] = json.loads(text)[0]["stats64"]
    return stats["tx"]["bytes"], stats["rx"]["bytes"]


def qdisc_rate(text: str) -> int | None:
    """Return the bits per second of an interface's token bucket, from `tc -json qdisc show`; None without one.

    Example:
        >>> qdisc_rate('[{"kind": "tbf", "options": {"rate": 125000000}}]')
        1000000000
    """
    rates = [8 * q["options"]["rate"] for q in json.loads(text) if q["kind"] == "tbf"]
    return rates[0] if rates else None


def _words(text: str) -> list[str]:
    return text.split()
