"""The numbers that DTensor gives to collectives when it compiles them."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context as _context

# Which input of a collective is its instance key.
_INSTANCE = 3


def instance_keys(run: Callable[[], object]) -> list[int]:
    """The instance keys of the collectives in what DTensor compiles for a call, in order. It counts them
    (tf_collective_instance_key_base in TensorFlow 2.21's dtensor/mlir), and a collective has to have the same on all
    clients.

    Args:
        run: The call, of a function that was not called before, and lives longer.
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
