"""Lookups of integers in a vocabulary: a table is a resource of the host, so a step searches sorted keys instead."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.operations import layer_patch
from tfshard.storage import steps


def install(model: keras.Model) -> None:
    """Patch a model's lookups of integers to use constant tables."""
    for layer in _private.flatten_layers(model):
        if isinstance(layer, keras.layers.IntegerLookup):
            layer_patch.apply(layer_patch.LOOKUP, layer, functools.partial(_lookup, layer))


def _lookup(layer: keras.Layer, original: layer_patch.Method) -> layer_patch.Method:
    """Replace a layer's `_lookup_dense`: inside a step, the table's keys and values are constants."""

    def lookup(inputs: Any) -> tf.Tensor:
        if steps.current() is None:
            return original(inputs)
        with tf.init_scope():
            keys, values, default = _private.lookup_table(layer)
        order = np.argsort(keys)
        with _private.replaced_lookup_table(layer, lambda tokens: _search(tokens, keys[order], values[order], default)):
            return original(inputs)

    return lookup


def _search(tokens: tf.Tensor, keys: np.ndarray, values: np.ndarray, default: int) -> tf.Tensor:
    """Return the values of tokens, and `default` for tokens that are no keys. The keys are sorted."""
    if not len(keys):
        return tf.fill(tf.shape(tokens), tf.constant(default, values.dtype))
    # Search element by element: the layout stays. `tf.searchsorted` would search each row separately.
    place = tf.zeros_like(tokens, tf.int32)
    step = 1 << (len(keys) - 1).bit_length()
    while step:
        further = tf.minimum(place + step, len(keys) - 1)
        place = tf.where(tf.gather(keys, further) <= tokens, further, place)
        step //= 2
    found = tf.gather(keys, place)
    return tf.where(tf.equal(found, tokens), tf.gather(values, place), tf.constant(default, values.dtype))
