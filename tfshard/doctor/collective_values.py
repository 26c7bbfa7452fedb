"""Check `collective-values`: each collective on each mesh axis gives every device the right values.

DTensor runs the first four kinds, and devices/replicas.py runs the kinds "in groups". DTensor's all-to-all is off
(`DTENSOR_USE_ALL_TO_ALL_RELAYOUT`): DTensor moves an axis to another dim by a gather and a slice.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import gathers, local_shards, mesh, messages, replicas, startup, transfer
from tfshard.doctor import environment
from tfshard.doctor.check_log import CheckLog, CheckRequest, mesh_text
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes

# Bytes of the array that the axis shards: a small one, and one that a ring sends in chunks.
_SIZES = (1 << 12, 4 << 20)


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Run each kind of collective on integers. A device with another result than NumPy's is a fault."""
    count = 0
    for axes in request.meshes:
        over = mesh.create_mesh(**axes)
        transfer.meet(over)
        replicas.meet(over)
        for axis in (name for name, size in axis_sizes(over).items() if size > 1):
            for kind in kinds_of(axis, over):
                wrong = sorted({device for size in _SIZES for device in wrong_devices(kind, axis, over, size)})
                result = "as expected" if not wrong else f"wrong on {environment.device_text(wrong, started)}"
                log.row("Values", mesh=mesh_text(axes), axis=axis, collective=kind, result=result)
                count += 1
                if wrong:
                    log.fault(f"{kind} over axis '{axis}' of mesh {mesh_text(axes)} is {result}.")
    log.summarize(f"{count} collectives")


# For each kind: the result in NumPy, its layout, and the operation on the mesh. The axis shards the first dim of the
# array, which has two dims.
_Operation = Callable[[tf.Tensor, str, dtensor.Mesh], tf.Tensor]
_Kind = tuple[Callable[[np.ndarray], np.ndarray], Callable[[str], Axes], _Operation]


def _reduced(x: tf.Tensor, axis: str, over: dtensor.Mesh) -> tf.Tensor:
    del axis, over
    return tf.reduce_sum(x, 0)


def _unchanged(x: tf.Tensor, axis: str, over: dtensor.Mesh) -> tf.Tensor:
    del axis, over
    return x


def _gathered(x: tf.Tensor, axis: str, over: dtensor.Mesh) -> tf.Tensor:
    return replicas.gather(x, (axis, None), over, None if axis == axis_sizes(over).data else axis)


def _exchanged(x: tf.Tensor, axis: str, over: dtensor.Mesh) -> tf.Tensor:
    """Move the axis to the last dim: each device sends a chunk of its row to each device."""
    with local_shards.scope():
        rows = tf.reshape(local_shards.to_local(x, (axis, None), over), (axis_sizes(over)[axis], -1))
        rows = replicas.exchanged(rows, over)
    return local_shards.from_local(rows, (None, axis), over)


_ALL_TO_ALL = "all-to-all in groups"
KINDS: Mapping[str, _Kind] = {
    "all-reduce": (lambda x: x.sum(0), lambda axis: (None,), _reduced),
    "reduce-scatter": (lambda x: x.sum(0), lambda axis: (axis,), _reduced),
    "all-gather": (lambda x: x, lambda axis: (None, None), _unchanged),
    "gather and slice": (lambda x: x, lambda axis: (None, axis), _unchanged),
    "all-gather in groups": (lambda x: x, lambda axis: (None, None), _gathered),
    _ALL_TO_ALL: (lambda x: x, lambda axis: (None, axis), _exchanged),
}


def kinds_of(axis: str, over: dtensor.Mesh) -> list[str]:
    """Return the kinds that run over an axis. The all-to-all needs a mesh with a data axis only."""
    is_flat = list(axis_sizes(over)) == [axis] == [axis_sizes(over).data]
    return [kind for kind in KINDS if is_flat or kind != _ALL_TO_ALL]


def wrong_devices(kind: str, axis: str, over: dtensor.Mesh, size: int) -> list[int]:
    """Return the numbers of this process's devices that have a wrong result of a collective.

    Args:
        kind: A key of `KINDS`.
        axis: The axis over which the collective runs.
        over: The mesh.
        size: The bytes of the array.
    """
    expect, layout_of, operation = KINDS[kind]
    count, target = axis_sizes(over)[axis], layout_of(axis)
    columns = max(1, size // (4 * count * count)) * count
    # Sums of small integers are exact in float32, in any order.
    values = np.random.default_rng(0).integers(-1000, 1000, (count, columns)).astype("float32")
    sharded = transfer.host_to_mesh(values, (axis, None), over)
    traced = tf.function(lambda x: transfer.relayout(operation(x, axis, over), target, over), autograph=False)
    with gathers.one_axis_at_once():
        result = traced.get_concrete_function(tf.TensorSpec(values.shape, tf.float32))(sharded)
    expected, sizes = expect(values), axis_sizes(over)
    wrong = []
    for local, location in zip(messages.unpacked(result), over.local_device_locations(), strict=True):
        box = boxes.shard_box(expected.shape, target, sizes, location)
        cut = tuple(slice(at, at + length) for at, length in zip(box.offset, box.shape, strict=True))
        if not np.array_equal(np.asarray(local), expected[cut]):
            wrong.append(int(np.ravel_multi_index([location[name] for name in over.dim_names], over.shape())))
    return wrong
