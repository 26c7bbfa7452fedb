"""Sequence parallelism: between tensor-parallel blocks, activations are sharded along the sequence.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2: the operations
between a row layer and the next column layer (residual, normalization, dropout) work on each position separately. Each
device of the model axis therefore keeps a shard of the positions. The all-reduce behind a row layer becomes a
reduce-scatter, and an all-gather precedes the column layers. The backward pass has the same two collectives the other
way round.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import replicas, transfer
from tfshard.errors import LayoutError
from tfshard.graph import auto_layout
from tfshard.graph.dim_rules import Flow, advance
from tfshard.graph.model_graph import trace
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.layout_map import layer_dim
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import layer_patch
from tfshard.storage import steps
from tfshard.storage.steps import Step
from tfshard.storage.variables import ShardedVariable


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Let layers with kernels gather their inputs, and row layers and lookups scatter their results.

    Args:
        model: A model with variables on the mesh.
        mesh: The mesh.

    Raises:
        LayoutError: No layer is sharded by row over a model axis, so no operation lies between blocks. Or an operation
            between blocks merges the sequence with another dim, which DTensor does in the wrong order.
    """
    axis = auto_layout.model_axis(axis_sizes(mesh))
    kinds: dict[int, tuple[keras.Layer, str]] = {}
    for layer in _private.flatten_layers(model):
        for variable in _private.layer_variables(layer):
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable) and len(current.layout.compute) > 1:
                kind = "row" if _is_row(current, layer, axis) else "column"
                kinds.setdefault(id(layer), (layer, kind))
    if axis is None or not any(kind == "row" for _, kind in kinds.values()):
        raise LayoutError(
            "sequence_parallel=True needs a layer that is sharded by row over a model axis, and model "
            f"'{model.name}' has none. Give a layout map, such as layout_map='auto', and a mesh with a model axis. "
            f"Received: mesh={axis_sizes(mesh)}"
        )
    for layer, kind in kinds.values():
        layer_patch.apply(
            layer_patch.SEQUENCE, layer, functools.partial(_SequenceCall, kind=kind, axis=axis, mesh=mesh)
        )
    _check_between(model, axis_sizes(mesh)[axis])


def _is_row(variable: ShardedVariable, layer: keras.Layer, axis: str | None) -> bool:
    """Return whether a layer's devices each compute a part of the result: with a kernel sharded by row, or a table by
    rows."""
    spec = dataclasses.replace(variable.layout.spec, layer=layer)
    try:
        dim = layer_dim(spec, "row")
    except LayoutError:
        return False
    return dim is not None and variable.layout.compute[dim] == axis


def _check_between(model: keras.Model, devices: int) -> None:
    """Raise for an operation between blocks that merges the sequence with another dim."""
    with _recorded() as (scattered, gathered):
        graph = trace(model)
    waiting, known = [(name, 1) for name in scattered], set()
    while waiting:
        name, dim = waiting.pop()
        if (name, dim) in known or name in gathered:
            continue
        known.add((name, dim))
        for place, number in graph.consumers.get(name, ()):
            operation = graph.operations[place]
            outcome = advance(operation, number, dim, devices)
            if isinstance(outcome, Flow):
                waiting += [(operation.outputs[output].name, to) for output, to in outcome.outputs]
            elif operation.type == "Reshape":
                raise LayoutError(
                    f"sequence_parallel=True does not fit model '{model.name}': between two blocks, operation "
                    f"'{operation.name}' reshapes {tuple(operation.inputs[0].shape)} to "
                    f"{tuple(operation.outputs[0].shape)}, which merges the sequence with another dim; DTensor merges "
                    "two sharded dims in the wrong order. Keep (batch, sequence, width) there, or leave "
                    "sequence_parallel out."
                )


# The names of tensors that calls scatter and gather, while a model is traced to check it.
_recording: tuple[set[str], set[str]] | None = None


@contextlib.contextmanager
def _recorded() -> Iterator[tuple[set[str], set[str]]]:
    global _recording
    _recording = (set(), set())
    try:
        yield _recording
    finally:
        _recording = None


# Gathered tensors of the open step, by the id of the tensor and by the graph of the gather. The value keeps the tensor
# alive, so no other tensor gets its id.
_gathered: "weakref.WeakKeyDictionary[Step, dict[tuple[int, tf.Graph | None], tuple[tf.Tensor, tf.Tensor]]]"
_gathered = weakref.WeakKeyDictionary()


class _SequenceCall:
    """A layer's `call` with its input gathered, or its result scattered, along the sequence."""

    def __init__(self, call: layer_patch.Method, *, kind: str, axis: str, mesh: dtensor.Mesh):
        self.call, self.kind, self.axis, self.mesh = call, kind, axis, mesh

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.current() is None and _recording is None:
            return self.call(inputs, *args, **kwargs)
        local = steps.context().local  # A compiled block communicates between its pieces.
        # A table that also computes logits is sharded by rows, and works as a column layer then.
        gathers = self.kind == "column" or bool(kwargs.get("reverse"))
        if gathers and tf.is_tensor(inputs) and self._fits(inputs):
            inputs = self._gathered(inputs)
        outputs = self.call(inputs, *args, **kwargs)
        if not gathers and tf.is_tensor(outputs) and self._fits(outputs):
            if _recording is not None:
                _recording[0].add(outputs.name)
                return outputs
            if local is not None:
                return local.reshard(outputs, 1)
            outputs = resharded(outputs, self._unsharded(outputs), self._sharded(outputs), self.mesh)
        return outputs

    def _fits(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is (batch, sequence, width), and the axis divides the number of positions."""
        if tensor.shape.rank != 3 or not tensor.shape[1]:
            return False
        return int(tensor.shape[1]) % axis_sizes(self.mesh)[self.axis] == 0

    def _batch(self, tensor: tf.Tensor) -> str | None:
        axes = axis_sizes(self.mesh)
        return axes.data if tensor.shape[0] is not None and tensor.shape[0] % axes.data_size == 0 else None

    def _sharded(self, tensor: tf.Tensor) -> Axes:
        return (self._batch(tensor), self.axis, None)

    def _unsharded(self, tensor: tf.Tensor) -> Axes:
        return (self._batch(tensor), None, None)

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gather the full sequence. All layers that take the same tensor share one gather: their gradients are summed
        before the scatter."""
        if _recording is not None:
            _recording[1].add(tensor.name)
            return tensor
        step = steps.current()
        assert step is not None
        known, key = _gathered.setdefault(step, {}), (id(tensor), steps.here())
        if key not in known:
            local = steps.context().local
            if local is not None:
                made = local.reshard(tensor, None)
            else:
                made = resharded(tensor, self._sharded(tensor), self._unsharded(tensor), self.mesh)
            known[key] = tensor, made
        return known[key][1]


def resharded(tensor: tf.Tensor, before: Axes, after: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Change a tensor's layout from `before` to `after`, and the gradient's layout back.

    Both layouts are pinned. Otherwise DTensor would propagate `after` into the reshape of a Dense layer, and merge two
    sharded dims in the wrong order. A gather is an all-gather on each mesh, where DTensor would all-reduce
    (devices/gathers.py). If the tensor is a sum over the axis, devices with a reduce-scatter use it, and others
    all-reduce.
    """

    def between(value: tf.Tensor, first: Axes, second: Axes) -> tf.Tensor:
        return replicas.gathered(transfer.relayout(value, first, mesh), first, second, mesh)

    def apply(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        recorder = steps.block_recorder()
        if recorder is not None and recorder.is_open:
            # The operations are copied, and DTensor does not know the shapes behind a copied gather of local shards.
            made = transfer.relayout(transfer.relayout(x, before, mesh), after, mesh)
        else:
            made = between(x, before, after)
        return made, lambda upstream: between(upstream, after, before)

    return tf.custom_gradient(apply)(tensor)
