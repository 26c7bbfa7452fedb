"""Starts four logical CPU devices for every test and doctest, before TensorFlow makes its first tensor."""

import os

# Before the imports: each is read once, when TensorFlow or Keras is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tfshard  # noqa: E402

tfshard.initialize(num_devices=4, device_type="CPU")
