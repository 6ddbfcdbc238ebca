"""Every name of `hvd_compress.tensorflow` at work, on two ranks or more:

    horovodrun -np 2 --gloo python examples/reference/tensorflow_names.py

The pages of the reference show these functions one by one; each is a collective call, so all ranks make all of them.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.tensorflow
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import OneBit, TopK


def processes() -> None:
    assert hvd.is_initialized()
    print(f"rank {hvd.rank()} of {hvd.size()}, the {hvd.local_rank()} of {hvd.local_size()} on its host")
    print(f"host {hvd.cross_rank()} of {hvd.cross_size()}; equally many ranks on each: {hvd.is_homogeneous()}")


def processes_in_a_graph() -> None:
    # as nodes of a graph they are asked when it runs, not when it is traced
    print(hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op())


def what_was_built() -> None:
    hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", horovod.tensorflow.__file__, "mpi_lib")
    print("MPI:", hvd.mpi_built(), "in use:", hvd.mpi_built() and hvd.mpi_enabled())
    print("Gloo:", hvd.gloo_built(), "in use:", hvd.gloo_enabled())
    if hvd.mpi_enabled():
        print("several threads may call MPI:", hvd.mpi_threads_supported())
    print("GPUs:", hvd.cuda_built(), hvd.nccl_built(), hvd.rocm_built(), "used:", hvd.gpu_available("tensorflow"))
    print("others:", hvd.ddl_built(), hvd.ccl_built())


def reductions() -> None:
    x = tf.fill((4,), float(hvd.rank()))
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        print(hvd.allreduce(x, op=op, name=f"x.{op}"))
    if hvd.mpi_enabled() and hvd.check_num_rank_power_of_2(hvd.size()):  # what Adasum wants
        print(hvd.allreduce(x + 1, op=hvd.Adasum, name="x.adasum"))
    print(hvd.grouped_allreduce([x, x + 1], op=hvd.Sum)[0])


def compressed_reductions() -> None:
    x = tf.random.normal((256, 256))
    mean = hvd.allreduce(x, name="features", compression=OneBit())  # what it leaves out is kept under the name
    again = hvd.allreduce(x, name="features", compression=hvd.Compression.onebit)
    print(tf.norm((mean + again) / 2 - hvd.allreduce(x, name="exact")))
    hvd.forget_residuals()  # the next call of "features" begins anew
    print(hvd.DEFAULT_MIN_NUMEL, "elements, below which tapes do not compress")


def gathers() -> None:
    mine = tf.fill((1 + hvd.rank(), 2), float(hvd.rank()))  # first dimensions may differ
    print(hvd.allgather(mine, name="rows").shape, hvd.grouped_allgather([mine, mine])[0].shape)
    print(hvd.allgather_object({"rank": hvd.rank()}))


def broadcasts() -> None:
    x = tf.fill((2,), float(hvd.rank()))
    print(hvd.broadcast(x, root_rank=0, name="x0"))
    variables = [tf.Variable(x, name="a"), tf.Variable(x + 1, name="b")]
    hvd.broadcast_(variables, root_rank=0)
    hvd.broadcast_variables(variables, root_rank=0)
    print(hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0, name="epoch"))


def in_sessions() -> None:
    """What programs of TensorFlow 1 call."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("w", initializer=float(hvd.rank()))
        start = hvd.broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(start)


def parts_for_each_rank() -> None:
    x = tf.reshape(tf.range(4.0 * hvd.size()), (-1, 2))
    print(hvd.alltoall(x), hvd.reducescatter(x), hvd.grouped_reducescatter([x, x])[0])


def process_sets() -> None:
    first = hvd.add_process_set(hvd.ProcessSet([0]))  # needs hvd.init(process_sets="dynamic")
    if first.included():
        print(hvd.allreduce(tf.ones(2), name="alone", process_set=first))
    print(hvd.global_process_set.size(), "ranks in all")
    hvd.remove_process_set(first)


def timelines() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(f"{folder}/timeline.json")  # open it with chrome://tracing
        hvd.allreduce(tf.ones(2), name="seen")
        hvd.stop_timeline()


def a_tape() -> None:
    w, v = tf.Variable(tf.ones((64, 512))), tf.Variable(tf.ones(512))
    x = tf.random.stateless_normal((8, 64), (hvd.rank(), 0))
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w + v) ** 2)
        wrapped: Any = hvd.DistributedGradientTape(tape, compression=hvd.Compression.adaptive(pi=32))
        gradients = wrapped.gradient(loss, [w, v])
        w.assign_sub(0.01 * gradients[0])
    print(wrapped.compression_stats([w, v])["total"])


def a_tape_with_local_layers() -> None:
    layer = tf.keras.layers.Dense(4)
    layer.build((None, 8))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.fill((2, 8), float(hvd.rank()))))
    wrapped = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    print(wrapped.gradient(loss, layer.trainable_variables)[0][0])


def an_optimizer() -> None:
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=OneBit())
    w = tf.Variable(tf.ones((64, 512)))
    optimizer.apply_gradients([(tf.fill((64, 512), float(hvd.rank())), w)])
    print(w[0, 0])


def neighbours() -> None:
    w = tf.Variable(tf.fill((64, 512), float(hvd.rank())))
    averager = hvd.EventGraD(compression=TopK(0.1))
    for _ in range(5):
        averager.step([w])  # between computing gradients and applying them
    print(averager.event_stats()["total"], averager.consensus_distance([w]))
    averager.average_parameters([w])


def batch_norm() -> None:
    if tf.keras.__version__.startswith("2."):  # Horovod's works with Keras 2 only
        layer = hvd.SyncBatchNormalization()  # its statistics are those of the batches of all ranks
        print(layer(tf.random.normal((4, 3)) + float(hvd.rank()), training=True).shape)


def elastic_state() -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    state.epoch += 1
    state.commit()  # what a new rank gets, and what all go back to after a failure
    print("committed epoch", state.epoch)


def helpers() -> None:
    """What Horovod itself calls, and offers."""
    print(hvd.split_list([1, 2, 3], 2))
    w = tf.Variable(1.0)
    print(hvd.refs_to_vars(hvd.vars_to_refs([w]))[0] is w)
    op, average = hvd.Average, None
    print(hvd.handle_average_backwards_compatibility(op, average) == hvd.Average)
    print(hvd.LocalGradientAggregationHelper.__name__)
    print(hvd.broadcast_object_fn.__name__, "wants placeholders, which TensorFlow 2 has not: use broadcast_object")
    modules = (hvd.compression, hvd.functions, hvd.gradient_aggregation, hvd.mpi_ops, hvd.sync_batch_norm, hvd.util)
    print([module.__name__ for module in modules])


def the_end() -> None:
    print("last to come:", hvd.join())


def main() -> None:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that timelines can begin later
    sets: Any = "dynamic"
    hvd.init(process_sets=sets)
    for part in (processes, processes_in_a_graph, what_was_built, reductions, compressed_reductions, gathers):
        part()
    for part in (broadcasts, in_sessions, parts_for_each_rank, process_sets, timelines, a_tape):
        part()
    for part in (a_tape_with_local_layers, an_optimizer, neighbours, batch_norm, elastic_state, helpers, the_end):
        part()
    hvd.shutdown()


if __name__ == "__main__":
    main()
