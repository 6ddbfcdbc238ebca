"""Train a ReLU network on MNIST with Keras 3 `fit` and compressed gradients.

KERAS_BACKEND=torch horovodrun -np 2 python examples/keras_mnist.py --compression "Adaptive(pi=64)"
"""

from __future__ import annotations

import argparse
import json
import time
import zlib

import keras
import mnist_data
import numpy as np
from arguments import mnist_arguments

import hvd_compress.keras as hvd


class Shards(keras.utils.PyDataset):
    """Gives this rank's batches: in each epoch all ranks deal out the same shuffled deck."""

    def __init__(self, data: mnist_data.Digits, options: argparse.Namespace) -> None:
        super().__init__()
        self.data, self.options, self.epoch = data, options, 0
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self.data.train_x[self.batches[step]], self.data.train_y[self.batches[step]]

    def on_epoch_end(self) -> None:
        count, options = len(self.data.train_y), self.options
        self.batches = mnist_data.deal(count, options.batch_size, hvd.rank(), hvd.size(), options.seed, self.epoch)
        self.epoch += 1


def main() -> None:
    options = mnist_arguments(__doc__)
    hvd.init()
    keras.utils.set_random_seed(options.seed)
    data = mnist_data.load_on_all_ranks(
        hvd.rank(), lambda: hvd.allgather([0.0], name="data_is_there"), options.data_dir, options.limit_train
    )
    shards = Shards(data, options)
    hidden = [keras.layers.Dense(options.width, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.layers.Input(data.train_x.shape[1:]), *hidden, keras.layers.Dense(10)])
    schedule = keras.optimizers.schedules.PolynomialDecay(options.lr, options.epochs * len(shards), 0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(schedule), compression=options.compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.CompressionStatsCallback(),
    ]
    start = time.perf_counter()
    model.fit(shards, epochs=options.epochs, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
    seconds = time.perf_counter() - start

    digest = zlib.crc32(b"".join(w.tobytes() for w in model.get_weights()))
    digests = np.asarray(hvd.allgather(np.array([digest]), name="digest"))
    if hvd.rank() == 0:
        steps, sent = options.epochs * len(shards), optimizer.compression_stats()["total"]
        result = {
            "compression": repr(options.compression), "backend": keras.backend.backend(), "data": data.source,
            "ranks": hvd.size(), "steps": steps, "seconds_per_step": seconds / steps,
            "test_accuracy": model.evaluate(data.test_x, data.test_y, batch_size=500, verbose=0)[1],
            "replicas_identical": bool((digests == digests[0]).all()),
            "bytes_per_step": sent["bytes_sent"] / steps, "dense_bytes_per_step": sent["dense_bytes"] / steps,
        }  # fmt: skip
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
