"""The instance keys that DTensor gives collectives when it compiles them."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context as _context

# The index of a collective's input that holds its instance key.
_INSTANCE = 3


def instance_keys(run: Callable[[], object]) -> list[int]:
    """Return the sorted instance keys of the collectives that DTensor compiles for a call.

    DTensor counts the keys (tf_collective_instance_key_base in TensorFlow 2.21's dtensor/mlir). A collective must have
    the same key on all clients.

    Args:
        run: Calls a function for the first time. The function must outlive the call.
    """
    names = set(_context.context().list_function_names())
    run()
    made = set(_context.context().list_function_names()) - names
    found = {key for name in made for key in _keys_in(_context.context().get_function_def(name))}
    return sorted(found)


def _keys_in(function: tf.compat.v1.NodeDef) -> list[int]:
    nodes = {node.name: node for node in function.node_def}
    keys = []
    for node in function.node_def:
        if node.op.startswith("Collective"):
            constant = nodes[_name(node.input[_INSTANCE])]
            while constant.op != "Const":
                constant = nodes[_name(constant.input[0])]
            keys.append(int(tf.make_ndarray(constant.attr["value"].tensor)))
    return keys


def _name(tensor: str) -> str:
    return tensor.partition(":")[0]
