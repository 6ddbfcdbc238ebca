"""The contract of `Ranks` on real ranks: torch's, and the messages of MPI to a root and back."""

from __future__ import annotations

import functools
from unittest import mock

import horovod.torch as horovod
import numpy as np
import torch

from hvd_compress.mpi import start_root_messages
from hvd_compress.torch._ranks import TorchRanks
from tests.parallel.cases import Cases
from tests.ranks_contract import PROGRAMS

cases = Cases()
for title, program in PROGRAMS.items():
    cases[title] = functools.partial(lambda program: program(TorchRanks()), program)


@cases.add
def the_contract_holds_in_inference_mode() -> None:
    with torch.inference_mode():
        for program in PROGRAMS.values():
            program(TorchRanks())


@cases.add
def messages_go_to_their_root_and_back() -> None:
    if not horovod.mpi_enabled():
        return
    everyone = TorchRanks()
    size, position = everyone.size, everyone.position
    first = start_root_messages(horovod, everyone)
    # a second one would have a last word of its own to say at exit, through a communicator that is freed by then
    with mock.patch("hvd_compress.mpi.root_messages.atexit.register") as register:
        messages = [start_root_messages(horovod, everyone) for _ in range(size)]
    assert messages == size * [first]
    assert not register.called
    channels = [of_same.channel() for of_same in messages]
    for channel in channels:
        channel.answer_bytes = 64
    assert {(channel.size, channel.position) for channel in channels} == {(size, position)}
    assert len({channel.name for channel in channels}) == size
    for _ in range(3):
        # in words of 8 bytes, as payloads are; ranks begin with different roots
        order = [(position + i) % size for i in range(size)]
        sizes = [[8 * (1 + position) if rank == root else 0 for rank in range(size)] for root in range(size)]
        sent = {
            root: channels[root].start("alltoall", "to", np.full(64, position, np.uint8), sizes[root], root)
            for root in order
        }
        received = {root: channels[root].wait(sent[root]).tolist() for root in order}
        expected = [rank for rank in range(size) for _ in range(8 * (1 + rank))]
        assert received.pop(position) == expected
        assert not any(received.values())
        for collective in ("broadcast", "allgather"):
            # the others have memory for it, or nothing: then the message tells its length
            numel = 64 if collective == "broadcast" else 16
            mine = {root: np.full(numel * (root == position or numel == 64), position, np.uint8) for root in order}
            handles = {root: channels[root].start(collective, "back", mine[root], None, root) for root in order}
            for root in order:
                assert channels[root].wait(handles[root]).tolist() == [root] * numel
                assert channels[root].is_done(handles[root])
