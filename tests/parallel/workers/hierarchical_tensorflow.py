"""exchange="hierarchical" of the TensorFlow tape against the loopback; hosts as in `hierarchical`, in their order."""

from __future__ import annotations

import os
import socket
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import QSGD, Blockwise, Hierarchical, NoCompression, OneBit, Policy, Threshold, TopK
from hvd_compress.compressors import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import MIN_NUMEL, SHAPES, numbers, raises

FRAMEWORK = "tensorflow"
PROCESS_SETS = [hvd.ProcessSet([0, 1, 2])]
PRETENDED = os.environ.get("HVD_COMPRESS_HOSTS", "")
COMPRESSORS: dict[str, Compressor] = {
    "onebit": OneBit(),
    "topk": TopK(ratio=0.05),
    "threshold": Threshold(0.5),
    "qsgd": QSGD(bits=4),
}
TOGETHER = ("second.weight", "first.weight")

cases = Cases()


def hosts() -> str:
    """A letter for each rank's host."""
    return PRETENDED or "".join("abcd"[i // horovod.local_size()] for i in range(horovod.size()))


def pretend() -> None:
    """Be on the host that the test wants this rank to be on."""
    mine = f"host-{hosts()[horovod.rank()]}"
    if PRETENDED:
        socket.gethostname = lambda: mine


def variables() -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def given(step: int) -> list[tf.Tensor]:
    return [tf.constant(numbers(name, horovod.rank(), step, shape)) for name, shape in SHAPES.items()]


def gradients(of: list[tf.Variable], wanted: list[tf.Tensor], compression: Any, **settings: Any) -> list[tf.Tensor]:
    """What a wrapped tape returns for a loss whose gradients are `wanted`."""
    pretend()
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(of, wanted, strict=True)])
    settings = {"exchange": "hierarchical", "min_numel": MIN_NUMEL, **settings}
    return hvd.DistributedGradientTape(tape, compression=compression, **settings).gradient(loss, of)


@cases.each(COMPRESSORS)
def the_tape_is_the_loopback(compressor: Compressor) -> None:
    check_tape(compressor, "hierarchical")


@cases.add
def the_tape_is_the_loopback_with_two_widths() -> None:
    check_tape(Blockwise(bits=4), Hierarchical(inside=Blockwise(bits=8)))


def check_tape(compressor: Compressor, exchange: str | Hierarchical) -> None:
    of = variables()
    per_host = len(hosts()) // len(set(hosts()))
    loopback = Loopback(horovod.size(), compressor, exchange, ranks_per_host=per_host)

    def eager(wanted: list[tf.Tensor]) -> list[tf.Tensor]:
        return gradients(of, wanted, compressor, exchange=exchange)

    in_graph = tf.function(eager)
    ranks = range(horovod.size())
    for step in range(4):
        found = dict(zip(SHAPES, (in_graph if step % 2 else eager)(given(step)), strict=True))
        of_ranks = [{name: numbers(name, rank, step, SHAPES[name]) for name in TOGETHER} for rank in ranks]
        expected = loopback.grouped_allreduce(of_ranks)[0]
        for name, value in found.items():
            if name in expected:
                assert value.numpy().tobytes() == expected[name].tobytes(), f"{name}, step {step}"
            else:
                mean = np.mean([numbers(name, rank, step, SHAPES[name]) for rank in ranks], axis=0)
                np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


@cases.add
def a_bad_number_takes_what_is_owed_back() -> None:
    of = variables()
    tape = hvd.DistributedGradientTape(
        tf.GradientTape(), compression=OneBit(), exchange="hierarchical", min_numel=MIN_NUMEL
    )
    gradients(of, given(0), OneBit())
    before = tape.compression_state_dict(of)
    spoiled = given(1)
    if horovod.rank() == 2:
        spoiled[1] = spoiled[1] * np.inf  # a small tensor, which travels uncompressed
    found = gradients(of, spoiled, OneBit())
    assert not np.isfinite(found[1]).all()
    after = tape.compression_state_dict(of)
    assert before["residuals"].keys() == set(TOGETHER)
    for kind in ("residuals", "owner_residuals"):
        assert before[kind].keys() == after[kind].keys()
        for name, entry in before[kind].items():
            check_taken_back(after[kind][name]["values"], entry["values"], largest=40.0)


@cases.add
def two_compressors_share_the_hierarchy() -> None:
    policy = Policy([("first.*", OneBit()), ("second.weight", TopK(0.05))], default=NoCompression())
    of = variables()
    step = tf.function(lambda wanted: gradients(of, wanted, policy))
    for i in range(3):
        digest = tf.concat([tf.reshape(g, [-1]) for g in step(given(i))], axis=0)
        everyone = horovod.allgather(digest[None], name="digest").numpy()
        assert len({row.tobytes() for row in everyone}) == 1


@cases.add
def an_uneven_process_set_is_refused_by_all_of_it() -> None:
    (process_set,) = PROCESS_SETS
    if process_set.included() and len(set(hosts()[:3])) > 1:
        said = ("exchange='hierarchical'", "ranks per host", "exchange='two_phase'")
        raises(UnsupportedError, lambda: gradients(variables(), given(0), OneBit(), process_set=process_set), *said)
