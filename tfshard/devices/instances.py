"""Align the collective numbers of clients that did not compile the same collectives.

DTensor numbers collectives in the order of compilation, and all clients must give a collective the same number. On a
mesh without local devices (`messages`), a client compiles the same functions as the others, but only once. The other
clients compile a function again if DTensor took a small tensor for a constant and the tensor has changed.
"""

import functools

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, messages, startup, transfer
from tfshard.devices import mesh as meshes

# More elements than a tensor that DTensor treats as a constant.
_ELEMENTS = 64


def count_alike() -> None:
    """Align the collective numbers of all clients. All clients call this in their main threads. Eager only."""
    if clients.here().count == 1:
        return
    number = _compile_unused(1)
    largest = max(messages.of_all(number))
    if number < largest:
        _compile_unused(largest - number)


def _compile_unused(count: int) -> int:
    """Compile `count` collectives that never run, and return the number of the last."""
    mesh = _mesh_of_all_devices()
    sharded = transfer.host_to_mesh(np.zeros((mesh.size, _ELEMENTS), np.float32), ("batch", None), mesh)
    zeros = transfer.host_to_mesh(np.zeros(_ELEMENTS, np.float32), (None,), mesh)

    def summed(rows: tf.Tensor) -> tf.Tensor:
        # Each collective depends on the one before, or DTensor would merge them.
        for _ in range(count):
            rows += transfer.relayout(tf.reduce_sum(rows, 0), (None,), mesh)
        return transfer.relayout(rows, ("batch", None), mesh)

    def run(rows: tf.Tensor, zeros: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(zeros) > 1.0, lambda: summed(rows), lambda: tf.identity(rows))

    compiled = tf.function(run, autograph=False)
    keys = _private.instance_keys(lambda: compiled(sharded, zeros))
    assert len(keys) == count, "Each of them has a number."
    return keys[-1]


@functools.cache
def _mesh_of_all_devices() -> dtensor.Mesh:
    started = startup.current()
    assert started is not None
    return meshes.distributed_mesh({"batch": started.num_devices}, started)
