"""Which dims of the tensors of a step are those of its samples."""

import functools
import weakref

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.graph import dim_rules
from tfshard.layouts.axes import axis_sizes

# Of each graph, names and dims of tensors that are not of samples: each is followed back once.
_others: weakref.WeakKeyDictionary[tf.Graph, set[tuple[str, int]]] = weakref.WeakKeyDictionary()


def are_in(tensor: tf.Tensor, dim: int) -> bool:
    """Return whether a dim of a tensor of a step is that of the samples.

    Followed back, it is the first dim of what the step is given, or a dim that tfshard has sharded over the data axis.
    """
    others, seen = _others.setdefault(tensor.graph, set()), set()
    for source, place in dim_rules.way_back(tensor, dim, others):
        if source.op.type == "Relayout":
            if _shards_over_data(source.op.get_attr("layout").decode(), place):
                return True
        elif source.op.type == "Placeholder" and place == 0:
            if not any(inner is source for _, inner in source.graph.captures):
                return True
        seen.add((source.name, place))
    others |= seen
    return False


@functools.cache
def _shards_over_data(layout: str, dim: int) -> bool:
    found = dtensor.Layout.from_string(layout)
    data: str | None = axis_sizes(found.mesh).data
    return data is not None and found.sharding_specs[dim] == data
