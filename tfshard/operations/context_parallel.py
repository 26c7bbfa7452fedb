"""Context parallelism: prepare a model for steps in which each device has a chunk of the sequences.

`install` patches position embeddings, which then count positions in the full sequence. `check` refuses models in which
another operation than attention combines positions. contexts.py has the collectives, and attention.py calls them.
"""

import contextlib
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.errors import LayoutError, UnsupportedLayerError
from tfshard.graph import model_graph, token_flow
from tfshard.graph.model_graph import ModelGraph
from tfshard.graph.token_flow import TokenPoints
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import attention, contexts, layer_patch
from tfshard.operations.layer_patch import POSITIONS
from tfshard.operations.replacing import replaced
from tfshard.storage import steps

# The positions of a chunk, and the samples, of the batch with which a model is checked.
_LENGTH, _SAMPLES = 8, 2

# The layers of KerasHub, by module and class, whose `call` takes `positions=`.
_TABLE = "position_embedding.PositionEmbedding"
_POSITIONED = (
    _TABLE,
    "rotary_embedding.RotaryEmbedding",
    "sine_position_encoding.SinePositionEncoding",
)


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Patch the position embeddings of a model.

    Args:
        model: A model with variables on the mesh.
        mesh: A mesh with a context axis.

    Raises:
        UnsupportedLayerError: A layer adds a loss that depends on the number of samples, or drops whole features.
    """
    for layer in _private.flatten_layers(model):
        if _is_positioned(layer):
            layer_patch.apply(POSITIONS, layer, functools.partial(_PositionedCall, weakref.ref(layer), mesh))
        if getattr(layer, "activity_regularizer", None) is not None:
            _refuse(layer, "its activity_regularizer divides by the number of samples", mesh)
        if isinstance(layer, keras.layers.SpatialDropout1D):
            _refuse(layer, "it drops a feature of a full sequence at once", mesh)


def _refuse(layer: keras.Layer, reason: str, mesh: dtensor.Mesh) -> None:
    raise UnsupportedLayerError(
        f"Layer '{layer.path or layer.name}' does not work with context axis '{axis_sizes(mesh).context}': {reason}. "
        "Change the layer, or leave the axis out of the mesh."
    )


def _origin(layer: keras.Layer) -> str:
    """Return the module and the class of KerasHub in which a layer's `call` is written; "" for other layers."""
    function = type(layer).call
    module = str(function.__module__)
    name = f"{module.rpartition('.')[2]}.{function.__qualname__.partition('.')[0]}"
    return name if module.partition(".")[0] == "keras_hub" else ""


def _is_positioned(layer: keras.Layer) -> bool:
    return _origin(layer) in _POSITIONED and getattr(layer, "sequence_axis", 1) == 1


class _PositionedCall:
    """The `call` of a position embedding, with the positions of chunks."""

    def __init__(self, layer: Callable[[], keras.Layer | None], mesh: dtensor.Mesh, call: layer_patch.Method):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._call = layer, mesh, call

    def __call__(self, inputs: Any, start_index: Any = 0, positions: Any = None) -> Any:
        layer, recorder = self._layer(), contexts.recorder()
        if recorder is not None and not recorder.is_passive and positions is None:
            recorder.note_operands([inputs], "a position embedding")
            return recorder.new_result(inputs.shape, keras.backend.standardize_dtype(inputs.dtype))
        if steps.current() is not None and positions is None and isinstance(start_index, int):
            rows, length = inputs.shape[:2]
            positions = contexts.positions(rows, length, self._mesh) + start_index
            if layer is not None and _origin(layer) == _TABLE:
                # Keras slices the table, whose gradient is dense.
                table = contexts.with_dense_gradient(keras.ops.convert_to_tensor(layer.position_embeddings))
                return keras.ops.take(table, positions, axis=0)
        return self._call(inputs, start_index=start_index, positions=positions)


def check(model: keras.Model, mesh: dtensor.Mesh, inputs: Any = None) -> bool:
    """Check that a model combines positions of a sequence in attention layers only.

    Args:
        model: A built model.
        mesh: A mesh with a context axis.
        inputs: The specs of a batch `(B, T, ...)`. By default the inputs that the model was built for.

    Returns:
        False if the model could not be checked, because its inputs are not known. A model with an input without a
        sequence is not checked either, but warned of.

    Raises:
        UnsupportedLayerError: A layer combines positions in another way. The message names the layer.
    """
    count = axis_sizes(mesh).contexts
    specs = model_graph.batch_of(model, _SAMPLES, _LENGTH * count) if inputs is None else _with_samples(inputs)
    if specs is None:
        return False
    leaves = keras.tree.flatten(specs)
    length = next((each.shape[1] for each in leaves if each.shape.rank > 1), None)
    without = sum(each.shape.rank < 2 or each.shape[1] == 1 for each in leaves)
    if length is not None and 0 < without < len(leaves):
        warnings.warn(
            f"tfshard does not check that the layers of model '{model.name}' compute each position of a sequence by "
            "itself, which a mesh with a context axis needs, because an input of the model has no sequence. Compare a "
            "step with one on a mesh without the axis. Received: inputs "
            f"{', '.join(str(tuple(each.shape)) for each in leaves)}",
            stacklevel=2,
        )
        return True
    if length is None or any(each.shape.rank < 2 or each.shape[1] != length for each in leaves) or length % count:
        return False
    try:
        graph, points = _traced(model, specs, mesh)
    except LayoutError:
        if inputs is None:
            return False
        raise
    fault = token_flow.find_fault(graph, points)
    if fault is not None:
        _raise_fault(model, fault.operation, fault.reason, mesh)
    try:
        with any_length([model]):
            split, split_points = _traced(model, in_rows(specs, count), mesh)
    except LayoutError as error:
        _raise_fault(model, "", f"it cannot be called on shorter sequences: {error.__cause__}", mesh)
    fault = token_flow.find_difference(graph, points, split, split_points, count)
    if fault is not None:
        _raise_fault(model, fault.operation, fault.reason, mesh)
    return True


def in_rows(inputs: Any, contexts: int) -> Any:
    """Return the specs `(B * c, T / c, ...)` of a batch `(B, T, ...)` as rows of chunks; None for None.

    Args:
        inputs: Tensors or specs.
        contexts: The number of chunks of a sequence. It divides the length.
    """

    def of_leaf(leaf: Any) -> tf.TensorSpec:
        samples, length, *rest = leaf.shape
        return tf.TensorSpec((samples * contexts, length // contexts, *rest), tf.as_dtype(leaf.dtype))

    return None if inputs is None else keras.tree.map_structure(of_leaf, inputs)


def _with_samples(inputs: Any) -> Any:
    return keras.tree.map_structure(lambda each: tf.TensorSpec((_SAMPLES, *each.shape[1:]), each.dtype), inputs)


def _traced(model: keras.Model, specs: Any, mesh: dtensor.Mesh) -> tuple[ModelGraph, TokenPoints]:
    with recorded_calls(model, mesh) as recorder:
        graph = model_graph.trace(model, specs)
    return graph, TokenPoints(sources=frozenset(recorder.sources), sinks=recorder.sinks)


@contextlib.contextmanager
def recorded_calls(
    model: keras.Model, mesh: dtensor.Mesh | None, *, is_passive: bool = False
) -> Iterator[contexts.CallRecorder]:
    """Record calls of attention and of position embeddings while the caller traces a model in this context.

    Args:
        model: The model, sharded or not.
        mesh: A mesh with a context axis; None if `is_passive`.
        is_passive: As for `CallRecorder`.
    """
    with contextlib.ExitStack() as stack:
        for layer in _private.flatten_layers(model):
            known = {patch.change for patch in layer_patch.patches_on(layer)}
            if attention.is_attention(layer) and layer_patch.ATTENTION not in known:
                make = functools.partial(attention.AttentionCall, weakref.ref(layer), mesh)
                stack.enter_context(layer_patch.applied(layer_patch.ATTENTION, layer, make))
            if _is_positioned(layer) and POSITIONS not in known and not is_passive:
                positioned = functools.partial(_PositionedCall, weakref.ref(layer), mesh)
                stack.enter_context(layer_patch.applied(POSITIONS, layer, positioned))
        version = functools.partial(attention.dot_product_attention, mesh)
        stack.enter_context(replaced([(_private.keras_backend_nn, "dot_product_attention", version)]))
        yield stack.enter_context(contexts.recorded(is_passive=is_passive))


def _raise_fault(model: keras.Model, operation: str, reason: str, mesh: dtensor.Mesh) -> NoReturn:
    """Raise the error for an operation that combines positions."""
    axes = axis_sizes(mesh)
    layer = _layer_of(model, operation)
    where = f"layer '{layer.path or layer.name}'" if layer is not None else f"model '{model.name}'"
    raise UnsupportedLayerError(
        f"Model '{model.name}' does not work with context axis '{axes.context}' of {axes.contexts} devices, which "
        f"splits sequences: in {where}, {reason}. Layers between attention layers must compute each position by "
        "itself, and take positions from tfshard.sequence_positions(x) or from KerasHub's position embeddings. Change "
        f"the layer, or leave the axis out of the mesh. Received: operation '{operation}'"
    )


def _layer_of(model: keras.Model, operation: str) -> keras.Layer | None:
    """Return the innermost layer that made an operation, by the name scopes of the operation; None for the model.

    TensorFlow may add a number to all scopes of a graph: the scope of layer 'dense' is then 'dense_1'.
    """
    scopes = operation.partition(":")[0].split("/")[:-1]
    names = {layer.name: layer for layer in (model, *_private.flatten_layers(model))}
    is_numbered = bool(scopes) and scopes[0] not in names
    for scope in reversed(scopes):
        plain = re.sub(r"_\d+$", "", scope)
        for name in (plain, scope) if is_numbered else (scope, plain):
            if name in names and names[name] is not model:
                return names[name]
    return None


@contextlib.contextmanager
def any_length(models: Iterable[keras.Model]) -> Iterator[None]:
    """Let functional models take sequences of other lengths than they were built for, in this context."""
    with contextlib.ExitStack() as stack:
        for model in models:
            for layer in (model, *_private.flatten_layers(model)):
                if isinstance(layer, _private.Functional):
                    stack.enter_context(_private.without_input_spec(layer))
        yield
