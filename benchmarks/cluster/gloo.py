"""Start the ranks of a run without MPI, as `horovodrun --gloo` does over ssh; runs on the head.

FOLDER ADDRESS INTERFACE HOST:RANKS,HOST:RANKS... COMMAND...
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

ENTER = Path(__file__).with_name("enter.sh")


def main(folder: str, address: str, interface: str, hosts: str, *command: str) -> int:
    parsed = parse_hosts(hosts)
    slots = get_host_assignments(parsed, sum(host.slots for host in parsed))
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
    shared = create_run_env_vars(address, [interface], port)
    running: dict[int, tuple[subprocess.Popen[bytes], SlotInfo]] = {}
    for slot in slots:
        environment = {**os.environ, **{k: str(v) for k, v in (shared | create_slot_env_vars(slot)).items()}}
        with Path(folder, f"{slot.rank}.out").open("wb") as out, Path(folder, f"{slot.rank}.err").open("wb") as err:
            process = subprocess.Popen(
                [str(ENTER), slot.hostname, f"exec {shlex.join(command)}"], env=environment, stdout=out, stderr=err
            )
        # kept: a Popen that nothing holds is reaped by the next one that is made, and its exit status is lost
        running[process.pid] = process, slot
    while running:
        pid, status = os.wait()
        if pid not in running:
            continue
        process, slot = running.pop(pid)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        if code:
            # whoever started this ends the other ranks, which wait for the failed one
            how = f"returned {code}" if code > 0 else f"was ended by signal {-code}"
            print(f"rank {slot.rank} on {slot.hostname} {how}", flush=True)
            return code if code > 0 else 128 - code
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
