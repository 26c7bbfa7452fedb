"""Check `collective-values`: each collective on each mesh axis gives every device the right values."""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import gathers, mesh, messages, startup, transfer
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
        for axis in (name for name, size in axis_sizes(over).items() if size > 1):
            for kind in KINDS:
                wrong = sorted({device for size in _SIZES for device in wrong_devices(kind, axis, over, size)})
                result = "as expected" if not wrong else f"wrong on {environment.device_text(wrong, started)}"
                log.row("Values", mesh=mesh_text(axes), axis=axis, collective=kind, result=result)
                count += 1
                if wrong:
                    log.fault(f"{kind} over axis '{axis}' of mesh {mesh_text(axes)} is {result}.")
    log.summarize(f"{count} collectives")


# For each kind: the result in NumPy, its layout, and the operation on the mesh. The axis shards the first dim of the
# array, which has two dims.
_Kind = tuple[Callable[[np.ndarray], np.ndarray], Callable[[str], Axes], Callable[[tf.Tensor], tf.Tensor]]
KINDS: Mapping[str, _Kind] = {
    "all-reduce": (lambda x: x.sum(0), lambda axis: (None,), lambda x: tf.reduce_sum(x, 0)),
    "reduce-scatter": (lambda x: x.sum(0), lambda axis: (axis,), lambda x: tf.reduce_sum(x, 0)),
    "all-gather": (lambda x: x, lambda axis: (None, None), lambda x: x),
    "all-to-all": (lambda x: x, lambda axis: (None, axis), lambda x: x),
}


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
    traced = tf.function(lambda x: transfer.relayout(operation(x), target, over), autograph=False)
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
