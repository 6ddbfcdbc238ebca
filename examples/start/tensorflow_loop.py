"""The smallest training with compressed gradients in a loop of TensorFlow's own:

horovodrun -np 2 --gloo python examples/start/tensorflow_loop.py
"""

import tensorflow as tf

import hvd_compress.tensorflow as hvd  # was: import horovod.tensorflow as hvd
from hvd_compress import OneBit

hvd.init()
weight = tf.Variable(tf.random.stateless_normal((784, 1024), (1, 2)), name="weight")


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weight) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=OneBit())
    (gradient,) = tape.gradient(loss, [weight])
    weight.assign_sub(0.01 * gradient)
    return loss


hvd.broadcast_variables([weight], root_rank=0)
for _ in range(10):
    loss = step(tf.random.normal((32, 784)))
print(f"rank {hvd.rank()}: loss {loss:.1f}")
