"""Mesh tensors that eager code may use like host tensors.

DTensor refuses an eager operation on a mesh tensor and a host tensor together, and does not show the value of a sharded
tensor. A `MeshTensor` represents a mesh tensor in a user's eager code. Operations, NumPy and Python get a host tensor.
A step, and a `tf.function` that runs a step, gets the mesh tensor.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer

# The graphs of functions in which a step was traced. These functions take mesh tensors.
_with_steps: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def note_step() -> None:
    """Remember the functions that are being traced as functions that run a step."""
    graph = None if _private.is_eager() else tf.compat.v1.get_default_graph()
    while graph is not None:
        _with_steps.add(graph)
        graph = _private.outer_graph(graph)


class MeshTensor(_private.TensorType):  # type: ignore[misc]  # TensorFlow has no types.
    """A mesh tensor that eager code uses like a host tensor.

    Attributes:
        on_mesh: The DTensor.
    """

    # `isinstance` in Python and TensorFlow's `tape.watch` see a tensor. TensorFlow's operations check the type itself
    # and convert it.
    __class__ = property(lambda self: tf.Tensor)

    # NumPy leaves arithmetic with an array as the left operand to this class, as for TensorFlow's tensors.
    __array_priority__ = 100

    def __init__(self, on_mesh: tf.Tensor, on_host: tf.Tensor | np.ndarray | None = None):
        """Wrap a DTensor.

        Args:
            on_mesh: The DTensor.
            on_host: Its value, if the host has it.
        """
        self.on_mesh = on_mesh
        self._given = on_host

    @functools.cached_property
    def on_host(self) -> tf.Tensor:
        """The full value as an eager host tensor, fetched from the devices at the first access.

        Clients of a launched run that hold different shards exchange them, so all clients must access this.
        """
        given, self._given = self._given, None
        with tf.init_scope(), _private.stop_recording():
            if given is None:
                given = transfer.to_host(self.on_mesh)
            return tf.convert_to_tensor(given, self.dtype)

    @property
    def shape(self) -> tf.TensorShape:
        return self.on_mesh.shape

    @property
    def dtype(self) -> tf.DType:
        return self.on_mesh.dtype

    @property
    def layout(self) -> dtensor.Layout:
        """The DTensor layout."""
        return dtensor.fetch_layout(self.on_mesh)

    def numpy(self) -> np.ndarray:
        """Return the full value."""
        value: np.ndarray = self.on_host.numpy()
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("on_mesh", "_given"):
            raise AttributeError(name)
        return getattr(self.on_host, name)

    # --- TensorFlow and NumPy ask for these

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        in_step = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        return tf.convert_to_tensor(self.on_mesh if in_step else self.on_host, dtype, name=name)

    def __tf_tracing_type__(self, context: object) -> "MeshTensorSpec":
        del context
        return MeshTensorSpec(self.shape, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    # --- Python

    def __float__(self) -> float:
        return float(self.on_host)

    def __int__(self) -> int:
        return int(self.on_host)

    def __index__(self) -> int:
        index: int = self.on_host.__index__()
        return index

    def __complex__(self) -> complex:
        return complex(self.on_host)

    def __bool__(self) -> bool:
        return bool(self.on_host)

    def __len__(self) -> int:
        return len(self.on_host)

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self.on_host)

    def __format__(self, format_spec: str) -> str:
        return format(self.on_host, format_spec)

    def __str__(self) -> str:
        return str(self.on_host)

    def __repr__(self) -> str:
        return repr(self.on_host)

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __hash__(self) -> int:
        return hash(self.on_host)  # Raises TensorFlow's error, which says to use ref().

    def __reduce__(self) -> tuple[Callable[[np.ndarray], tf.Tensor], tuple[np.ndarray]]:
        return tf.constant, (self.numpy(),)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: MeshTensor, *args: Any) -> Any:
        return getattr(tf.Tensor, name)(self.on_host, *args)

    return operate


for _name in tf.Tensor.OVERLOADABLE_OPERATORS:
    setattr(MeshTensor, _name, _operator(_name))


class MeshTensorSpec(tf.TensorSpec):  # type: ignore[misc]  # TensorFlow has no types.
    """The type of a `MeshTensor` in `tf.function`, which traces it as an ordinary tensor.

    A call passes the mesh tensor to functions in which a step was traced, and the host tensor to other functions.
    """

    def __init__(self, shape: Any, dtype: Any = tf.float32, name: str | None = None):
        super().__init__(shape, dtype, name)
        self._graphs: list[weakref.ref[tf.Graph]] = []

    def placeholder_value(self, placeholder_context: Any) -> Any:
        if placeholder_context.context_graph is not None:
            self._graphs.append(weakref.ref(placeholder_context.context_graph))
        return super().placeholder_value(placeholder_context)

    def cast(self, value: Any, casting_context: Any) -> Any:
        return value if isinstance(value, MeshTensor) else super().cast(value, casting_context)

    def to_tensors(self, value: Any) -> list[tf.Tensor]:
        if isinstance(value, MeshTensor):
            is_step = any(graph() in _with_steps for graph in self._graphs)
            value = value.on_mesh if is_step else value.on_host
        tensors: list[tf.Tensor] = super().to_tensors(value)
        return tensors


def wrapped(on_mesh: Any, on_host: Any = None) -> Any:
    """Return a structure with each eager DTensor replaced by a `MeshTensor`.

    Args:
        on_mesh: The structure.
        on_host: A matching structure with the host value of each leaf, if the host has it.
    """

    def wrap(leaf: Any, host: Any = None) -> Any:
        if not transfer.is_dtensor(leaf):
            return leaf
        return MeshTensor(leaf, host if isinstance(host, tf.__internal__.EagerTensor | np.ndarray) else None)

    if on_host is None:
        return tf.nest.map_structure(wrap, on_mesh)
    return tf.nest.map_structure(wrap, on_mesh, on_host, expand_composites=False)


def on_host(structure: Any) -> Any:
    """Return a structure with each mesh tensor replaced by an ordinary tensor."""

    def brought(leaf: Any) -> Any:
        if isinstance(leaf, MeshTensor):
            return leaf.on_host
        return MeshTensor(leaf).on_host if transfer.is_dtensor(leaf) else leaf

    return tf.nest.map_structure(brought, structure)


def spec_of(element_spec: Any) -> Any:
    """Convert the specs of a dataset's elements to specs of its batches on the mesh."""

    def of_leaf(leaf: Any) -> Any:
        return MeshTensorSpec(leaf.shape, leaf.dtype) if type(leaf) is tf.TensorSpec else leaf

    return tf.nest.map_structure(of_leaf, element_spec)
