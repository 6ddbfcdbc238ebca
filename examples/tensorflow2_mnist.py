"""Train a ReLU network on MNIST with a TensorFlow tape, inside `tf.function`, and compressed gradients.

horovodrun -np 2 python examples/tensorflow2_mnist.py --compression "Adaptive(pi=64)"
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable
from itertools import pairwise

import mnist_data
import numpy as np
import tensorflow as tf
from arguments import mnist_arguments

import hvd_compress.tensorflow as hvd


def network(sizes: list[int]) -> list[tf.Variable]:
    initial = tf.keras.initializers.HeNormal(seed=hvd.rank())
    weights = [tf.Variable(initial(pair), name=f"weight_{i}") for i, pair in enumerate(pairwise(sizes))]
    biases = [tf.Variable(tf.zeros([size]), name=f"bias_{i}") for i, size in enumerate(sizes[1:])]
    return weights + biases


def logits(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    *layers, last = zip(variables[: len(variables) // 2], variables[len(variables) // 2 :], strict=True)
    for weight, bias in layers:
        x = tf.nn.relu(x @ weight + bias)
    return x @ last[0] + last[1]


def training_step(variables: list[tf.Variable], options: argparse.Namespace) -> Callable[..., tf.Tensor]:
    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(variables, x)))
        tape = hvd.DistributedGradientTape(tape, compression=options.compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * gradient)
        return loss

    return step


def main() -> None:
    options = mnist_arguments(__doc__)
    hvd.init()
    data = mnist_data.load_on_all_ranks(
        hvd.rank(), lambda: hvd.allgather(tf.zeros([1]), name="data_is_there"), options.data_dir, options.limit_train
    )
    variables = network([data.train_x.shape[1], *[options.width] * 3, 10])
    hvd.broadcast_variables(variables, root_rank=0)
    step, start = training_step(variables, options), time.perf_counter()
    for epoch in range(options.epochs):
        batches = mnist_data.deal(len(data.train_y), options.batch_size, hvd.rank(), hvd.size(), options.seed, epoch)
        for i, batch in enumerate(batches):
            rate = options.lr * (1 - (epoch + i / len(batches)) / options.epochs)
            loss = step(data.train_x[batch], data.train_y[batch], tf.constant(rate, tf.float32))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss of rank 0 in the last batch {float(loss):.4f}", flush=True)
    seconds, steps = time.perf_counter() - start, options.epochs * len(batches)
    digests = hvd.allgather(tf.constant([zlib.crc32(b"".join(v.numpy().tobytes() for v in variables))], tf.int64))
    if hvd.rank() == 0:
        tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=options.compression)
        sent = tape.compression_stats(variables)["total"]
        guesses = tf.argmax(logits(variables, tf.constant(data.test_x)), axis=1).numpy()
        result = {
            "compression": repr(options.compression), "data": data.source, "ranks": hvd.size(), "steps": steps,
            "seconds_per_step": seconds / steps, "test_accuracy": float(np.mean(guesses == data.test_y)),
            "replicas_identical": bool(tf.reduce_all(digests == digests[0])),
            "bytes_per_step": sent["bytes_sent"] / steps, "dense_bytes_per_step": sent["dense_bytes"] / steps,
        }  # fmt: skip
        print(json.dumps(result, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
