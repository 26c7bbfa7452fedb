"""The state of `tf.data` iterators."""

import tensorflow as tf

from tfshard._private.graphs import is_stateful

# The values of TensorFlow's SerializationOptions.ExternalStatePolicy.
_IGNORE_STATE, _FAIL_ON_STATE = 1, 2


def iterator_state(iterator: tf.data.Iterator, *, ignore_random: bool) -> tf.Tensor:
    """Return the state of a `tf.data` iterator as a variant tensor (`OwnedIterator._iterator_resource`)."""
    return tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource,
        external_state_policy=_IGNORE_STATE if ignore_random else _FAIL_ON_STATE,
    )


def stateful_operations(iterator: tf.data.Iterator) -> list[str]:
    """Return the names of the stateful operations that a `tf.data` iterator's dataset functions run.

    Stateful operations use variables or random state. Reads `OwnedIterator._dataset`, `DatasetV2._functions` and
    `_inputs`.
    """
    found, waiting = [], [getattr(iterator, "_dataset", None)]
    while waiting:
        dataset = waiting.pop()
        if dataset is None:
            continue
        for wrapped in dataset._functions():
            for operation in wrapped.function.graph.get_operations():
                if is_stateful(operation) and not operation.type.startswith("LookupTable"):
                    found.append(operation.name)
        waiting += dataset._inputs()
    return found


def restore_iterator(iterator: tf.data.Iterator, state: tf.Tensor) -> None:
    """Restore a `tf.data` iterator to a state (`OwnedIterator._iterator_resource`)."""
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)
