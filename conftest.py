"""Starts four devices for every test and doctest, before TensorFlow makes its first tensor.

Logical CPU devices; with TFSHARD_DEVICE_TYPE=GPU those of the machine, or parts of one (docs/testing.md).
"""

import os

# Before the imports: each is read once, when TensorFlow or Keras is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# TensorFlow uses oneDNN by itself only on CPUs with VNNI or AMX. Its allocator records the bytes that profiles tell.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import tensorflow as tf  # noqa: E402

from tools.bench import common  # noqa: E402

# A GPU then multiplies float32 in float32, as a CPU does.
tf.config.experimental.enable_tensor_float_32_execution(False)
common.start()
