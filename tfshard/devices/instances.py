"""Makes the clients of a launched run count collectives alike, when they have not compiled the same ones.

DTensor numbers collectives in the order in which it compiles them, and clients have to give one the same number. On a
mesh that a client has no devices of (`messages`) it compiles what the others do, once; but where small tensors were
taken for constants and have changed, the others compile a function again.
"""

import functools

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, messages, startup, transfer
from tfshard.devices import mesh as meshes

# More elements than DTensor takes for a constant.
_ELEMENTS = 64


def count_alike() -> None:
    """Has every client go on with the same number. All clients call this, from their main threads. Eager only."""
    if clients.here().count == 1:
        return
    own = _compile_unused(1)
    largest = max(messages.of_all(own))
    if own < largest:
        _compile_unused(largest - own)


def _compile_unused(count: int) -> int:
    """Compiles so many collectives that are never run, and returns the number of the last."""
    mesh = _whole_mesh()
    pieces = transfer.host_to_mesh(np.zeros((mesh.size, _ELEMENTS), np.float32), ("batch", None), mesh)
    zeros = transfer.host_to_mesh(np.zeros(_ELEMENTS, np.float32), (None,), mesh)

    def summed(rows: tf.Tensor) -> tf.Tensor:
        # One after the other, or they would be merged.
        for _ in range(count):
            rows += transfer.relayout(tf.reduce_sum(rows, 0), (None,), mesh)
        return transfer.relayout(rows, ("batch", None), mesh)

    def run(rows: tf.Tensor, zeros: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(zeros) > 1.0, lambda: summed(rows), lambda: tf.identity(rows))

    compiled = tf.function(run, autograph=False)
    keys = _private.instance_keys(lambda: compiled(pieces, zeros))
    assert len(keys) == count, "Each of them has a number."
    return keys[-1]


@functools.cache
def _whole_mesh() -> dtensor.Mesh:
    started = startup.current()
    assert started is not None
    return meshes.distributed_mesh({"batch": started.num_devices}, started)
