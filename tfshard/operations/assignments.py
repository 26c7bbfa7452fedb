"""Arrays that are assigned to large variables: files of weights, `set_weights`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.operations import layer_patch
from tfshard.storage import steps
from tfshard.storage.variables import ShardedVariable

# Below, tensors of arrays cost nothing that counts.
_LARGE_BYTES = 1 << 20
_ROUNDED = ("float64", "float32", "float16", "bfloat16")


def install(variable: keras.Variable, current: ShardedVariable) -> None:
    """Let a large Keras variable pass arrays of its shape directly to its sharded variable.

    Keras would make a tensor of the array first, which takes two more copies. An array of another floating dtype, such
    as bfloat16 weights for a float32 variable, is cast first.

    Args:
        variable: The Keras variable.
        current: The sharded variable that is in the Keras variable, or is about to be.
    """
    if current.shape.num_elements() * current.dtype.size >= _LARGE_BYTES:
        layer_patch.apply(layer_patch.ASSIGNED_ARRAY, variable, lambda assign: _as_array(variable, assign))


def _as_array(variable: keras.Variable, assign: layer_patch.Method) -> layer_patch.Method:
    def assigned(value: Any) -> Any:
        current = _private.backend_variable(variable)
        if (
            isinstance(value, np.ndarray)
            and isinstance(current, ShardedVariable)
            and steps.is_outside()
            and not _private.in_stateless_scope()
            and value.shape == tuple(current.shape)
            and (value.dtype == current.dtype.as_numpy_dtype or _is_cast(value.dtype, current.dtype))
        ):
            return current.assign(value.astype(current.dtype.as_numpy_dtype, copy=False))
        return assign(value)

    return assigned


def _is_cast(given: np.dtype, wanted: tf.DType) -> bool:
    """Return whether Keras casts arrays of a dtype to another one by rounding to the nearest value."""
    return given.name in _ROUNDED and wanted.name in _ROUNDED
