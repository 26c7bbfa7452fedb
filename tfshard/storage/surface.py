"""The methods of a `tf.Variable` other than read and write, in terms of `value`, `numpy` and `assign`."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError, warn


def _in_place(operator: str, instead: str) -> Callable[[Any, Any], NoReturn]:
    def refuse(self: "VariableSurface", other: Any) -> NoReturn:
        del other
        raise RuntimeError(
            f"`variable {operator} value` is not supported, as for every tf.Variable: it would replace the variable "
            f"by a tensor. Use `{instead}`. Received: variable '{self.path}'"
        )

    return refuse


def _unsupported(method: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: "VariableSurface", *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise StrategyError(
            f"A sharded variable has no {method}(). Use {instead}. Received: {method}() of variable '{self.path}'"
        )

    return refuse


class VariableSurface(tf.Variable, _private.TensorType):  # type: ignore[misc]
    """Mixed into `ShardedVariable`: conversions to Python, copies, and writes to parts of the value.

    A `ShardedVariable` is a tensor to `tf.is_tensor` and to `tape.watch`, as TensorFlow's variables are.

    A write to a slice writes the full value with the slice changed.
    """

    path: str

    # --- as a Python value, outside of a traced function -------------------------------------------------

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __copy__(self) -> tf.Variable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> tf.Variable:
        copied = self._as_plain_variable()
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Callable[..., tf.Variable], tuple[np.ndarray, bool, str]]:
        return _plain_variable, (self.numpy(), self.trainable, self.name.partition(":")[0])

    def _as_plain_variable(self) -> tf.Variable:
        """Return a variable of this value that is on no mesh: a copy may outlive the mesh."""
        return _plain_variable(self.numpy(), self.trainable, self.name.partition(":")[0])

    def _export_to_saved_model_graph(
        self, object_map: Any = None, tensor_map: Any = None, options: Any = None, **kwargs: Any
    ) -> NoReturn:
        del object_map, tensor_map, options, kwargs
        message = (
            f"Variable '{self.path}' is sharded, but a SavedModel holds full variables. Export its model with "
            "model.export(path). Or save the model with model.save(path), load it without a strategy, and use the "
            f"loaded model (ExportArchive, tf.saved_model.save, TFLiteConverter.from_saved_model). Received: {self!r}"
        )
        if _private.is_called_by("tensorflow.lite"):
            warn(message)  # The converter swallows the error, and fails with another one.
        raise StrategyError(message)

    # --- TensorFlow asks for these -----------------------------------------------------------------------

    @property
    def initializer(self) -> None:
        return None

    @property
    def op(self) -> NoReturn:
        raise AttributeError(f"A sharded variable has no op. Received: variable '{self.path}'")

    @property
    def graph(self) -> NoReturn:
        raise AttributeError(f"A sharded variable belongs to no graph. Received: variable '{self.path}'")

    def set_shape(self, shape: Any) -> None:
        """Check that the variable has the shape."""
        if not self.shape.is_compatible_with(shape):
            raise ValueError(
                f"The shape of variable '{self.path}' cannot be changed. Its shape: {self.shape}. Received: {shape}"
            )

    # --- reading and writing parts -----------------------------------------------------------------------

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.value(), indices, name=name)

    def scatter_add(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> tf.Variable:
        return self.assign_add(self._dense(sparse_delta))

    def scatter_sub(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> tf.Variable:
        return self.assign_sub(self._dense(sparse_delta))

    def _dense(self, sparse: tf.IndexedSlices | tf.Tensor) -> tf.Tensor:
        """Convert IndexedSlices to a tensor of the variable's shape. Rows that occur twice are summed."""
        if isinstance(sparse, tf.IndexedSlices):
            sparse = tf.IndexedSlices(sparse.values, sparse.indices, tf.constant(self.shape.as_list(), tf.int64))
        return tf.convert_to_tensor(sparse)

    def scatter_update(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> tf.Variable:
        return self._write(tf.tensor_scatter_nd_update, sparse_delta)

    def scatter_max(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> tf.Variable:
        return self._write(tf.tensor_scatter_nd_max, sparse_delta)

    def scatter_min(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> tf.Variable:
        return self._write(tf.tensor_scatter_nd_min, sparse_delta)

    def _write(self, function: Callable[..., tf.Tensor], sparse: tf.IndexedSlices) -> tf.Variable:
        return self.assign(function(self.value(), tf.expand_dims(sparse.indices, -1), sparse.values))

    def scatter_nd_update(self, indices: tf.Tensor, updates: tf.Tensor, name: str | None = None) -> tf.Variable:
        return self.assign(tf.tensor_scatter_nd_update(self.value(), indices, updates))

    def scatter_nd_add(self, indices: tf.Tensor, updates: tf.Tensor, name: str | None = None) -> tf.Variable:
        return self.assign(tf.tensor_scatter_nd_add(self.value(), indices, updates))

    def scatter_nd_sub(self, indices: tf.Tensor, updates: tf.Tensor, name: str | None = None) -> tf.Variable:
        return self.assign(tf.tensor_scatter_nd_sub(self.value(), indices, updates))

    def _strided_slice_assign(
        self, begin: tf.Tensor, end: tf.Tensor, strides: tf.Tensor, value: Any, name: str | None, **masks: int
    ) -> tf.Variable:
        """`variable[begin:end].assign(value)`."""
        full = self.value()
        value = tf.convert_to_tensor(value, full.dtype)
        return self.assign(
            tf.raw_ops.TensorStridedSliceUpdate(
                input=full, begin=begin, end=end, strides=strides, value=value, name=name, **masks
            )
        )

    __iadd__ = _in_place("+=", "variable.assign_add(value)")
    __isub__ = _in_place("-=", "variable.assign_sub(value)")
    __imul__ = _in_place("*=", "variable.assign(variable * value)")
    __itruediv__ = _in_place("/=", "variable.assign(variable / value)")
    __ipow__ = _in_place("**=", "variable.assign(variable ** value)")

    scatter_mul = _unsupported("scatter_mul", "assign() with a full value")
    scatter_div = _unsupported("scatter_div", "assign() with a full value")
    batch_scatter_update = _unsupported("batch_scatter_update", "scatter_nd_update()")
    count_up_to = _unsupported("count_up_to", "assign_add(1)")
    load = _unsupported("load", "assign()")
    eval = _unsupported("eval", "numpy()")


def _plain_variable(value: np.ndarray, trainable: bool, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=trainable, name=name)
