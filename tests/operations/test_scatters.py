"""Scatters and gathers with sharded operands match one device, in compiled and eager steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import transfer

RANDOM = np.random.RandomState(0)
# Two rows of the batch go to the same place, and one place gets none.
ROWS = np.array([[5], [0], [3], [3]])
PAIRS = np.array([[[0, 1], [6, 2]], [[3, 0], [3, 0]], [[1, 1], [2, 2]], [[4, 0], [5, 1]]])
# No place twice: the order of two updates is undefined.
SINGLE = np.array([[5], [0], [3], [1]])
# The function of (tensor, indices, updates), their shapes, and whether the batch axis shards the tensor's first dim.
CASES = {
    "scatter_nd of rows": (lambda t, i, u: tf.scatter_nd(i, u, (7, 3)), (4, 2), ROWS, (4, 3)),
    "scatter_nd of elements": (lambda t, i, u: tf.scatter_nd(i, u, (7, 3)), (4, 2), PAIRS, (4, 2)),
    "scatter_nd of a shape": (lambda t, i, u: tf.scatter_nd(i, u, tf.shape(t, tf.int64)), (8, 3), ROWS, (4, 3)),
    "keras.ops.scatter": (lambda t, i, u: keras.ops.scatter(i, u, (7, 3, 2)), (4, 2), PAIRS, (4, 2, 2)),
    "tensor_scatter_nd_add": (lambda t, i, u: tf.tensor_scatter_nd_add(t, i, u), (8, 3), ROWS, (4, 3)),
    "tensor_scatter_nd_add of elements": (lambda t, i, u: tf.tensor_scatter_nd_add(t, i, u), (8, 3), PAIRS, (4, 2)),
    "tensor_scatter_nd_sub": (lambda t, i, u: tf.tensor_scatter_nd_sub(t, i, u), (8, 3), ROWS, (4, 3)),
    "tensor_scatter_nd_update": (lambda t, i, u: tf.tensor_scatter_nd_update(t, i, u), (8, 3), SINGLE, (4, 3)),
    "keras.ops.scatter_update": (lambda t, i, u: keras.ops.scatter_update(t, i, u), (8, 3), SINGLE, (4, 3)),
    "tensor_scatter_nd_max": (lambda t, i, u: tf.tensor_scatter_nd_max(t, i, u), (8, 3), ROWS, (4, 3)),
    "tensor_scatter_nd_min": (lambda t, i, u: tf.tensor_scatter_nd_min(t, i, u), (8, 3), PAIRS, (4, 2)),
    "gather_nd of rows": (lambda t, i, u: tf.gather_nd(t, i) * u, (8, 3), ROWS, (4, 3)),
    "gather_nd of elements": (lambda t, i, u: tf.gather_nd(t, i) * u, (8, 3), PAIRS, (4, 2)),
    "gather_nd with batch dims": (lambda t, i, u: tf.gather_nd(t, i % 3, batch_dims=1) * u, (4, 3, 5), ROWS, (4, 5)),
    "gather with batch dims": (lambda t, i, u: tf.gather(t, i % 3, axis=1, batch_dims=1) * u, (4, 3, 5), ROWS, (4, 1, 5)),  # noqa: E501
    "top_k": (lambda t, i, u: tf.math.top_k(t, 2)[0] * u, (4, 5), ROWS, (4, 2)),
    "take_along_axis": (lambda t, i, u: keras.ops.take_along_axis(t, i % 3, axis=1) * u, (4, 3), ROWS, (4, 1)),
    "unsorted_segment_sum": (lambda t, i, u: tf.math.unsorted_segment_sum(u, i[:, 0], 7), (4, 2), ROWS, (4, 3)),
}  # fmt: skip
# The axis that shards the first dim of (tensor, indices, updates), and the axis of the last dim of tensor and updates.
LAYOUTS = [
    ((None, None, None), None),
    (("batch", "batch", "batch"), None),
    ((None, "batch", None), None),
    (("batch", None, None), None),
    ((None, None, "batch"), "model"),
    (("batch", "batch", "batch"), "model"),
]


def strategy() -> tfshard.ShardedStrategy:
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), zero_stage=0)
    assert chosen.mesh.size == 4
    return chosen


def on_mesh(value: np.ndarray, first: str | None, last: str | None, mesh) -> tf.Tensor:
    axes: list = [None] * value.ndim
    axes[0] = first if value.shape[0] % 2 == 0 else None
    if value.ndim > 1 and value.shape[-1] % 2 == 0:
        axes[-1] = last
    tensor = transfer.host_to_mesh(value, tuple(axes), mesh)
    # Premise: the tensor is sharded.
    assert tf.experimental.dtensor.fetch_layout(tensor).num_shards(0) == (1 if axes[0] is None else 2)
    return tensor


def result_and_gradients(function):
    def step(t, i, u):
        with tf.GradientTape() as tape:
            tape.watch([t, u])
            result = function(t, i, u)
            loss = tf.reduce_sum(tf.square(result) * 0.5 + result)
        return result, *tape.gradient(loss, [t, u], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return step


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_a_scatter_or_gather_and_its_gradients_are_those_of_one_device(name: str):
    function, shape, indices, update_shape = CASES[name]
    values = RANDOM.normal(size=shape).astype("float32"), indices, RANDOM.normal(size=update_shape).astype("float32")
    step, chosen = result_and_gradients(function), strategy()
    expected = [np.asarray(tf.convert_to_tensor(each)) for each in step(*(tf.constant(value) for value in values))]
    for number, (firsts, last) in enumerate(LAYOUTS):
        lasts = last, None, last
        sharded = [on_mesh(v, *axes, chosen.mesh) for v, *axes in zip(values, firsts, lasts, strict=True)]
        # Eager steps compile each operation separately. Tries one layout of each kind.
        for run in [tf.function(step)] + [step] * (number in (1, 5)):
            with chosen.extended.results_stay_sharded():
                results = chosen.run(run, args=tuple(sharded))
            results = [transfer.to_host(tf.convert_to_tensor(each)) for each in results]
            for ours, theirs in zip(results, expected, strict=True):
                np.testing.assert_allclose(
                    ours, theirs, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {firsts}, {last}, {run}"
                )
