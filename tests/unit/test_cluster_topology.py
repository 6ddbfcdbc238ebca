from __future__ import annotations

import json

import pytest
from cluster.links import shape_of
from cluster.topology import (
    build_commands,
    host_names,
    host_slots,
    hosts_among,
    link_bytes,
    qdisc_rate,
    shape_commands,
)


def test_every_command_stays_within_namespaces_of_ours() -> None:
    for command in [*build_commands(3), *shape_commands(3, shape_of(10**9)), *shape_commands(3, None)]:
        if command[:3] in (["ip", "netns", "add"], ["ip", "netns", "exec"]):
            assert command[3].startswith("hvdc-")
        else:
            assert command[0] in ("ip", "tc")
            assert command[1] == "-n"
            assert command[2].startswith("hvdc-")
        if "netns" in command[3:]:  # the far end of a link is made in a namespace, too
            assert command[command.index("netns", 3) + 1].startswith("hvdc-")


def test_hosts_have_names_and_addresses_of_their_own() -> None:
    lines = [" ".join(c) for c in build_commands(2)]
    for name in ("hvdc-switch", "hvdc-head", "hvdc-1", "hvdc-2"):
        assert f"ip netns add {name}" in lines
    addresses = [line.split()[5] for line in lines if " address add " in line]
    assert len(addresses) == len(set(addresses)) == 5  # two of each host, one of the head
    assert host_names(2).splitlines() == [
        "127.0.0.1 localhost",
        "10.78.0.254 hvdc-head",
        "10.77.0.1 hvdc-1",
        "10.77.0.2 hvdc-2",
    ]


@pytest.mark.parametrize("hosts", [-1, 0, 65])
def test_a_number_of_hosts_out_of_range_is_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match=f"{hosts} hosts: give 1 to 64"):
        build_commands(hosts)


def test_both_directions_of_each_link_get_the_rate_and_lose_it() -> None:
    limited = [" ".join(c) for c in shape_commands(2, shape_of(10**8))]
    ends = ["-n hvdc-1 qdisc replace dev eth0", "-n hvdc-switch qdisc replace dev port1"]
    ends += ["-n hvdc-2 qdisc replace dev eth0", "-n hvdc-switch qdisc replace dev port2"]
    assert [line for line in limited if line.startswith("tc")] == [
        f"tc {end} root tbf rate 100000000bit burst 8192b limit 524288b" for end in ends
    ]
    assert sum("gso_max_size 4096" in line for line in limited) == 4
    free = [" ".join(c) for c in shape_commands(2, None)]
    assert [line for line in free if line.startswith("tc")] == [f"tc {end} root noqueue" for end in ends]
    assert sum("gso_max_size 65536" in line for line in free) == 4


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_host", "slots"),
    [
        (4, 4, 1, [1, 1, 1, 1]),
        (4, 8, 2, [2, 2, 2, 2]),
        (4, 2, 2, [2]),
        (2, 3, 2, [2, 1]),
    ],
)
def test_the_first_hosts_are_filled_up(hosts: int, ranks: int, per_host: int, slots: list[int]) -> None:
    assert host_slots(hosts, ranks, per_host) == [(f"hvdc-{i}", n) for i, n in enumerate(slots, 1)]


@pytest.mark.parametrize(
    ("ranks", "per_host", "said"),
    [(5, 2, "5 ranks on 2 hosts with 2 each: give 1 to 4"), (0, 1, "0 ranks on 2 hosts"), (2, 0, "ranks_per_host=0")],
)
def test_ranks_that_do_not_fit_are_refused(ranks: int, per_host: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        host_slots(2, ranks, per_host)


def test_counters_are_read_as_sent_and_received() -> None:
    # as iproute2 prints it, shortened
    text = json.dumps(
        [
            {
                "ifindex": 2,
                "ifname": "eth0",
                "stats64": {"rx": {"bytes": 12, "packets": 1, "errors": 0}, "tx": {"bytes": 34, "packets": 2}},
            }
        ]
    )
    assert link_bytes(text) == (34, 12)


def test_a_rate_is_read_back_from_what_tc_prints() -> None:
    bucket = {"kind": "tbf", "handle": "8001:", "root": True, "options": {"rate": 12_500_000, "burst": 8192}}
    assert qdisc_rate(json.dumps([bucket])) == 10**8
    assert qdisc_rate(json.dumps([{"kind": "noqueue", "root": True, "options": {}}])) is None


def test_only_hosts_are_counted_as_hosts() -> None:
    assert hosts_among(["hvdc-head", "hvdc-switch", "hvdc-12", "hvdc-3", "xhvdc-4", "hvdc-5x"]) == 2
