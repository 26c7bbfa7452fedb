"""Operations that every device computes in full: shapes that depend on values, orders, counts, segments, diagonals."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from sweeps import SWEEP
from tfshard.devices import expansions, transfer

VALUES = np.random.RandomState(0).permutation(24).reshape(8, 3).astype("float32") / 24
IDS = np.array([0, 3, 1, 1, 2, 5, 4, 3])
BOXES = np.concatenate([VALUES[:, :2], VALUES[:, :2] + 0.5], axis=1)


# The tested operation types, and the function of (values, ids, boxes).
CASES = {
    "boolean_mask, summed": (("Where",), lambda v, i, b: tf.reduce_sum(tf.boolean_mask(v, v > 0.5))),
    "boolean_mask, averaged": (("Where",), lambda v, i, b: tf.reduce_mean(tf.boolean_mask(v, v[:, 0] > 0.5))),
    "boolean_mask of each row": (("Where",), lambda v, i, b: tf.reduce_mean(tf.boolean_mask(v, v[:, 0] > 0.5), 0)),
    "boolean_mask itself": (("Where",), lambda v, i, b: tf.boolean_mask(v, v > 0.5)),
    "boolean_mask that finds nothing": (("Where",), lambda v, i, b: tf.reduce_sum(tf.boolean_mask(v, v > 5.0))),
    "boolean_mask, its size": (("Where",), lambda v, i, b: tf.size(tf.boolean_mask(v, v > 0.5))),
    "boolean_mask, its shape": (("Where",), lambda v, i, b: tf.shape(tf.boolean_mask(v, v > 0.5))),
    "boolean_mask by the batch": (("Where",), lambda v, i, b: tf.boolean_mask(v, i > 2) @ tf.ones((3, 2))),
    "boolean_mask next to the batch": (("Where",), lambda v, i, b: tf.concat([tf.boolean_mask(v, i > 2), v], axis=0)),
    "boolean_mask, a column of it": (("Where",), lambda v, i, b: tf.boolean_mask(v, i > 2)[:, 1]),
    "boolean_mask, some columns of it": (("Where",), lambda v, i, b: tf.boolean_mask(v, i > 2)[..., None, 1:] * 2),
    "boolean_mask, its first row": (("Where",), lambda v, i, b: tf.boolean_mask(v, i > 2)[0]),
    "boolean_mask, reshaped": (("Where",), lambda v, i, b: tf.reshape(tf.boolean_mask(v, i > 2), (3, -1))),
    "boolean_mask through a product": (
        ("Where",),
        lambda v, i, b: tf.nn.softmax(tf.boolean_mask(v, i > 2) @ tf.ones((3, 2))),
    ),
    "boolean_mask, filled up": (
        ("Where",),
        lambda v, i, b: tf.ones_like(tf.boolean_mask(v, i > 2)) * 3 + tf.boolean_mask(v, i > 2),
    ),
    "boolean_mask in a loss": (
        ("Where",),
        lambda v, i, b: keras.losses.mean_squared_error(tf.boolean_mask(v, i > 2), tf.boolean_mask(v * v, i > 2)),
    ),
    "where of a vector": (("Where",), lambda v, i, b: tf.where(i > 2)),
    "where of a matrix": (("Where",), lambda v, i, b: tf.where(v > 0.5)),
    "where of three dims": (("Where",), lambda v, i, b: tf.where(tf.reshape(v, (4, 2, 3)) > 0.5)),
    "where and gather": (("Where",), lambda v, i, b: tf.gather(v, tf.where(i > 2)[:, 0])),
    "where and gather_nd": (("Where",), lambda v, i, b: tf.gather_nd(v, tf.where(v > 0.5))),
    "where and scatter_nd": (
        ("Where",),
        lambda v, i, b: tf.scatter_nd(tf.where(i > 2), tf.ones_like(tf.where(i > 2)[:, 0]), (8,)),
    ),
    "keras.ops.nonzero": (("Where",), lambda v, i, b: keras.ops.nonzero(v > 0.5)),
    "count_nonzero": ((), lambda v, i, b: tf.math.count_nonzero(v > 0.5)),
    "unique": (("Unique",), lambda v, i, b: tf.unique(i)),
    "unique_with_counts": (("UniqueWithCounts",), lambda v, i, b: tf.unique_with_counts(i)),
    "unique of an axis": (("UniqueV2",), lambda v, i, b: tf.raw_ops.UniqueV2(x=i, axis=[0])),
    "unique of an axis, with counts": (
        ("UniqueWithCountsV2",),
        lambda v, i, b: tf.raw_ops.UniqueWithCountsV2(x=i, axis=[0]),
    ),
    "setdiff1d": (("ListDiff",), lambda v, i, b: tf.raw_ops.ListDiff(x=i, y=tf.constant([1, 5], tf.int64))),
    "dynamic_partition": (("DynamicPartition",), lambda v, i, b: tf.dynamic_partition(v, tf.cast(i % 2, tf.int32), 2)),
    "dynamic_partition and dynamic_stitch": (
        ("DynamicPartition", "DynamicStitch", "ParallelDynamicStitch"),
        lambda v, i, b: tf.dynamic_stitch(
            tf.dynamic_partition(tf.range(8), tf.cast(i % 2, tf.int32), 2),
            tf.dynamic_partition(v, tf.cast(i % 2, tf.int32), 2),
        ),
    ),
    "parallel_dynamic_stitch": (
        ("ParallelDynamicStitch",),
        lambda v, i, b: tf.raw_ops.ParallelDynamicStitch(indices=[tf.range(4), tf.range(4, 8)], data=[v[:4], v[4:]]),
    ),
    "non_max_suppression": (
        ("NonMaxSuppressionV3",),
        lambda v, i, b: tf.gather(v, tf.image.non_max_suppression(b, v[:, 0], 5, 0.3)),
    ),
    "non_max_suppression V2": (
        ("NonMaxSuppressionV2",),
        lambda v, i, b: tf.raw_ops.NonMaxSuppressionV2(boxes=b, scores=v[:, 0], max_output_size=5, iou_threshold=0.3),
    ),
    "non_max_suppression, padded": (
        ("NonMaxSuppressionV4",),
        lambda v, i, b: tf.raw_ops.NonMaxSuppressionV4(
            boxes=b, scores=v[:, 0], max_output_size=5, iou_threshold=0.3, score_threshold=0.1,
            pad_to_max_output_size=True,
        ),
    ),
    "non_max_suppression with scores": (
        ("NonMaxSuppressionV5",),
        lambda v, i, b: tf.image.non_max_suppression_with_scores(
            b, tf.stop_gradient(v[:, 0]), 5, 0.3, soft_nms_sigma=0.5
        ),
    ),
    "combined_non_max_suppression": (
        ("CombinedNonMaxSuppression",),
        lambda v, i, b: tf.image.combined_non_max_suppression(b[None, :, None], tf.stop_gradient(v)[None], 4, 4),
    ),
    "tensor_scatter_nd_sub": (("TensorScatterSub",), lambda v, i, b: tf.tensor_scatter_nd_sub(v, i[:, None], v)),
    "tensor_scatter_nd_max": (("TensorScatterMax",), lambda v, i, b: tf.tensor_scatter_nd_max(v, i[:, None], v * 2)),
    "tensor_scatter_nd_min": (("TensorScatterMin",), lambda v, i, b: tf.tensor_scatter_nd_min(v, i[:, None], v / 2)),
    "segment_sum": (("SegmentSum",), lambda v, i, b: keras.ops.segment_sum(v, tf.sort(i), sorted=True)),
    "segment_mean": (("SegmentMean",), lambda v, i, b: tf.math.segment_mean(v, tf.sort(i))),
    "unsorted_segment_max": (("UnsortedSegmentMax",), lambda v, i, b: tf.math.unsorted_segment_max(v, i, 6)),
    "unsorted_segment_min": (("UnsortedSegmentMin",), lambda v, i, b: tf.math.unsorted_segment_min(v, i, 6)),
    "unsorted_segment_prod": (("UnsortedSegmentProd",), lambda v, i, b: tf.math.unsorted_segment_prod(v + 1, i, 6)),
    "bincount": (("DenseBincount",), lambda v, i, b: tf.math.bincount(i, minlength=7, maxlength=7)),
    "keras.ops.bincount": ((), lambda v, i, b: keras.ops.bincount(i, minlength=7)),
    "bincount with weights": (
        ("Bincount",),
        lambda v, i, b: tf.raw_ops.Bincount(arr=tf.cast(i, tf.int32), size=7, weights=tf.stop_gradient(v)[:, 0]),
    ),
    "bucketize": (("Bucketize",), lambda v, i, b: tf.raw_ops.Bucketize(input=v, boundaries=[0.2, 0.5])),
    "searchsorted": (("LowerBound",), lambda v, i, b: tf.searchsorted(tf.constant([0.1, 0.4, 0.7]), v[:, 0])),
    "searchsorted from the right": (
        ("UpperBound",),
        lambda v, i, b: keras.ops.searchsorted(tf.constant([0.1, 0.4, 0.7]), v[:, 0], side="right"),
    ),
    "diag": (("MatrixDiagV3",), lambda v, i, b: tf.linalg.diag(v)),
    "diag_part": (("MatrixDiagPartV3",), lambda v, i, b: tf.linalg.diag_part(v[:, None] * v[..., None])),
    "set_diag": (("MatrixSetDiagV3",), lambda v, i, b: tf.linalg.set_diag(tf.reshape(v[:6], (2, 3, 3)), v[6:])),
    "keras.ops.triu": ((), lambda v, i, b: keras.ops.triu(v)),
    "band_part": (("MatrixBandPart",), lambda v, i, b: tf.linalg.band_part(v, 1, 0)),
    "reverse of the batch": (("ReverseV2",), lambda v, i, b: tf.reverse(v, [0])),
    "keras.ops.flip": (("ReverseV2",), lambda v, i, b: keras.ops.flip(v, axis=1)),
    "v[::-1]": ((), lambda v, i, b: v[::-1]),
    "reverse_sequence": (("ReverseSequence",), lambda v, i, b: tf.reverse_sequence(v, i // 2, seq_axis=1)),
    "roll": (("Roll",), lambda v, i, b: keras.ops.roll(v, 3, axis=0)),
    "cumprod": (("Cumprod",), lambda v, i, b: tf.math.cumprod(v + 0.5, axis=0)),
    "cumulative_logsumexp": (("CumulativeLogsumexp",), lambda v, i, b: tf.math.cumulative_logsumexp(v, axis=0)),
}  # fmt: skip


def results_and_gradient(function):
    def step(v, i, b):
        with tf.GradientTape() as tape:
            tape.watch(v)
            results = function(v, i, b)
            if isinstance(results, dict) or hasattr(results, "_asdict"):
                results = list(results)
            floats = [each for each in tf.nest.flatten(results) if each.dtype.is_floating]
            loss = tf.add_n([tf.reduce_sum(tf.square(each)) for each in floats]) if floats else tf.reduce_sum(v)
        return results, tape.gradient(loss, v, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return step


def test_every_operation_that_is_computed_whole_is_tried_here():
    tried = {op for ops, _ in CASES.values() for op in ops} - {"Where", "Unique"}
    assert tried | {"Size", "ConcatOffset", "Empty", "EnsureShape"} == set(expansions.REPLICATED_OPERATIONS)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_and_its_gradient_are_those_of_one_device(name: str):
    types, function = CASES[name]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    step = results_and_gradient(function)
    plain = tf.function(step).get_concrete_function(*(tf.TensorSpec(v.shape, v.dtype) for v in (VALUES, IDS, BOXES)))
    assert set(types) <= {operation.type for operation in plain.graph.get_operations()}
    expected = [np.asarray(tf.convert_to_tensor(each)) for each in tf.nest.flatten(plain(VALUES, IDS, BOXES))]
    sharded = [on_mesh(value, strategy.mesh) for value in (VALUES, IDS, BOXES)]
    # In a compiled step and in an eager step, where DTensor expands most operations, or runs them on the host.
    for run in (tf.function(step), step) if SWEEP or "Where" in types or not types else (tf.function(step),):
        with strategy.extended.results_stay_sharded():
            results = tf.nest.flatten(strategy.run(run, args=tuple(sharded)))
        results = [transfer.to_host(tf.convert_to_tensor(each)) for each in results]
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(run))


def on_mesh(value: np.ndarray, mesh) -> tf.Tensor:
    """Put a value on the mesh with its first dim sharded."""
    tensor = transfer.host_to_mesh(value, ("batch",) + (None,) * (value.ndim - 1), mesh)
    assert tf.experimental.dtensor.fetch_layout(tensor).num_shards(0) == 4
    return tensor


def test_a_product_of_rows_of_unknown_number_with_all_samples_matches_one_device():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = [on_mesh(value, strategy.mesh) for value in (VALUES, IDS, BOXES)]
    step = tf.function(results_and_gradient(lambda v, i, b: tf.boolean_mask(v, v[:, 0] > 0.5)[:, None, :] * v[None]))
    expected = step(VALUES, IDS, BOXES)
    for ours, theirs in zip(strategy.run(step, args=tuple(sharded)), expected, strict=True):
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=1e-5)
