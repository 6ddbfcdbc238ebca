"""Every name of `hvd_compress.keras`, and of `hvd_compress.tensorflow.keras`, at work, on two ranks or more:

    horovodrun -np 2 --gloo python examples/reference/keras_names.py hvd_compress.keras

The pages of the reference show these functions one by one; each is a collective call, so all ranks make all of them.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

hvd: Any = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "hvd_compress.keras")


def net(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(512, "relu"), dense(10)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def data() -> tuple[Any, Any]:
    numbers = np.random.default_rng(hvd.rank())
    return numbers.normal(size=(128, 64)).astype(np.float32), numbers.integers(0, 10, 128)


def fit(model: Any, callbacks: list[Any], epochs: int = 2) -> Any:
    return model.fit(*data(), batch_size=32, epochs=epochs, callbacks=callbacks, verbose=0)


def processes() -> None:
    assert hvd.is_initialized()
    print(f"rank {hvd.rank()} of {hvd.size()}, the {hvd.local_rank()} of {hvd.local_size()} on its host")
    print(f"host {hvd.cross_rank()} of {hvd.cross_size()} for this local rank")


def what_was_built() -> None:
    print("MPI:", hvd.mpi_built(), "in use:", hvd.mpi_built() and hvd.mpi_enabled())
    print("Gloo:", hvd.gloo_built(), "in use:", hvd.gloo_enabled())
    if hvd.mpi_enabled():
        print("several threads may call MPI:", hvd.mpi_threads_supported())
    print("GPUs:", hvd.cuda_built(), hvd.nccl_built(), hvd.rocm_built())
    print("others:", hvd.ddl_built(), hvd.ccl_built())
    if hasattr(hvd, "is_version_greater_equal_than"):  # in hvd_compress.tensorflow.keras, as in Horovod
        print(hvd.is_version_greater_equal_than("2.21.0", "2.15.0"))


def collectives() -> None:
    x = np.full((2 * hvd.size(),), float(hvd.rank()), np.float32)
    print(hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Average))
    print(hvd.allgather(x), hvd.broadcast(x, root_rank=0), hvd.reducescatter(x, op=hvd.Sum))
    if hasattr(hvd, "Adasum"):
        print(hvd.Adasum)


def process_sets() -> None:
    first = hvd.add_process_set(hvd.ProcessSet([0]))  # needs hvd.init(process_sets="dynamic")
    print(first.included(), hvd.global_process_set.size())
    hvd.remove_process_set(first)


def timelines() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(f"{folder}/timeline.json")  # open it with chrome://tracing
        hvd.allreduce(np.ones(2, np.float32))
        hvd.stop_timeline()


def an_optimizer() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression=hvd.Compression.onebit)
    model = net(optimizer)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=1e-3, warmup_epochs=1),
        hvd.callbacks.CompressionStatsCallback(),
    ]
    print(fit(model, callbacks).history["compression_ratio"])


def momentum() -> None:
    model = net(hvd.CompressedAdam(1e-3, warmup_steps=2, compression=hvd.Compression.onebit))
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    print(model.optimizer.compression_stats()["steps_by_way"])


def in_sessions() -> None:
    """What programs of TensorFlow 1 call."""
    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError as error:
        print(error)  # names what to call instead


def schedules() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=hvd.Compression.topk)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch),
        hvd.callbacks.CompressionWarmupCallback(warmup_epochs=1, dense_epochs=1),
    ]
    fit(net(optimizer), callbacks, epochs=3)


def checkpoints() -> None:
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(hvd.broadcast_object(mine)) if hasattr(hvd, "broadcast_object") else Path(mine)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.onebit)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.CompressionCheckpointCallback(folder / "owed"),
            hvd.callbacks.BestModelCheckpoint(filepath=str(folder / "best.keras"), monitor="loss"),
        ]
        model = net(optimizer)
        fit(model, callbacks)
        model.save(folder / "model.keras")
        again = hvd.load_model(folder / "model.keras", compression=hvd.Compression.onebit)
        fit(again, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)


def local_layers() -> None:
    first = keras.layers.Dense(512)
    first.build((None, 64))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=first)
    model = keras.Sequential([keras.Input((64,)), first, keras.layers.Dense(10)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, [])


def neighbours() -> None:
    averaging = hvd.callbacks.EventGraDCallback()
    model = net(keras.optimizers.SGD(0.1))
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), averaging])
    print(averaging.event_stats()["total"])


def nodes() -> None:
    # hvd.init(process_sets=hvd.daso_process_sets()) is the other way to make its process sets
    print(len(hvd.daso_process_sets(ranks_per_node=1, size=hvd.size())), "process sets")
    model = net(hvd.DASO(keras.optimizers.SGD(0.1), ranks_per_node=1))
    callback = hvd.callbacks.DASOCallback(global_skips=2, ranks_per_node=1)
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), callback])


def alone() -> None:
    averaging = hvd.callbacks.DiLoCoCallback(sync_every=2, outer_learning_rate=0.7, outer_momentum=0.9)
    model = net(keras.optimizers.Adam(1e-3))  # a plain optimizer
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), averaging])
    print(averaging.diloco_stats())


def elastic_state() -> None:
    model = net(keras.optimizers.SGD(0.1))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    assert issubclass(hvd.elastic.KerasState, hvd.elastic.TensorFlowKerasState)
    callbacks = [
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]

    @hvd.elastic.run  # goes on with the last committed state when ranks come or go
    def train(state: Any) -> None:
        fit(model, callbacks, epochs=1)

    print(train.__name__, "is to be called under horovodrun --min-np")


def main() -> None:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that timelines can begin later
    hvd.init(process_sets="dynamic")
    for part in (processes, what_was_built, collectives, process_sets, timelines, an_optimizer, momentum, in_sessions):
        part()
    for part in (schedules, checkpoints, local_layers, neighbours, nodes, alone, elastic_state):
        part()
    hvd.shutdown()


if __name__ == "__main__":
    main()
