"""Ranks of TensorFlow that do not make the same steps: they are told so, and do not wait for ever."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import AdaGrad, Adaptive, Auto, OneBit, Policy, TopK
from hvd_compress.errors import MismatchError
from hvd_compress.loopback import Loopback
from tests.parallel.cases import Cases
from tests.parallel.workers.neutral import numbers, raises

FRAMEWORK = "tensorflow"

cases = Cases()

SHAPE = (40, 90)
WAYS: dict[str, dict[str, Any]] = {
    "two-phase": {"compression": OneBit(), "exchange": "two_phase"},
    "allgather": {"compression": TopK(ratio=0.01), "exchange": "allgather"},
    "alone": {"compression": OneBit(), "bucket_bytes": 0},
    "hierarchical": {"compression": OneBit(), "exchange": "hierarchical"},
    "server": {"compression": OneBit(), "exchange": "parameter_server"},
    "adagrad": {"compression": OneBit(), "adagrad": AdaGrad()},
    "adaptive": {"compression": Adaptive(pi=16)},
    "auto": {"compression": Auto([OneBit()])},
    "policy": {"compression": Policy({"last": hvd.Compression.fp16, "*": OneBit()})},
    "none": {},
    "group": {"groups": 2},
}


def variables() -> list[tf.Variable]:
    return [tf.Variable(tf.ones(SHAPE), name=name) for name in ("first", "second", "last")]


def step(of: Sequence[tf.Variable], used: Sequence[int] = (0, 1, 2), **settings: Any) -> list[Any]:
    """A loss that depends on some of the variables, and the combined gradients, applied."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(of[i] * numbers(f"{i}", horovod.rank(), 0, SHAPE)) for i in used])
    found = hvd.DistributedGradientTape(tape, min_numel=1, **settings).gradient(loss, of)
    for variable, gradient in zip(of, found, strict=True):
        if gradient is not None:
            variable.assign_sub(0.1 * gradient)
    return list(found)


def check_equal(of: Sequence[tf.Variable]) -> None:
    for i, variable in enumerate(of):
        everyone = horovod.allgather(variable.read_value()[tf.newaxis], name=f"equal.{i}")
        assert tf.reduce_all(everyone == everyone[:1])


def is_odd() -> bool:
    return horovod.rank() == horovod.size() - 1


def refused(call: Callable[[], Any], in_graph: bool, kind: str = "dense") -> None:
    """A step of a rank that goes on as before while another one does not."""
    if in_graph:
        # the error of an operation is that of Horovod
        raises(tf.errors.OpError, call, "Mismatched", "int32")
    else:
        raises(MismatchError, call, "on another rank, whose error says more", f"'first' {kind}")


# -- join --------------------------------------------------------------------------------------------------------------


# First, and once: in horovod.tensorflow 0.28 itself a later join() after different numbers of steps waits for ever.
@cases.add
def a_rank_may_join_others_that_compress_nothing() -> None:
    of = variables()
    for _ in range(2 if is_odd() else 4):
        step(of)
    assert int(hvd.join()) != horovod.size() - 1


@cases.each(WAYS, witnesses=["two-phase", "hierarchical", "adagrad", "none"])
def ranks_that_join_after_equal_numbers_of_steps_go_on(settings: dict[str, Any]) -> None:
    of = variables()
    for _ in range(2):
        for _ in range(2):
            step(of, **settings)
        assert 0 <= int(hvd.join()) < horovod.size()
    check_equal(of)


# `Auto` may find that nothing is worth compressing, and then a rank may join
@cases.each({k: v for k, v in WAYS.items() if "compression" in v and k != "auto"})
def a_rank_that_joins_while_others_make_another_compressed_step(settings: dict[str, Any]) -> None:
    of = variables()
    in_graph = tf.function(functools.partial(step, of, **settings))
    for call in (functools.partial(step, of, **settings), in_graph):
        call()
        if is_odd():
            raises(MismatchError, hvd.join, "join() was called on this rank")
        else:
            refused(call, call is in_graph)
    # and nothing is left behind
    step(of, **settings)
    check_equal(of)
    assert 0 <= int(hvd.join()) < horovod.size()


# -- gradients that are not there on some ranks ------------------------------------------------------------------------


@cases.each(
    {f"{label}-{how}": (settings, how) for label, settings in WAYS.items() for how in ("eager", "graph")},
    witnesses=[
        "two-phase-eager",
        "two-phase-graph",
        "hierarchical-graph",
        "adagrad-eager",
        "auto-graph",
        "none-eager",
        "group-graph",
    ],
)
def a_gradient_that_is_missing_on_a_rank_later_is_an_error_on_all(setting: tuple[dict[str, Any], str]) -> None:
    settings, how = setting
    of = variables()
    wrap: Callable[[Any], Any] = tf.function if how == "graph" else lambda call: call
    whole = wrap(functools.partial(step, of, **settings))
    partly = {used: wrap(functools.partial(step, of, used, **settings)) for used in ((0,), (1, 2), (0, 1))}
    for call in (whole, whole, partly[0,], whole):
        # all ranks may
        call()
    before = [v.numpy() for v in of]
    # ranks that change theirs, where others do not
    for used in ((0,), (0, 1)):
        if is_odd():
            raises(
                Exception, partly[used], "MismatchError", "the ranks disagree", "that of 'last' is None and was dense"
            )
        else:
            refused(whole, how == "graph")
    # ranks that change theirs in different ways
    for used, others in (((0, 1), partly[1, 2]), ((1, 2), partly[0, 1])):
        raises(
            Exception, partly[used] if is_odd() else others, "MismatchError", "the ranks disagree", "first", "'None'"
        )
    assert all((v.numpy() == b).all() for v, b in zip(of, before, strict=True))
    whole()
    check_equal(of)


@cases.each({f"{label}-{how}": (WAYS[label], how) for label in ("alone", "none") for how in ("eager", "graph")})
def a_gradient_that_becomes_sparse_on_a_rank_is_an_error_on_all(setting: tuple[dict[str, Any], str]) -> None:
    settings, how = setting
    of = variables()

    def make(looks_up: bool) -> Callable[[], Any]:
        def call() -> Any:
            with tf.GradientTape() as tape:
                used = tf.gather(of[0], [1, 3]) if looks_up else of[0]
                loss = tf.reduce_sum(used) + tf.reduce_sum(of[1]) + tf.reduce_sum(of[2] * 2.0)
            return hvd.DistributedGradientTape(tape, min_numel=1, **settings).gradient(loss, of)

        return tf.function(call) if how == "graph" else call

    whole, looks_up = make(False), make(True)
    for call, other, was, becomes in ((whole, looks_up, "dense", "sparse"), (looks_up, whole, "sparse", "dense")):
        call()
        if is_odd():
            raises(Exception, other, "MismatchError", f"that of 'first' is {becomes} and was {was}")
        else:
            refused(call, how == "graph", was)
        call()
        other()


@cases.add
def a_rank_without_any_gradient_is_an_error_on_all() -> None:
    of = variables()
    for settings in ({"compression": OneBit()}, {}):
        step(of, **settings)
        unused = tf.Variable(1.0)

        def nothing(settings: Any = settings, unused: Any = unused) -> None:
            with tf.GradientTape() as tape:
                loss = 2.0 * unused
            hvd.DistributedGradientTape(tape, min_numel=1, **settings).gradient(loss, of)

        if is_odd():
            raises(MismatchError, nothing, "that of 'first' is None and was dense")
        else:
            refused(functools.partial(step, of, **settings), False)
        # where all have none, nobody gets any
        nothing()


@cases.add
def what_is_owed_outlives_a_disagreement() -> None:
    of, loopback = variables(), Loopback(horovod.size(), TopK(0.02), "two_phase")
    settings = {"compression": TopK(0.02), "exchange": "two_phase", "bucket_bytes": 0}
    for i in range(4):
        found = step(of, **settings)
        for j, gradient in enumerate(found):
            arrays = [numbers(f"{j}", rank, 0, SHAPE) for rank in range(horovod.size())]
            expected = loopback.allreduce(arrays, name=f"{j}")[0]
            assert gradient.numpy().tobytes() == expected.tobytes(), (i, j)
        raises(MismatchError, lambda: step(of, (0, 1) if is_odd() else (0, 1, 2), **settings), "'last'")


# -- variables that ranks do not begin with alike ----------------------------------------------------------------------


def told(call: Callable[[], Any], steps: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            call()
    return [str(w.message) for w in seen if "differs from that of rank 0" in str(w.message)]


def unequal(which: int = 1) -> list[tf.Variable]:
    of = variables()
    if is_odd():
        of[which][-1:].assign(of[which][-1:] + 1.0)
    return of


@cases.each(
    {f"{label}-{how}": (settings, how) for label, settings in WAYS.items() for how in ("eager", "graph")},
    witnesses=["two-phase-graph", "server-eager", "none-graph"],
)
def variables_that_were_not_broadcast_are_told_once(setting: tuple[dict[str, Any], str]) -> None:
    settings, how = setting
    of = unequal()
    call = functools.partial(step, of, **settings)
    messages = told(tf.function(call) if how == "graph" else call)
    assert len(messages) == 1, messages
    assert all(part in messages[0] for part in ("'second'", f"rank {horovod.size() - 1} ", "broadcast_variables"))
    # and in the middle of a graph
    loop = functools.partial(step, unequal(2), **settings)

    @tf.function
    def steps() -> None:
        for _ in tf.range(3):
            loop()

    assert len(told(steps, 2)) == 1


@cases.each({"onebit": OneBit(), "none": hvd.Compression.none})
def variables_that_are_broadcast_after_the_first_step_are_not_told_of(compression: Any) -> None:
    # as in Horovod's own recipe
    of, is_first = unequal(), [True]

    def call() -> None:
        step(of, compression=compression)
        if is_first.pop() if is_first else False:
            hvd.broadcast_variables(of, root_rank=0)

    assert told(call) == []
    check_equal(of)


@cases.add
def variables_that_are_to_differ_are_not_told_of() -> None:
    of = unequal(2)

    def call() -> None:
        with tf.GradientTape() as tape:
            x = tf.ones(SHAPE) * horovod.rank()
            tape.watch(x)
            loss = tf.add_n([tf.reduce_sum(v * (1.0 + horovod.rank())) for v in of]) + tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape, compression=OneBit(), min_numel=1)
        tape.register_local_source(of[2])
        tape.gradient(loss, [*of, x])

    assert told(call) == []


@cases.each({dtype.name: dtype for dtype in (tf.bfloat16, tf.float16, tf.float64, tf.complex64)})
def variables_of_any_type_are_compared(dtype: tf.DType) -> None:
    for differ in (False, True):
        value = np.full(SHAPE, 1 + (is_odd() and differ))
        of = tf.Variable(tf.cast(value, dtype), name="typed")
        empty, single = tf.Variable(tf.zeros([0, 3], dtype)), tf.Variable(tf.zeros([], dtype))

        def call(of: Any = of, empty: Any = empty, single: Any = single) -> None:
            with tf.GradientTape() as tape:
                parts = [tf.reduce_sum(tf.math.real(v)) for v in (of, empty, single)]
                loss = tf.add_n([tf.cast(part, tf.float64) for part in parts])
            hvd.DistributedGradientTape(tape).gradient(loss, [of, empty, single])

        for how in (call, tf.function(call)):
            messages = told(how, 2)
            assert len(messages) == int(differ and how is call), (differ, messages)


# -- single calls ------------------------------------------------------------------------------------------------------


@functools.cache
def ones() -> tf.Tensor:
    # of a constant in a graph, TensorFlow makes a collective while it optimizes the graph
    with tf.init_scope():
        return tf.ones(SHAPE)


def one(name: str, **settings: Any) -> Any:
    return hvd.allreduce(ones(), name=name, **settings)


def group(name: str, number: int = 2, **settings: Any) -> Any:
    return hvd.grouped_allreduce([ones()] * number, name=name, **settings)


def three(name: str) -> Any:
    return group(name, 3, compression=OneBit())


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "compressed": (functools.partial(one, compression=OneBit()), one),
    "grouped": (functools.partial(one, compression=OneBit()), functools.partial(group, compression=OneBit())),
    "compressed-group": (functools.partial(group, compression=OneBit()), group),
    "compressed-and-grouped": (functools.partial(group, compression=OneBit()), one),
    "number": (
        functools.partial(group, compression=OneBit()),
        functools.partial(group, number=3, compression=OneBit()),
    ),
    "factor": (
        functools.partial(one, compression=OneBit()),
        functools.partial(one, compression=OneBit(), prescale_factor=2.0),
    ),
}


@cases.each(
    {f"{label}-{how}": (label, how) for label in PAIRS for how in ("eager", "graph")},
    witnesses=["compressed-eager", "compressed-graph", "grouped-eager", "number-graph", "factor-eager"],
)
def single_calls_that_differ_are_errors_on_all(setting: tuple[str, str]) -> None:
    label, how = setting
    for turned in (False, True):
        call = functools.partial(PAIRS[label][is_odd() != turned], f"single.{label}.{how}.{turned}")
        if how == "eager":
            raises(MismatchError, call, "the ranks disagree")
        else:
            # where a rank does not compress, the error of its operation is that of Horovod
            raises(Exception, tf.function(call), "ismatch")
    # and nothing is left behind
    assert float(hvd.allreduce(tf.constant(float(horovod.rank()))) * 2.0) == horovod.size() - 1
    assert len(hvd.grouped_allreduce([tf.ones(SHAPE)] * 2)) == 2


@cases.add
def a_named_call_that_changes_later_is_an_error_on_all() -> None:
    x = tf.ones(SHAPE)
    hvd.allreduce(x, name="later", compression=OneBit())
    for settings in ({"compression": Adaptive(pi=16)}, {}):
        mine = settings if is_odd() else {"compression": OneBit()}
        raises(MismatchError, lambda mine=mine: hvd.allreduce(x, name="later", **mine), "the ranks disagree on comp")
    # all may
    for settings in ({"compression": OneBit()}, {}, {"compression": TopK(0.1)}, {}):
        hvd.allreduce(x, name="later", **settings)
