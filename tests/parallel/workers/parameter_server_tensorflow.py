"""`ParameterServer` under the TensorFlow tape against the loopback, in eager mode and in tf.function."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import QSGD, AdaGrad, Auto, OneBit, ParameterServer, Percentile, Threshold, TopK
from hvd_compress.errors import UnsupportedError
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import MIN_NUMEL, SHAPES, numbers, raises, ranks_of_start

FRAMEWORK = "tensorflow"
# rank 0 is not among them, so that positions are not ranks
MEMBERS = [1, 2]
PROCESS_SETS = [hvd.ProcessSet(MEMBERS)] if ranks_of_start() > max(MEMBERS) else []

cases = Cases()
COMPRESSORS = {
    "onebit": OneBit(),
    "threshold": Threshold(0.5),
    "qsgd-1-elias": QSGD(bits=1, coding="elias"),
    "topk": TopK(ratio=0.05),
    "percentile-feedback": Percentile(90, error_feedback=True),
}
SERVERS = {
    f"{transport}-{answer}": {"root": 1, "answer": answer, "transport": transport}
    for transport in ("horovod", "mpi")
    for answer in ("compressed", "dense")
}
TOGETHER = ("second.weight", "first.weight")


def server(settings: Any) -> ParameterServer:
    """The exchange of a case; on Gloo, of one with MPI's messages the same with Horovod's collectives."""
    transport = settings["transport"] if horovod.mpi_enabled() else "horovod"
    return ParameterServer(**{**settings, "transport": transport})


def variables() -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def given(step: int) -> list[tf.Tensor]:
    return [tf.constant(numbers(name, horovod.rank(), step, shape)) for name, shape in SHAPES.items()]


def gradients(of: list[tf.Variable], wanted: list[tf.Tensor], compression: Any, **settings: Any) -> list[tf.Tensor]:
    """What a wrapped tape returns for a loss whose gradients are `wanted`."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(of, wanted, strict=True)])
    tape = hvd.DistributedGradientTape(tape, compression=compression, **{"min_numel": MIN_NUMEL, **settings})
    return tape.gradient(loss, of)


def check(found: list[tf.Tensor], loopback: Loopback, step: int, ranks: list[int], tolerance: float = 0.0) -> None:
    of_ranks = [{name: numbers(name, rank, step, SHAPES[name]) for name in TOGETHER} for rank in ranks]
    expected = loopback.grouped_allreduce(of_ranks)[0]
    for name, value in zip(SHAPES, found, strict=True):
        if name in expected and not tolerance:
            assert value.numpy().tobytes() == expected[name].tobytes(), f"{name}, step {step}"
        else:
            mean = np.mean([numbers(name, rank, step, SHAPES[name]) for rank in ranks], axis=0)
            np.testing.assert_allclose(value, mean, rtol=tolerance or 1e-5, atol=tolerance or 1e-6)


@cases.each({f"{c}-{s}": (COMPRESSORS[c], SERVERS[s]) for c in COMPRESSORS for s in SERVERS}, thorough="mpi-")
def the_tape_is_the_loopback(setting: Any) -> None:
    compressor, exchange = setting[0], server(setting[1])
    of, loopback = variables(), Loopback(horovod.size(), compressor, exchange)

    def eager(wanted: list[tf.Tensor]) -> list[tf.Tensor]:
        return gradients(of, wanted, compressor, exchange=exchange)

    in_graph = tf.function(eager)
    for step in range(4):
        check((in_graph if step % 2 else eager)(given(step)), loopback, step, list(range(horovod.size())))


@cases.each(SERVERS, thorough="mpi-")
def buckets_go_round(setting: Any) -> None:
    exchange = server({**setting, "root": "round_robin"})
    of, loopback = variables(), Loopback(horovod.size(), TopK(0.05), exchange)
    step_of = tf.function(lambda wanted: gradients(of, wanted, TopK(0.05), exchange=exchange, bucket_bytes=0))
    for step in range(4):
        for name, found in zip(SHAPES, step_of(given(step)), strict=True):
            arrays = [numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())]
            if name in TOGETHER:
                assert found.numpy().tobytes() == loopback.allreduce(arrays, name)[0].tobytes(), (name, step)


@cases.each({f"{c}-{s}": (c, SERVERS[s]) for c in ("none", "fp16") for s in SERVERS}, thorough="mpi-")
def uncompressed_gradients_are_gathered_too(setting: Any) -> None:
    compression, exchange = getattr(hvd.Compression, setting[0]), server(setting[1])
    of = variables()
    for step in range(2):
        found = gradients(of, given(step), compression, exchange=exchange)
        for name, value in zip(SHAPES, found, strict=True):
            mean = np.mean([numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())], axis=0)
            np.testing.assert_allclose(value, mean, atol=1e-6 if setting[0] == "none" else 2e-3)
    tape = hvd.DistributedGradientTape(
        tf.GradientTape(), compression=compression, exchange=exchange, min_numel=MIN_NUMEL
    )
    assert tape.compression_stats(of)["tensors"]["first.weight"]["exchange"] == "parameter_server"


@cases.each(SERVERS, thorough="mpi-")
def a_bad_number_takes_what_is_owed_back(setting: Any) -> None:
    of, settings = variables(), {"exchange": server(setting), "min_numel": MIN_NUMEL}
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=OneBit(), **settings)
    gradients(of, given(0), OneBit(), **settings)
    before = tape.compression_state_dict(of)
    spoiled = given(1)
    if horovod.rank() == 0:
        spoiled[0] = spoiled[0] * np.inf
    assert not np.isfinite(gradients(of, spoiled, OneBit(), **settings)[0]).all()
    after = tape.compression_state_dict(of)
    for kind in ("residuals", "owner_residuals"):
        assert before[kind].keys() == after[kind].keys()
        for name, entry in before[kind].items():
            check_taken_back(after[kind][name]["values"], entry["values"], largest=40.0)
    # and the next step is one like any other
    assert all(np.isfinite(g).all() for g in gradients(of, given(2), OneBit(), **settings))


@cases.each(SERVERS, thorough="mpi-")
def the_root_makes_updates_of_adagrad(setting: Any) -> None:
    exchange = server(setting)
    of, loopback = variables(), Loopback(horovod.size(), OneBit(), exchange, adagrad=AdaGrad(1e-6))
    for step in range(3):
        found = gradients(of, given(step), OneBit(), exchange=exchange, adagrad=AdaGrad(1e-6), bucket_bytes=0)
        for name, value in zip(SHAPES, found, strict=True):
            arrays = [numbers(name, rank, step, SHAPES[name]) for rank in range(horovod.size())]
            if name in TOGETHER:
                assert value.numpy().tobytes() == loopback.allreduce(arrays, name)[0].tobytes(), (name, step)


@cases.each(SERVERS, thorough="mpi-")
def positions_are_those_in_the_process_set(setting: Any) -> None:
    if horovod.size() < 3:
        return
    exchange = server(setting)
    of, loopback = variables(), Loopback(2, OneBit(), exchange)
    for step in range(2):
        found = gradients(of, given(step), OneBit(), exchange=exchange, process_set=PROCESS_SETS[0])
        if horovod.rank():
            check(found, loopback, step, MEMBERS)


@cases.each(SERVERS, thorough="mpi-")
def two_exchanges_share_a_graph(setting: Any) -> None:
    exchanges = [server(setting), server({**setting, "root": 0})]
    both = [variables(), variables()]
    loopbacks = [Loopback(horovod.size(), OneBit(), exchange) for exchange in exchanges]

    @tf.function
    def step_of(wanted: list[tf.Tensor]) -> list[list[tf.Tensor]]:
        return [gradients(of, wanted, OneBit(), exchange=e) for of, e in zip(both, exchanges, strict=True)]

    for step in range(5):
        for found, loopback in zip(step_of(given(step)), loopbacks, strict=True):
            check(found, loopback, step, list(range(horovod.size())))


@cases.add
def what_cannot_be_is_refused_by_all() -> None:
    def with_(compression: Any, exchange: Any) -> Any:
        return lambda: gradients(variables(), given(0), compression, exchange=exchange)

    raises(UnsupportedError, with_(OneBit(), ParameterServer(root=7)), "root=7", "from 0 to")
    raises(UnsupportedError, with_(Auto(), ParameterServer()), "leave the exchange to it")
    raises(ValueError, with_(OneBit(), "server"), "ParameterServer")
    if not horovod.mpi_enabled():
        raises(UnsupportedError, with_(OneBit(), ParameterServer(transport="mpi")), "Gloo", "horovod")
