"""A model's forward pass as a graph of TensorFlow operations, from which layouts are derived and checked."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import LayoutError
from tfshard.graph import adapters, inventory
from tfshard.layouts.layout_map import VariableSpec

# Sizes for dims that the model leaves open. Position embeddings may be short, and images are reduced often.
_OPEN_SIZES = (8, 64, 4)
_GIVE_EXAMPLE = (
    "Give an example: inputs=(arrays of the shapes and dtypes that fit() gets); for a strategy, "
    "layout_map=tfshard.auto_layout_map(model, mesh, inputs=...)"
)
_BATCH = 2

# The shape and the dtype of an input.
_Spec = tuple[tuple[int | None, ...], tf.DType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """The forward pass of a model.

    Attributes:
        operations: The operations in the order in which they were made: inputs come before uses.
        variables: The name of a variable's placeholder to the variable.
        outputs: The names of the tensors that the model returns.
        inputs: The names of the tensors that the model takes.
        losses: The names of the losses that layers add.
    """

    operations: tuple[tf.Operation, ...]
    variables: dict[str, VariableSpec]
    outputs: frozenset[str]
    inputs: frozenset[str] = frozenset()
    losses: frozenset[str] = frozenset()

    @functools.cached_property
    def consumers(self) -> dict[str, list[tuple[int, int]]]:
        """Tensor name to the operations that take it: each by its index in `operations` and the number of the input."""
        found: dict[str, list[tuple[int, int]]] = {}
        for place, operation in enumerate(self.operations):
            for number, tensor in enumerate(operation.inputs):
                found.setdefault(tensor.name, []).append((place, number))
        return found

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """The names of the tensors that depend on a trained variable."""
        found = {name for name, spec in self.variables.items() if spec.trainable}
        for operation in self.operations:
            if operation.type != "StopGradient" and any(tensor.name in found for tensor in operation.inputs):
                found.update(tensor.name for tensor in operation.outputs)
        return frozenset(found)


def trace(model: keras.Model, inputs: Any = None) -> ModelGraph:
    """Call a built model once in a graph, without computation or allocation.

    Args:
        model: A built model, sharded or not; also a model from `tfshard.abstract_model`.
        inputs: The inputs of the call: arrays, or anything with a shape and a dtype, nested like the model's inputs. By
            default the inputs that the model was built for, with small sizes for open dims.

    Raises:
        LayoutError: The model's inputs are not known, or the model cannot be called on them.
    """
    if not model.built:
        raise LayoutError(
            f"Model '{model.name}' is not built, so its graph is not known. Give it a keras.Input, or call "
            f"model.build(input_shape). Received: model={model!r}"
        )
    failure: Exception | None = None
    for size in (None,) if inputs is not None else _OPEN_SIZES:
        try:
            return _trace(model, _input_specs(model, inputs, size))
        except LayoutError:
            raise
        # A model's call may raise anything on inputs of a wrong size.
        except Exception as e:
            failure = e
    raise LayoutError(
        f"Model '{model.name}' cannot be called on placeholder inputs, so its graph is not known. "
        f"{_GIVE_EXAMPLE}. "
        f"The call failed with: {failure}"
    ) from failure


def _input_specs(model: keras.Model, inputs: Any, size: int | None) -> Any:
    if inputs is not None:
        return keras.tree.map_structure(lambda each: (tuple(each.shape), tf.as_dtype(each.dtype)), inputs)

    def of_tensor(tensor: keras.KerasTensor) -> _Spec:
        shape = [_BATCH if i == 0 else size if dim is None else dim for i, dim in enumerate(tensor.shape)]
        return tuple(shape), tf.as_dtype(tensor.dtype)

    if isinstance(model, keras.Sequential):
        return of_tensor(model.inputs[0])
    if isinstance(model, _private.Functional):
        return keras.tree.map_structure(of_tensor, model.input)
    config = model.get_build_config() or {}
    shape = config.get("input_shape")
    if shape is None or not all(isinstance(dim, int | None) for dim in shape):
        raise LayoutError(
            f"The inputs of model '{model.name}' (of type {type(model).__name__}) are not known. {_GIVE_EXAMPLE}, "
            f"or write the layout map by hand. Received: inputs=None, build config {config}"
        )
    return (tuple(_BATCH if i == 0 else size if dim is None else dim for i, dim in enumerate(shape)), tf.float32)


def _trace(model: keras.Model, specs: Any) -> ModelGraph:
    graph = _private.func_graph("tfshard_trace")
    with graph.as_default(), warnings.catch_warnings():
        # The model's call warns again when the model is trained.
        warnings.simplefilter("ignore")
        variables, mapping = {}, []
        for variable, layer in inventory.owned_variables(model):
            placeholder = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            mapping.append((variable, placeholder))
            variables[placeholder.name] = VariableSpec(
                path=variable.path,
                shape=tuple(variable.shape),
                dtype=variable.dtype,
                trainable=variable.trainable,
                layer=layer,
            )
        tensors = _map_specs(lambda shape, dtype: tf.compat.v1.placeholder(dtype, shape), specs)
        scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
        with scope, adapters.apart(model):
            outputs = model(tensors, training=False)
    return ModelGraph(
        operations=tuple(graph.get_operations()),
        variables=variables,
        outputs=frozenset(t.name for t in keras.tree.flatten(outputs) if isinstance(t, tf.Tensor)),
        inputs=frozenset(t.name for t in keras.tree.flatten(tensors)),
        losses=frozenset(t.name for t in scope.losses if isinstance(t, tf.Tensor) and t.graph is graph),
    )


def batch_of(model: keras.Model, samples: int, length: int | None = None) -> Any:
    """Return the input specs of a batch, if the model leaves no dim open except the batch; else None.

    Args:
        model: A built model.
        samples: The size of the batch.
        length: The size of other dims that the model leaves open.
    """
    try:
        specs = _input_specs(model, None, length)
    except LayoutError:
        return None
    found = _map_specs(lambda shape, dtype: tf.TensorSpec((samples, *shape[1:]), dtype), specs)
    return found if all(None not in tuple(each.shape) for each in keras.tree.flatten(found)) else None


def local_inputs(model: keras.Model, inputs: Any, devices: int) -> Any:
    """Make placeholders for a device's share of a batch, in the graph that is being built.

    Args:
        model: A built model.
        inputs: As for `trace`.
        devices: The number of devices that divide the batch. If it does not divide the batch size, each device has the
            full batch.

    Raises:
        LayoutError: The model's inputs are not known.
    """

    def share(shape: tuple[int | None, ...], dtype: tf.DType) -> tf.Tensor:
        if inputs is not None and shape and shape[0] is not None and shape[0] % devices == 0:
            shape = (shape[0] // devices, *shape[1:])
        return tf.compat.v1.placeholder(dtype, shape)

    return _map_specs(share, _input_specs(model, inputs, _OPEN_SIZES[0]))


def _map_specs(make: Callable[[tuple[int | None, ...], tf.DType], tf.Tensor], specs: Any) -> Any:
    """Return `make(shape, dtype)` for each (shape, dtype) of a nested structure."""
    if isinstance(specs, tuple) and len(specs) == 2 and isinstance(specs[1], tf.DType):
        return make(*specs)
    if isinstance(specs, dict):
        return {key: _map_specs(make, value) for key, value in specs.items()}
    return type(specs)(_map_specs(make, value) for value in specs)
