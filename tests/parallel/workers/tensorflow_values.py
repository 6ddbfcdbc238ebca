"""`hvd_compress.tensorflow` against the loopback, stock Horovod and arithmetic, in eager mode and in tf.function."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import QSGD, NoCompression, OneBit, Policy, Threshold, TopK
from hvd_compress.elastic import note_parting
from hvd_compress.engine import DEFAULT_BUCKET_BYTES
from hvd_compress.errors import MismatchError, StateError, UnsupportedError
from hvd_compress.exchange import kinds
from hvd_compress.loopback import Loopback
from tests.close import check_taken_back
from tests.outsider import EveryOther, SignSum
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import COMPRESSORS_AND_EXCHANGES, MIN_NUMEL, SHAPES, WITNESSES, numbers, raises

FRAMEWORK = "tensorflow"

EXCHANGE = "two_phase"

cases = Cases()
_runs = itertools.count()


def variables(dtype: tf.DType = tf.float32) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in SHAPES.items()]


def given(step: int, rank: int | None = None, dtype: tf.DType = tf.float32) -> list[tf.Tensor]:
    rank = horovod.rank() if rank is None else rank
    return [tf.cast(numbers(name, rank, step, shape), dtype) for name, shape in SHAPES.items()]


def wrapped(tape: tf.GradientTape, compression: Any = None, **settings: Any) -> Any:
    settings = {"exchange": EXCHANGE, "min_numel": MIN_NUMEL, "bucket_bytes": 0, **settings}
    return hvd.DistributedGradientTape(tape, compression=compression or OneBit(), **settings)


def gradients(of: Sequence[Any], wanted: Sequence[tf.Tensor], wrap: Callable[[Any], Any]) -> list[Any]:
    """What a wrapped tape returns for a loss whose gradients are `wanted`."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.cast(v * g, tf.float64)) for v, g in zip(of, wanted, strict=True)])
    return wrap(tape).gradient(loss, of)


def check_against(
    loopback: Loopback, name: str, found: tf.Tensor, step: int, ranks: Sequence[int], op: str = "average"
) -> None:
    arrays = [numbers(name, rank, step, SHAPES[name]) for rank in ranks]
    if arrays[0].size >= MIN_NUMEL:
        assert found.numpy().tobytes() == loopback.allreduce(arrays, name=name)[0].tobytes(), f"{name}, step {step}"
    else:
        combined = np.mean(arrays, axis=0) if op == "average" else np.sum(arrays, axis=0)
        np.testing.assert_allclose(found, combined, rtol=1e-5, atol=1e-6)


def whatever_the_bytes(case: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorator: tensors are compressed whose payloads, gathered by four ranks, take as much as an allreduce, too."""

    @functools.wraps(case)
    def compressing(setting: Any) -> None:
        with mock.patch.object(kinds, "saves_bytes", return_value=True):
            case(setting)

    return compressing


@cases.each(
    COMPRESSORS_AND_EXCHANGES,
    witnesses=[*WITNESSES, "bf16-two_phase"],
)
@whatever_the_bytes
def the_tape_is_the_loopback(setting: Any) -> None:
    compressor, exchange = setting
    for op, name_of_op in ((hvd.Average, "average"), (hvd.Sum, "sum")):
        of, loopback = variables(), Loopback(horovod.size(), compressor, exchange, name_of_op)

        def step(wanted: Any, of: Any = of, op: Any = op) -> Any:
            return gradients(of, wanted, lambda tape: wrapped(tape, compressor, exchange=exchange, op=op))

        in_graph = tf.function(step)
        for i in range(4):
            for name, found in zip(SHAPES, (in_graph if i % 2 else step)(given(i)), strict=True):
                check_against(loopback, name, found, i, range(horovod.size()), name_of_op)


@cases.each({f"{e}": ("signsum:0.5", e) for e in ("two_phase", "allgather")} | {"own": ("signsum:0.5", EveryOther())})
@whatever_the_bytes
def a_compressor_of_a_users_file_is_the_loopback(setting: Any) -> None:
    compression, exchange = setting
    of, loopback = variables(), Loopback(horovod.size(), SignSum(0.5), exchange)

    def step(wanted: Any) -> Any:
        return gradients(of, wanted, lambda tape: wrapped(tape, compression, exchange=exchange))

    in_graph = tf.function(step)
    for i in range(4):
        for name, found in zip(SHAPES, (in_graph if i % 2 else step)(given(i)), strict=True):
            check_against(loopback, name, found, i, range(horovod.size()))


@cases.each({"none": hvd.Compression.none, "fp16": hvd.Compression.fp16})
def without_a_compressor_the_tape_is_horovods(compression: Any) -> None:
    for settings in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}):
        of = variables()
        # small whole numbers: their sums are exact in any order, which fusion may change
        wanted = [tf.round(4 * g) for g in given(0)]
        mine = gradients(of, wanted, lambda t, s=settings: hvd.DistributedGradientTape(t, compression=compression, **s))
        theirs = gradients(
            of, wanted, lambda t, s=settings: horovod.DistributedGradientTape(t, compression=compression, **s)
        )
        for a, b in zip(mine, theirs, strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes(), settings


@cases.add
def without_a_compressor_random_numbers_are_horovods_too() -> None:
    of = variables()
    mine = gradients(of, given(0), hvd.DistributedGradientTape)
    theirs = gradients(of, given(0), horovod.DistributedGradientTape)
    for a, b in zip(mine, theirs, strict=True):
        if horovod.size() == 2:
            assert a.numpy().tobytes() == b.numpy().tobytes()
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@cases.add
def one_value_that_is_not_finite_takes_all_residuals_back() -> None:
    for where in range(len(SHAPES)):
        of = variables()
        wrap = wrapped
        for i in range(2):
            gradients(of, given(i), wrap)
        before = wrapped(tf.GradientTape()).compression_state_dict(of)
        spoiled = given(2)
        if horovod.rank() == horovod.size() - 1:
            spoiled[where] = tf.concat([spoiled[where][:-1], spoiled[where][-1:] + np.inf], axis=0)
        found = gradients(of, spoiled, wrap)
        assert not np.isfinite(found[where]).all()
        after = wrapped(tf.GradientTape()).compression_state_dict(of)
        for kind in ("residuals", "owner_residuals"):
            for name, entry in before[kind].items():
                check_taken_back(after[kind][name]["values"], entry["values"], largest=40.0)


@cases.add
def a_loop_in_the_graph_keeps_steps_apart() -> None:
    # the gradient does not depend on the variable: nothing but the exchange itself orders the steps
    v, loopback = tf.Variable(tf.zeros([64, 300])), Loopback(horovod.size(), TopK(0.02), "two_phase")
    constant = tf.constant(numbers("loop", horovod.rank(), 0, (64, 300)))

    @tf.function
    def loop() -> None:
        for _ in tf.range(10):
            (found,) = gradients([v], [constant], lambda tape: wrapped(tape, TopK(0.02), min_numel=0))
            v.assign_add(found)

    loop()
    expected = np.zeros((64, 300), np.float32)
    for _ in range(10):
        arrays = [numbers("loop", rank, 0, (64, 300)) for rank in range(horovod.size())]
        expected += loopback.allreduce(arrays, name=v.name.partition(":")[0])[0]
    assert v.numpy().tobytes() == expected.tobytes()


@cases.add
def a_result_that_is_not_used_still_completes_the_step() -> None:
    of, loopback = variables(), Loopback(horovod.size(), OneBit(), EXCHANGE)

    @tf.function
    def step(wanted: Any) -> Any:
        return gradients(of, wanted, wrapped)[0]

    for i in range(3):
        found = step(given(i))
        check_against(loopback, "first.weight", found, i, range(horovod.size()))
    assert wrapped(tf.GradientTape()).compression_stats(of)["tensors"]["second.weight"]["steps"] == 3


@cases.each({"float16": tf.float16, "bfloat16": tf.bfloat16, "float64": tf.float64})
def other_types(dtype: tf.DType) -> None:
    of, loopback = variables(dtype), Loopback(horovod.size(), OneBit(), EXCHANGE)
    found = gradients(of, given(0, dtype=dtype), wrapped)
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    for i, (name, combined) in enumerate(zip(SHAPES, found, strict=True)):
        assert combined.dtype == dtype
        arrays = [tf.cast(given(0, rank, dtype)[i], wide).numpy() for rank in range(horovod.size())]
        if arrays[0].size >= MIN_NUMEL:
            expected = tf.cast(loopback.allreduce(arrays, name=name)[0], dtype)
            assert tf.reduce_all(expected == combined), name
        else:
            np.testing.assert_allclose(tf.cast(combined, tf.float32), np.mean(arrays, axis=0), rtol=0.02, atol=0.02)


@cases.add
def sparse_gradients() -> None:
    table = tf.Variable(tf.ones([500, 31]), name="table")
    indices = tf.constant([3, 7 + horovod.rank(), 400])

    def run(wrap: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, indices) * (1.0 + horovod.rank()))
        return wrap(tape).gradient(loss, [table])[0]

    mine, theirs = run(wrapped), run(horovod.DistributedGradientTape)
    assert isinstance(mine, tf.IndexedSlices)
    assert tf.reduce_all(tf.convert_to_tensor(mine) == tf.convert_to_tensor(theirs))
    dense = run(lambda tape: wrapped(tape, TopK(0.5), sparse_as_dense=True))
    np.testing.assert_allclose(dense, tf.convert_to_tensor(theirs), rtol=1e-6)


@cases.add
def sparse_tensors_of_a_compressed_group_stay_sparse() -> None:
    ranks, rank = horovod.size(), horovod.rank()
    x, y = (tf.constant(numbers(name, rank, 0, (40, 30))) for name in ("x", "y"))
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([rank, 7]), tf.constant([20, 3]))
    expected = np.zeros((20, 3), np.float32)
    expected[7] = 1.0
    expected[:ranks] += 1 / ranks
    for name in (None, "some"):
        first, sparse, second = hvd.grouped_allreduce([x, rows, y], compression=OneBit(), name=name)
        assert isinstance(sparse, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-6)
        assert first.shape == second.shape == (40, 30)
        (alone,) = hvd.grouped_allreduce(
            [rows], compression=OneBit(), name=name and f"{name}.alone", prescale_factor=2.0, postscale_factor=0.25
        )
        np.testing.assert_allclose(tf.convert_to_tensor(alone), expected / 2, rtol=1e-6)


@cases.each({"sparse": False, "as dense": True})
def gradients_with_other_numbers_of_rows_make_no_graph_each(as_dense: bool) -> None:
    table = tf.Variable(tf.ones([50, 4]), name="rows")
    for rows in range(2, 9):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, tf.range(rows)))
        tape = wrapped(tape, TopK(0.5), sparse_as_dense=as_dense, min_numel=1)
        (found,) = tape.gradient(loss, [table])
        expected = np.zeros((50, 4), np.float32)
        expected[:rows] = 1.0
        np.testing.assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-6)
    assert tape._exchange_of([table])._compiled.experimental_get_tracing_count() <= 3


@cases.add
def local_sources_stay_local() -> None:
    of, wanted = variables(), given(0)

    def wrap(tape: Any) -> Any:
        tape = wrapped(tape)
        tape.register_local_source(of[0])
        return tape

    found = gradients(of, wanted, wrap)
    np.testing.assert_allclose(found[0], wanted[0] / horovod.size(), rtol=1e-6)
    check_against(Loopback(horovod.size(), OneBit(), EXCHANGE), "second.weight", found[2], 0, range(horovod.size()))
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in of])
    local, shared = wrap(tape).get_local_and_global_gradients(loss, of)
    assert [v is of[0] for v, _ in local] == [True]
    assert len(shared) == 3


@cases.add
def missing_gradients_stay_missing_and_structures_are_kept() -> None:
    of = variables()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(of[0] * 2.0)
    found = wrapped(tape).gradient(loss, {"a": of[0], "b": [of[1], of[2]]})
    assert found["b"] == [None, None]
    np.testing.assert_allclose(found["a"], 2.0, rtol=1e-6)


@cases.add
def two_lists_of_variables_of_the_same_names_do_not_meet() -> None:
    one, other = variables(), variables()

    @tf.function
    def both(wanted: Any) -> Any:
        return gradients(one, wanted, wrapped), gradients(other, [2.0 * g for g in wanted], wrapped)

    loopbacks = Loopback(horovod.size(), OneBit(), EXCHANGE), Loopback(horovod.size(), OneBit(), EXCHANGE)
    for i in range(2):
        first, second = both(given(i))
        for loopback, found, factor in ((loopbacks[0], first, 1), (loopbacks[1], second, 2)):
            arrays = [factor * numbers("first.weight", r, i, SHAPES["first.weight"]) for r in range(horovod.size())]
            assert found[0].numpy().tobytes() == loopback.allreduce(arrays, name="first.weight")[0].tobytes()


@cases.each({"dense": None, "compressed": OneBit()})
def steps_of_a_loop_in_a_graph_take_turns(compression: Any) -> None:
    weight = tf.Variable(tf.zeros((48, 601)), name="turns")
    inputs = tf.constant(np.stack([numbers("turns", horovod.rank(), i, (48, 601)) for i in range(5)]))

    # nothing in an iteration depends on the one before
    @tf.function
    def accumulated() -> tf.Tensor:
        total = tf.zeros_like(weight)
        for i in tf.range(5):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * inputs[i])
            settings = {} if compression is None else {"compression": compression, "min_numel": 0}
            total += hvd.DistributedGradientTape(tape, **settings).gradient(loss, [weight])[0]
        return total

    ranks = range(horovod.size())
    expected = sum(numbers("turns", rank, i, (48, 601)) for rank in ranks for i in range(5)) / horovod.size()
    found = accumulated().numpy()
    if compression is None:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        loopback = Loopback(horovod.size(), compression)
        steps = [
            loopback.allreduce([numbers("turns", r, i, (48, 601)) for r in ranks], name="turns")[0] for i in range(5)
        ]
        np.testing.assert_allclose(found, np.sum(steps, axis=0), rtol=1e-4, atol=1e-4)


def keras_variables_are_broadcast() -> None:
    of = [keras.Variable(np.full(3, horovod.rank() + 1.0, np.float32), name=f"broadcast_{i}") for i in range(2)]
    hvd.broadcast_variables(of, root_rank=0)
    assert [float(v.value[0]) for v in of] == [1.0, 1.0]


def keras_variables() -> None:
    of = [keras.Variable(np.zeros(shape, np.float32), name=name.replace(".", "_")) for name, shape in SHAPES.items()]
    found = gradients(of, given(0), lambda tape: wrapped(tape, TopK(0.5)))
    assert set(wrapped(tf.GradientTape(), TopK(0.5)).compression_stats(of)["tensors"]) == {v.path for v in of}
    assert [tuple(g.shape) for g in found] == list(SHAPES.values())


if hasattr(keras, "Variable"):  # Keras 3
    cases.add(keras_variables)
    cases.add(keras_variables_are_broadcast)


# -- tensors that share exchanges --------------------------------------------------------------------------------------

# in the order of the backward pass
TOGETHER = ("second.weight", "first.weight")
PACKED = ("first.bias", "second.bias")


def mean_of_pack(name: str, step: int) -> np.ndarray:
    """All ranks add in the order of the ranks."""
    total = numbers(name, 0, step, SHAPES[name])
    for rank in range(1, horovod.size()):
        total = total + numbers(name, rank, step, SHAPES[name])
    return total * np.float32(1 / horovod.size())


def of_all(names: Sequence[str], step: int) -> list[dict[str, np.ndarray]]:
    return [{name: numbers(name, rank, step, SHAPES[name]) for name in names} for rank in range(horovod.size())]


def shared(tape: tf.GradientTape, compression: Any = None, **settings: Any) -> Any:
    return wrapped(tape, compression, **{"bucket_bytes": DEFAULT_BUCKET_BYTES, **settings})


@cases.each(
    {
        f"{name}-{exchange}-{label}": (compressor, exchange, bucket_bytes, buckets)
        for name, compressor in {"topk": TopK(0.05), "qsgd": QSGD(bits=4), "threshold": Threshold(0.5)}.items()
        for exchange in ("two_phase", "allgather")
        for label, bucket_bytes, buckets in (
            ("tiny", 1, [[name] for name in TOGETHER]),
            ("default", DEFAULT_BUCKET_BYTES, [list(TOGETHER)]),
        )
    },
    witnesses=[
        "topk-two_phase-tiny",
        "topk-allgather-default",
        "qsgd-two_phase-default",
        "qsgd-allgather-tiny",
        "threshold-two_phase-tiny",
        "threshold-allgather-default",
    ],
)
@whatever_the_bytes
def buckets_are_the_grouped_loopback(setting: Any) -> None:
    compressor, exchange, bucket_bytes, buckets = setting
    of, loopback = variables(), Loopback(horovod.size(), compressor, exchange)

    def step(wanted: Any) -> Any:
        return gradients(of, wanted, lambda t: shared(t, compressor, exchange=exchange, bucket_bytes=bucket_bytes))

    in_graph = tf.function(step)
    for i in range(4):
        found = dict(zip(SHAPES, (in_graph if i % 2 else step)(given(i)), strict=True))
        for names in buckets:
            for name, expected in loopback.grouped_allreduce(of_all(names, i))[0].items():
                assert found[name].numpy().tobytes() == expected.tobytes(), (name, i)
        for name in PACKED:
            assert found[name].numpy().tobytes() == mean_of_pack(name, i).tobytes(), (name, i)
    stats = shared(tf.GradientTape(), compressor, exchange=exchange, bucket_bytes=bucket_bytes).compression_stats(of)
    assert {stats["tensors"][name]["exchange"] for name in PACKED} == {f"{exchange}, uncompressed"}
    assert {of_tensor["steps"] for of_tensor in stats["tensors"].values()} == {4}


@cases.each(
    {
        "a-compressed-one": ("first.weight",),
        "a-small-one": ("second.bias",),
        "one-of-each": ("second.weight", "first.bias"),
    }
)
def gradients_that_are_none_are_left_out_of_their_bucket(left_out: tuple[str, ...]) -> None:
    # chunks are whole rows: what is sent of a tensor does not depend on what it shares an exchange with
    of, loopback = variables(), Loopback(horovod.size(), OneBit(), EXCHANGE)

    def partly(wanted: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = zip(SHAPES, of, wanted, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * g) for name, v, g in parts if name not in left_out])
        return shared(tape).gradient(loss, of)

    for i, step in enumerate((None, partly, tf.function(partly), None)):
        before = shared(tf.GradientTape()).compression_state_dict(of)["residuals"]
        found = gradients(of, given(i), shared) if step is None else step(given(i))
        after = shared(tf.GradientTape()).compression_state_dict(of)["residuals"]
        for name, combined in zip(SHAPES, found, strict=True):
            if step is not None and name in left_out:
                assert combined is None
                assert name in PACKED or before[name]["values"].tobytes() == after[name]["values"].tobytes()
            else:
                check_against(loopback, name, combined, i, range(horovod.size()))


@cases.add
def a_bucket_without_any_gradient_sends_nothing() -> None:
    of = [*variables(), tf.Variable(tf.zeros([10]), name="other")]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(of[-1] * float(horovod.rank()))
    found = shared(tape, bucket_bytes=4 * 48 * 601).gradient(loss, of)
    assert found[:3] == [None] * 3
    np.testing.assert_allclose(found[-1], np.mean(range(horovod.size())))
    tensors = shared(tf.GradientTape(), bucket_bytes=4 * 48 * 601).compression_stats(of)["tensors"]
    assert tensors["first.weight"]["bytes_sent"] == 0


@cases.add
def sparse_gradients_are_left_out_of_their_bucket() -> None:
    table, weight = tf.Variable(tf.ones([500, 31]), name="table"), tf.Variable(tf.zeros([48, 601]), name="first.weight")
    loopback = Loopback(horovod.size(), OneBit(), EXCHANGE)

    indices = [3, 7 + horovod.rank(), 400]

    def run(step: int, sparse: bool) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, indices) if sparse else tf.one_hot(indices, 500) @ table
            loss = tf.reduce_sum(rows * (1.0 + horovod.rank())) + tf.reduce_sum(weight * given(step)[0])
        return shared(tape).gradient(loss, [table, weight])

    def owed() -> list[bytes]:
        state = shared(tf.GradientTape()).compression_state_dict([table, weight])
        kinds = ("residuals", "owner_residuals")
        return [state[kind]["table"]["values"].tobytes() for kind in kinds if "table" in state[kind]]

    expected = np.zeros([500, 31])
    for rank in range(horovod.size()):
        expected[[3, 7 + rank, 400]] += (1.0 + rank) / horovod.size()
    for step, sparse in enumerate((False, True, True, False)):
        before = owed() if step else []
        of_table, of_weight = run(step, sparse)
        check_against(loopback, "first.weight", of_weight, step, range(horovod.size()))
        assert isinstance(of_table, tf.IndexedSlices) == sparse
        if sparse:
            np.testing.assert_allclose(tf.convert_to_tensor(of_table), expected, rtol=1e-6)
            assert before
            assert owed() == before


@cases.each({"inf": np.inf, "nan": np.nan})
def a_bad_number_in_a_small_tensor_stays_where_it_is(value: float) -> None:
    of = variables()
    for i in range(2):
        gradients(of, given(i), shared)
    before = shared(tf.GradientTape()).compression_state_dict(of)
    spoiled = given(2)
    if horovod.rank() == horovod.size() - 1:
        spoiled[1] = tf.concat([spoiled[1][:-1], [value]], axis=0)
    found = gradients(of, spoiled, shared)
    np.testing.assert_equal(float(found[1][-1]), value)
    assert found[1][:-1].numpy().tobytes() == mean_of_pack("first.bias", 2)[:-1].tobytes()
    assert all(np.isfinite(found[i]).all() for i in (0, 2, 3))
    after = shared(tf.GradientTape()).compression_state_dict(of)
    for kind in ("residuals", "owner_residuals"):
        assert before[kind]
        for name, entry in before[kind].items():
            check_taken_back(after[kind][name]["values"], entry["values"], largest=40.0)


@cases.add
def buckets_in_a_loop_of_a_graph_take_turns() -> None:
    of, loopback = variables(), Loopback(horovod.size(), TopK(0.05), EXCHANGE)
    wanted = [tf.stack([given(i)[j] for i in range(4)]) for j in range(len(SHAPES))]

    @tf.function
    def accumulated() -> Any:
        totals = [tf.zeros_like(v) for v in of]
        for i in tf.range(4):
            found = gradients(of, [w[i] for w in wanted], lambda tape: shared(tape, TopK(0.05)))
            totals = [total + g for total, g in zip(totals, found, strict=True)]
        return totals

    expected = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for i in range(4):
        for name, combined in loopback.grouped_allreduce(of_all(TOGETHER, i))[0].items():
            expected[name] += combined
        for name in PACKED:
            expected[name] += mean_of_pack(name, i)
    for name, total in zip(SHAPES, accumulated(), strict=True):
        assert total.numpy().tobytes() == expected[name].tobytes(), name


@cases.add
def ranks_that_disagree_on_the_size_of_buckets_are_told_so() -> None:
    def make() -> None:
        gradients(variables(), given(0), lambda tape: wrapped(tape, bucket_bytes=100 + horovod.rank()))

    raises(MismatchError, make, "bucket_bytes", "100", "101")


@cases.each({"loading": True, "not loading": False})
def a_resumed_run_is_bit_identical(loads: bool) -> None:
    of = variables()
    for i in range(2):
        gradients(of, given(i), wrapped)
    tape = wrapped(tf.GradientTape())
    state = tape.compression_state_dict(of)
    expected = gradients(of, given(2), wrapped)
    again = variables()
    if loads:
        tape.load_compression_state_dict(state, again)
    found = gradients(again, given(2), wrapped)
    same = [a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(expected, found, strict=True)]
    # the dense ones have no state
    assert same == [loads, True, loads, True]
    raises(StateError, lambda: tape.load_compression_state_dict({**state, "rank": 99}, again), "is 99")
    other = {**state, "rank": 1 - horovod.rank() if horovod.rank() < 2 else 0}
    raises(StateError, lambda: tape.load_compression_state_dict(other, again), "save a state on each rank")


@cases.add
def statistics_count_what_is_sent() -> None:
    of = variables()
    for i in range(3):
        gradients(of, given(i), wrapped)
    stats = wrapped(tf.GradientTape()).compression_stats(of)
    loopback = Loopback(horovod.size(), OneBit(), EXCHANGE)
    for i in range(3):
        for name in ("first.weight", "second.weight"):
            loopback.allreduce([numbers(name, r, i, SHAPES[name]) for r in range(horovod.size())], name=name)
    tensors = stats["tensors"]
    sent = sum(tensors[name]["bytes_sent"] for name in ("first.weight", "second.weight"))
    assert sent == loopback.bytes_sent[horovod.rank()]
    assert tensors["first.bias"]["exchange"] == "dense"
    assert stats["total"]["steps"] == 3
    assert stats["total"]["residual_norm"] > 0
    assert all(stats["total"][f"{kind}_seconds"] > 0 for kind in ("encode", "exchange", "decode"))


@cases.add
def functions() -> None:
    ranks, loopback = range(horovod.size()), Loopback(horovod.size(), OneBit())
    shape = (48, 601)
    of_rank = [[numbers("f", rank, i, shape) for rank in ranks] for i in range(3)]
    name = f"tensor{next(_runs)}"
    in_graph = tf.function(lambda x: hvd.allreduce(x, name=name, compression=OneBit()))
    for i in range(3):
        call = in_graph if i == 1 else lambda x: hvd.allreduce(x, name=name, compression=OneBit())
        assert (
            call(of_rank[i][horovod.rank()]).numpy().tobytes() == loopback.allreduce(of_rank[i], name=name)[0].tobytes()
        )
    unnamed = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=OneBit(), prescale_factor=0.5))
    for i in range(2):
        fresh = Loopback(horovod.size(), OneBit(), op="sum")
        expected = 0.5 * fresh.allreduce(of_rank[i], name="any")[0]
        np.testing.assert_array_equal(unnamed(of_rank[i][horovod.rank()]), expected)
    together = hvd.grouped_allreduce([of_rank[0][horovod.rank()]] * 2, name=f"group{name}", compression=OneBit())
    fresh = Loopback(horovod.size(), OneBit())
    np.testing.assert_array_equal(together[1], fresh.allreduce(of_rank[0], name="any")[0])
    x = tf.constant(of_rank[0][horovod.rank()])
    raises(UnsupportedError, lambda: hvd.allreduce(x, op=hvd.Max, compression=OneBit()), "op=Average or op=Sum")

    def differentiate() -> None:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, name=f"{name}.d", compression=OneBit())
        tape.gradient(y, x)

    raises(UnsupportedError, differentiate, "stop_gradient")


@cases.add
def ranks_that_disagree_are_told_so() -> None:
    pi = TopK(0.1 if horovod.rank() == 0 else 0.2)
    raises(MismatchError, lambda: gradients(variables(), given(0), lambda t: wrapped(t, pi)), "ratio", "0.1", "0.2")


@cases.each(
    {
        "op": ({"op": (hvd.Average, hvd.Sum)}, "op"),
        "factor": ({"prescale_factor": (1.0, 2.0)}, "prescale_factor"),
        "compressor": ({"compression": (OneBit(), TopK(0.1))}, "onebit"),
        "feedback": ({"compression": (OneBit(), OneBit(error_feedback=False))}, "error_feedback"),
        "dtype": ({"tensor": (tf.ones([100, 300]), tf.ones([100, 300], tf.float64))}, "float64"),
        "shape": ({"tensor": (tf.ones([100, 300]), tf.ones([101, 300]))}, "101"),
    }
)
def calls_that_differ_are_told_so_on_all_ranks(setting: Any) -> None:
    given_to, told = setting
    mine = {key: of_ranks[min(horovod.rank(), 1)] for key, of_ranks in given_to.items()}
    arguments = {"tensor": tf.ones([100, 300]), "compression": OneBit(), **mine}
    name = f"differs{next(_runs)}"
    for named in (name, None):
        raises(MismatchError, lambda named=named: hvd.allreduce(name=named, **arguments), told)
        # AutoGraph makes another error of it
        raises(Exception, lambda named=named: tf.function(hvd.allreduce)(name=named, **arguments), told)
    # and nothing is left behind
    found = hvd.allreduce(tf.ones([100, 300]), name=f"{name}.after", compression=OneBit())
    np.testing.assert_allclose(found, np.ones([100, 300]))


@cases.add
def one_rank_that_does_not_compress_is_an_error_on_all() -> None:
    compression = OneBit() if horovod.rank() == 0 else hvd.Compression.none
    x, name = tf.ones([100, 300]), f"partly{next(_runs)}"

    def scoped() -> Any:
        with tf.name_scope("outer"):
            return hvd.allreduce(x, name=name, compression=compression)

    calls = (
        lambda: hvd.allreduce(x, name=name, compression=compression),
        lambda: hvd.allreduce(x, compression=compression),
        tf.function(lambda: hvd.allreduce(x, name=f"{name}.graph", compression=compression)),
        tf.function(scoped),
    )
    for call in calls:
        # of an operation in a graph, it is Horovod's error
        raises(Exception, call, "ismatch")


# -- types and shapes that Horovod's TensorFlow does not know ------------------------------------------------------

TYPES = {
    dtype.name: dtype
    for dtype in (
        tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool, tf.int8, tf.uint8,
        tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64,
    )
}  # fmt: skip
# one of each class that goes another way
MOVED_BY_CLASS = ["bfloat16", "float32", "complex64", "bool", "uint16", "uint32"]
SUMMED_BY_CLASS = ["bfloat16", "float32", "complex64", "int8", "int32", "bool", "uint32"]
SUMMED = (
    tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.int8, tf.uint8, tf.int32, tf.int64,
)  # fmt: skip


def of_rank(rank: int, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    value = tf.cast(tf.fill(shape, rank + 1), dtype)
    return value * tf.constant(1 + 2j, dtype) if dtype.is_complex else value


def same_numbers(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert tf.reduce_all(tf.equal(found, expected)), (found, expected)


@cases.each(TYPES, witnesses=MOVED_BY_CLASS)
def an_elastic_state_holds_every_type(dtype: tf.DType) -> None:
    shapes = ((3, 5), (), (0, 3))
    mine = [tf.Variable(of_rank(horovod.rank(), shape, dtype)) for shape in shapes]
    state = hvd.elastic.TensorFlowState(mine, step=horovod.rank())
    state.save()
    for variable in mine:
        variable.assign(tf.zeros_like(variable))
    state.restore()
    for variable, shape in zip(mine, shapes, strict=True):
        same_numbers(variable.read_value(), of_rank(horovod.rank(), shape, dtype))
    state.sync()
    state.restore()
    for variable, shape in zip(mine, shapes, strict=True):
        same_numbers(variable.read_value(), of_rank(0, shape, dtype))
    assert state.step == 0


@cases.each(TYPES, witnesses=MOVED_BY_CLASS)
def every_type_is_moved(dtype: tf.DType) -> None:
    ranks = range(horovod.size())
    for shape in ((2 * horovod.size(), 3), (), (0, 3)):
        mine, first = of_rank(horovod.rank(), shape, dtype), of_rank(0, shape, dtype)
        rows = [of_rank(rank, shape or (1,), dtype) for rank in ranks]
        same_numbers(hvd.allgather(mine), tf.concat(rows, 0))
        same_numbers(tf.function(hvd.allgather)(mine), tf.concat(rows, 0))
        same_numbers(hvd.grouped_allgather([mine, mine])[1], tf.concat(rows, 0))
        same_numbers(hvd.broadcast(mine, 0), first)
        for how in ({}, {"inplace": True}):
            variable = tf.Variable(mine)
            hvd.broadcast_variables([variable], 0, **how)
            same_numbers(variable.read_value(), first)
        variable = tf.Variable(mine)
        hvd.broadcast_([variable], 0)
        same_numbers(variable.read_value(), first)
        if shape:
            parts = [of_rank(rank, (shape[0] // horovod.size(), 3), dtype) for rank in ranks]
            same_numbers(hvd.alltoall(mine), tf.concat(parts, 0))
        else:
            raises(ValueError, lambda mine=mine: hvd.alltoall(mine), "single number")
    raises(UnsupportedError, lambda: hvd.allgather(tf.constant(["text"])), "allgather_object")


@cases.each(TYPES, witnesses=SUMMED_BY_CLASS)
def every_type_is_summed_or_refused(dtype: tf.DType) -> None:
    for shape in ((2 * horovod.size(), 3), (), (0, 3)):
        mine = of_rank(horovod.rank(), shape, dtype)
        if dtype not in SUMMED:
            raises(UnsupportedError, lambda mine=mine: hvd.allreduce(mine, op=hvd.Sum), "tf.cast")
            raises(UnsupportedError, lambda mine=mine: hvd.grouped_allreduce([mine], op=hvd.Sum), "tf.cast")
            raises(UnsupportedError, lambda mine=mine: hvd.reducescatter(mine, op=hvd.Sum), "tf.cast")
            continue
        total = tf.add_n([of_rank(rank, shape, dtype) for rank in range(horovod.size())])
        same_numbers(hvd.allreduce(mine, op=hvd.Sum), total)
        same_numbers(tf.function(hvd.allreduce)(mine, op=hvd.Sum), total)
        same_numbers(hvd.grouped_allreduce([mine, mine], op=hvd.Sum)[1], total)
        if dtype.is_floating or dtype.is_complex:
            same_numbers(hvd.allreduce(mine), total / horovod.size())
            same_numbers(hvd.allreduce(mine, compression=hvd.Compression.fp16), total / horovod.size())
        if not shape:
            raises((ValueError, UnsupportedError), lambda mine=mine: hvd.reducescatter(mine), "reducescatter")
        elif dtype not in (tf.int8, tf.uint8):
            same_numbers(hvd.reducescatter(mine, op=hvd.Sum), total[: shape[0] // horovod.size()])
            same_numbers(hvd.grouped_reducescatter([mine], op=hvd.Sum)[0], total[: shape[0] // horovod.size()])
    if dtype.is_complex:
        raises(UnsupportedError, lambda: hvd.allreduce(mine, op=hvd.Max), "op=Sum")


@cases.each({"bfloat16": tf.bfloat16, "complex64": tf.complex64, "complex128": tf.complex128})
def uncompressed_gradients_are_of_any_type(dtype: tf.DType) -> None:
    ranks = range(horovod.size())
    for compression in (hvd.Compression.none, hvd.Compression.fp16, NoCompression()):
        for settings in ({}, {"groups": 1}):
            of = tf.Variable(tf.zeros([4, 3], dtype))

            def step(of: Any = of, compression: Any = compression, settings: Any = settings) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.math.real(of * of_rank(horovod.rank(), (4, 3), dtype)))
                return hvd.DistributedGradientTape(tape, compression=compression, **settings).gradient(loss, [of])[0]

            expected = tf.add_n([of_rank(rank, (4, 3), dtype) for rank in ranks]) / horovod.size()
            expected = tf.math.conj(expected) if dtype.is_complex else expected
            for found in (step(), tf.function(step)()):
                same_numbers(found, expected)


@cases.add
def another_division_into_groups_has_an_exchange_of_its_own() -> None:
    of = [tf.Variable(tf.zeros([40, 30]), name=f"grouped{i}") for i in range(4)]
    for groups in (None, 2, [of[:2]]):
        for step in range(2):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(weight) for weight in of])
            tape = hvd.DistributedGradientTape(tape, compression=OneBit(), groups=groups)
            tape.gradient(loss, of)
            assert tape.compression_stats(of)["total"]["steps"] == step + 1


@cases.add
def a_rank_may_ask_alone_before_the_first_step() -> None:
    of = [tf.Variable(tf.zeros([40, 30]), name=f"asked{i}") for i in range(2)]
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=OneBit())
    if horovod.rank() == 0:
        assert tape.compression_stats(of) == {"compressor": repr(OneBit()), "total": {}, "tensors": {}}
    state = tape.compression_state_dict(of) if horovod.rank() == 0 else None
    state = state or tape.compression_state_dict(of)
    assert (state["size"], state["rank"], state["residuals"]) == (horovod.size(), horovod.rank(), {})
    tape.load_compression_state_dict(state, of)


@cases.add
def complex_numbers_are_not_compressed() -> None:
    of = tf.Variable(tf.zeros([64, 301], tf.complex64), name="spectrum")
    policy = Policy([("spectrum", NoCompression())], default=OneBit())
    for compression in (OneBit(), policy, hvd.Compression.none):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.math.real(of))
        found = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [of])[0]
        same_numbers(found, tf.ones_like(of))


# -- gradients that are not there on all ranks, or not any more --------------------------------------------------------


@cases.each(
    {
        "none and dense": ("none", "dense"),
        "none and sparse": ("none", "sparse"),
        "dense and sparse": ("dense", "sparse"),
    }
)
def gradients_of_other_kinds_on_some_ranks_are_an_error_on_all(kinds: tuple[str, str]) -> None:
    kind = kinds[min(horovod.rank(), 1)]
    for compression in (OneBit(), hvd.Compression.none):
        table, weight = tf.Variable(tf.ones([500, 31]), name="table"), tf.Variable(tf.ones([48, 601]), name="weight")

        def step(table: Any = table, weight: Any = weight, compression: Any = compression) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight)
                if kind == "dense":
                    loss += tf.reduce_sum(table)
                if kind == "sparse":
                    loss += tf.reduce_sum(tf.gather(table, [3, 7]))
            return wrapped(tape, compression).gradient(loss, [table, weight])

        for call in (step, tf.function(step)):
            raises(Exception, call, "the ranks disagree on", "table", "UnconnectedGradients.ZERO", "sparse_as_dense")


@cases.add
def frozen_variables_stay_as_they_are_and_unfrozen_ones_are_exchanged() -> None:
    of = variables()

    def train(trained: Sequence[tf.Variable], step: int) -> None:
        wanted = [g for v, g in zip(of, given(step), strict=True) if any(v is t for t in trained)]
        for g, v in zip(gradients(trained, wanted, lambda t: wrapped(t, TopK(0.05))), trained, strict=True):
            v.assign_sub(0.5 * g)

    train(of, 0)
    before = [v.numpy() for v in of]
    for step in (1, 2):
        train(of[2:], step)
    assert all((v.numpy() == b).all() for v, b in zip(of[:2], before, strict=False))
    assert all((v.numpy() != b).any() for v, b in zip(of[2:], before[2:], strict=True))
    train(of, 3)
    assert (of[0].numpy() != before[0]).any()
    for v in of:
        same_numbers(v.read_value(), hvd.broadcast(v, 0))


@cases.add
def a_tape_that_is_wrapped_again_keeps_the_settings_of_each() -> None:
    of = variables()
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in of])
    mean, total = wrapped(tape), wrapped(tape, op=hvd.Sum)
    total.register_local_source(of[0])
    for found, expected in ((mean.gradient(loss, of), 1.0), (total.gradient(loss, of[1:]), horovod.size())):
        assert all(float(tf.reduce_max(tf.abs(g - expected))) < 1e-5 for g in found)


@cases.add
def what_cannot_be_done_is_refused() -> None:
    v = tf.Variable(tf.zeros([100, 200]))

    @tf.function(jit_compile=True, autograph=False)
    def compiled() -> Any:
        return gradients([v], [tf.ones([100, 200])], wrapped)

    raises(UnsupportedError, compiled, "jit_compile=False")
    whole = tf.Variable(tf.zeros([100, 200], tf.float32), shape=tf.TensorShape(None))
    raises(UnsupportedError, lambda: gradients([whole], [tf.ones([100, 200])], wrapped), "shape", "Compression.none")
    raises(ValueError, lambda: wrapped(tf.GradientTape(), exchange="ring"), "two_phase")
    raises(UnsupportedError, lambda: wrapped(wrapped(tf.GradientTape())), "distributed already")
    raises(TypeError, lambda: wrapped(tf.GradientTape(), OneBit), "OneBit(...)")
    legacy = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    raises(UnsupportedError, lambda: hvd.DistributedOptimizer(legacy, compression=OneBit()), "DistributedGradientTape")


# -- elastic runs, whose ranks stay here -------------------------------------------------------------------------------


@contextmanager
def elastic() -> Iterator[None]:
    """As in a process that the driver of elastic runs has started."""
    os.environ["HOROVOD_ELASTIC"] = "1"
    # states of other cases may have been synced
    note_parting()
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]
        note_parting()
        hvd.forget_residuals()


def owed_by_all(state: dict[str, Any]) -> dict[str, Any]:
    """What all ranks owe, by names."""
    mine: dict[str, Any] = {}
    for kind in ("residuals", "owner_residuals"):
        for name, entry in state[kind].items():
            values, start = entry["values"].astype(np.float64), entry.get("start", 0)
            mine.setdefault(name, np.zeros(int(np.prod(entry["shape"]))))[start : start + values.size] += values
    everyone = hvd.allgather_object(mine)
    return {name: sum(of_rank[name] for of_rank in everyone) for name in mine}


@cases.add
def a_step_of_an_elastic_run_is_the_loopback() -> None:
    with elastic():
        of, loopback = variables(), Loopback(horovod.size(), OneBit(), EXCHANGE)
        state = hvd.elastic.TensorFlowState(of, step=0)
        traces = []

        def step(wanted: Any) -> Any:
            traces.append(0)
            return gradients(of, wanted, wrapped)

        in_graph = tf.function(step)
        raises(UnsupportedError, lambda: step(given(0)), "no state has synced the ranks", "hvd.elastic.run")
        raises(tf.errors.OpError, lambda: in_graph(given(0)), "no state has synced the ranks")
        tape = wrapped(tf.GradientTape())
        raises(StateError, lambda: tape.load_compression_state_dict({}, of), "before its state is synced")
        state.sync()
        traces.clear()
        for i in range(4):
            for name, found in zip(SHAPES, (in_graph if i % 2 else step)(given(i)), strict=True):
                check_against(loopback, name, found, i, range(horovod.size()))
        state.commit()
        owed = owed_by_all(tape.compression_state_dict(of))
        in_graph(given(4))
        state.restore()
        state.reset()
        raises(tf.errors.OpError, lambda: in_graph(given(5)), "no state has synced the ranks")
        state.sync()
        back = owed_by_all(tape.compression_state_dict(of))
        results = dict(zip(SHAPES, in_graph(given(5)), strict=True))
        left = owed_by_all(tape.compression_state_dict(of))
        for name in owed:
            np.testing.assert_allclose(back[name], owed[name], rtol=1e-5, atol=1e-6)
            came = sum(numbers(name, rank, 5, SHAPES[name]).ravel() for rank in range(horovod.size()))
            sent = horovod.size() * results[name].numpy().ravel()
            np.testing.assert_allclose(sent + left[name], owed[name] + came, rtol=1e-3, atol=1e-4)
        # the function was traced before ranks had met, and never again
        assert len(traces) == 2
        stats = tape.compression_stats(of)
        assert (stats["total"]["steps"], stats["lost_ranks"], stats["lost_norm"]) == (6, 0, 0.0)


@cases.add
def calls_of_elastic_runs_have_names() -> None:
    with elastic():
        state = hvd.elastic.TensorFlowState([], step=0)
        state.sync()
        raises(UnsupportedError, lambda: hvd.allreduce(given(0)[0], compression=OneBit()), "Give a name")
        loopback = Loopback(horovod.size(), OneBit())
        shape = (64, 50)

        def mine(rank: int, step: int) -> Any:
            return numbers("call", rank, step, shape)

        @tf.function
        def in_graph(tensor: Any) -> Any:
            return hvd.allreduce(tensor, name="call", compression=OneBit())

        for step in range(3):
            found = in_graph(tf.constant(mine(horovod.rank(), step)))
            expected = loopback.allreduce([mine(rank, step) for rank in range(horovod.size())], name="call")[0]
            assert found.numpy().tobytes() == expected.tobytes()


@cases.add
def two_tapes_in_one_function_of_an_elastic_run_share_names() -> None:
    with elastic():
        first, second = (tf.Variable(tf.zeros([60, 50]), name="same") for _ in range(2))
        table = tf.Variable(tf.zeros([200, 50]), name="table")
        state = hvd.elastic.TensorFlowState([first, second, table], step=0)
        state.sync()

        @tf.function
        def step() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                rows = tf.gather(table, [horovod.rank(), 7])
                loss = tf.reduce_sum(first * 2.0) + tf.reduce_sum(second * 3.0) + tf.reduce_sum(rows)
            one, two = wrapped(tape), wrapped(tape)
            for _ in tf.range(2):
                one.gradient(loss, [first])
            return [*one.gradient(loss, [first]), *two.gradient(loss, [second, table])]

        a, b, sparse = step()
        np.testing.assert_allclose(a, np.full((60, 50), 2.0), rtol=1e-5)
        np.testing.assert_allclose(b, np.full((60, 50), 3.0), rtol=1e-5)
        assert isinstance(sparse, tf.IndexedSlices)
        expected = np.zeros((200, 50))
        expected[7] = 1.0
        expected[: horovod.size()] += 1 / horovod.size()
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-5)
