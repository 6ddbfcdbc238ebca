"""The smallest training with compressed gradients on Keras 3, on TensorFlow or on PyTorch:

KERAS_BACKEND=tensorflow horovodrun -np 2 --gloo python examples/start/keras_fit.py
"""

import keras

import hvd_compress.keras as hvd  # for tf.keras and Keras 2: hvd_compress.tensorflow.keras
from hvd_compress import OneBit

hvd.init()
model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=OneBit())
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.CompressionStatsCallback(),  # compression_ratio, bytes_sent and residual_norm in the logs
]
x, y = keras.random.normal((3200, 784)), keras.random.randint((3200,), 0, 10)
model.fit(x, y, batch_size=32, epochs=2, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
