"""TensorFlow's tensor bundles in local files: boxes of variables, and states of iterators."""

import pathlib
from collections.abc import Sequence

import tensorflow as tf

from tfshard.checkpoints import files
from tfshard.checkpoints.held_shards import HeldShard


def save_shards(prefix: pathlib.Path, held: Sequence[HeldShard]) -> None:
    """Write boxes to a bundle with one data file."""
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[shard.variable.key for shard in held],
            shape_and_slices=[files.spec(shard.variable.shape, shard.box) for shard in held],
            tensors=[shard.tensor if shard.is_tensor else tf.constant(shard.array()) for shard in held],
        )


def save_states(prefix: pathlib.Path, states: Sequence[tf.Tensor]) -> None:
    """Write states of iterators to a bundle."""
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[files.state_name(i) for i in range(len(states))],
            shape_and_slices=[""] * len(states),
            tensors=states,
        )


def read_states(prefix: pathlib.Path, count: int) -> list[tf.Tensor]:
    """Return the first `count` states of a bundle."""
    with tf.device("CPU:0"):
        found: list[tf.Tensor] = tf.raw_ops.RestoreV2(
            prefix=str(prefix),
            tensor_names=[files.state_name(i) for i in range(count)],
            shape_and_slices=[""] * count,
            dtypes=[tf.variant] * count,
        )
        return found


def merge(parts: Sequence[pathlib.Path], to: pathlib.Path) -> None:
    """Merge bundles to one. It has the data files of the parts in the same order, which are renamed but not read."""
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(part) for part in parts], destination_prefix=str(to), delete_old_dirs=False
        )


def data_file(number: int, count: int) -> str:
    """Return the suffix of a data file of a bundle."""
    return f".data-{number:05d}-of-{count:05d}"
