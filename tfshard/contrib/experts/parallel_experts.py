"""The computation of experts: on one device, on devices that all have all experts, and on devices that share experts.

A layer with experts calls `routed`. In a compiled step, each device routes its local tokens in parted layouts
(devices/local_shards.py). If the batch axis shards the experts, devices exchange tokens (routes.py).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.contrib.experts import routes
from tfshard.devices import local_shards, transfer
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import rows
from tfshard.storage import recomputing, steps
from tfshard.storage.variables import ShardedVariable

# Stands for the number of an expert's rows while a step is traced. Only the running step knows the number, but for
# unknown sizes TensorFlow's gradients of broadcasts make reshapes that DTensor refuses. Only Python sees this number:
# TensorFlow and DTensor infer shapes from operations. A prime, so that `check` finds operations that use the number.
_STAND_IN = 1_000_003

# Maps the rows of one expert, `(rows, width)`, and the expert's weights, to results `(rows, new width)`.
Expert = Callable[[tf.Tensor, list[tf.Tensor]], tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """A mixture of experts in a model, for plans.

    Attributes:
        name: The path of the layer with the experts.
        variables: The variables of the experts.
        multiplied: A variable that multiplies all tokens, from which plans count the tokens: the router's kernel, or
            the first variable of the experts.
        choices: The number of experts of a token.
        width: The number of features of a token.
        dtype: The dtype of tokens.
        capacity_factor: As for `routed`.
        sums: The number of sums over all tokens in the router's losses.
    """

    name: str
    variables: Sequence[keras.Variable]
    multiplied: keras.Variable
    choices: int
    width: int
    dtype: str
    capacity_factor: float | None = None
    sums: int = 0


# Extension points of the modules with layers of experts: tests for layers that the option `experts=` may shard, and
# functions that return the mixture of a layer.
known_layers: list[Callable[[keras.Layer], bool]] = []
finders: list[Callable[[keras.Layer], Mixture | None]] = []


def mixtures_of(model: keras.Model) -> list[Mixture]:
    """Return the mixtures of experts in a model."""
    found = [find(layer) for layer in _private.flatten_layers(model) for find in finders]
    return [each for each in found if each is not None]


def is_known(layer: keras.Layer) -> bool:
    """Return whether a layer sends tokens to its experts, if they are sharded."""
    return any(matches(layer) for matches in known_layers)


def are_shared(variables: Sequence[keras.Variable]) -> bool:
    """Return whether the batch axis shards variables of experts."""
    stored = [_private.backend_variable(each) for each in variables]
    return any(isinstance(each, ShardedVariable) and each.layout.kind is not None for each in stored)


def routed(
    tokens: tf.Tensor,
    ids: tf.Tensor,
    weights: tf.Tensor,
    variables: Sequence[keras.Variable],
    expert: Expert,
    *,
    experts: int,
    capacity_factor: float | None = None,
    name: str,
) -> tf.Tensor:
    """Send tokens to their experts, and return the weighted sums of the results.

    Args:
        tokens: `(tokens, width)`.
        ids: `(tokens, choices)`, integers: the experts of each token. The id `experts` stands for no expert.
        weights: `(tokens, choices)`: the weights of the results.
        variables: `(experts, ...)`: the weights of the experts.
        expert: The function of an expert.
        experts: The number of experts.
        capacity_factor: An expert takes `capacity_factor * tokens * choices / experts` items, rounded up, of the whole
            batch. Others are dropped: their results are zero. None drops no item.
        name: The name of the layer, for messages.

    Returns:
        `(tokens, new width)`.

    Raises:
        StrategyError: The step calls the layer in a loop, a branch or a function, and devices would communicate there.
        UnsupportedOperationError: The step is eager, or the number of tokens is unknown.
    """
    ids = tf.cast(ids, tf.int64)
    values = [tf.convert_to_tensor(each) for each in variables]
    step = steps.current()
    if step is None or steps.is_local_trace():
        capacity = _capacity(capacity_factor, tokens, ids, experts)
        route = routes.Routes(ids, experts=experts, capacity=capacity, mesh=None)
        return _computed(route, tokens, weights, values, expert, ExpertsOnOneDevice())
    _check(step, are_shared(variables) or capacity_factor is not None, name)
    count = tokens.shape[0]
    if count is None:
        raise UnsupportedOperationError(
            "Devices route tokens to experts in steps with a known number of tokens. Give the inputs of the model a "
            f"shape. Received: layer '{name}' with tokens of shape {tokens.shape}"
        )
    mesh = _mesh_of(step)
    devices = axis_sizes(mesh).data_size
    is_shared = are_shared(variables) and devices > 1
    capacity = _capacity(capacity_factor, tokens, ids, experts)
    with tf.name_scope(recomputing.STAYS):
        by_sample = _is_by_sample(tokens, devices)
        placed = (SharedExperts if is_shared else AllExperts)(mesh, count, by_sample=by_sample)
        routes_class = routes.ExchangedRoutes if is_shared else routes.Routes
        with _private.stop_recording(), local_shards.scope():
            route = routes_class(placed.to_local(ids, filler=experts), experts=experts, capacity=capacity, mesh=mesh)
        return _computed(route, tokens, weights, values, expert, placed)


def _check(step: steps.Step, communicates: bool, name: str) -> None:
    """Raise an error if a step cannot route tokens to experts here."""
    if _private.is_eager():
        raise UnsupportedOperationError(
            "Devices route tokens to experts in compiled steps: DTensor has no local shards in eager code. Compile the "
            f"model without run_eagerly=True, or give strategy.run a tf.function. Received: an eager step with layer "
            f"'{name}'"
        )
    if steps.here() is not step.graph and communicates:
        raise StrategyError(
            "A step calls experts that are sharded, or have a capacity, in a loop, a branch or a function. Call the "
            f"layer outside of it, or leave out experts= and capacity_factor. Received: layer '{name}'"
        )


def _mesh_of(step: steps.Step) -> dtensor.Mesh:
    mesh = step.record.only_mesh or getattr(tf.distribute.get_strategy(), "mesh", None)
    assert mesh is not None, "A step has a mesh."
    return mesh


def capacity_of(factor: float | None, tokens: int, choices: int, experts: int) -> int | None:
    """Return how many items an expert takes; None for all."""
    return None if factor is None else math.ceil(factor * tokens * choices / experts)


def _capacity(factor: float | None, tokens: tf.Tensor, ids: tf.Tensor, experts: int) -> tf.Tensor | int | None:
    """Return how many items an expert takes."""
    if factor is None:
        return None
    count, choices = tokens.shape[0], ids.shape[1]
    if count is not None:
        return capacity_of(factor, count, choices, experts)
    count = tf.cast(tf.shape(tokens, tf.int64)[0], tf.float64)
    return tf.cast(tf.math.ceil(factor * count * choices / experts), tf.int64)


def _is_by_sample(tensor: tf.Tensor, devices: int) -> bool:
    """Return whether the batch axis divides the number of samples that a layer reshaped into these tokens."""
    operation = tensor.op
    while operation.type in ("Cast", "Identity"):
        operation = operation.inputs[0].op
    source = operation.inputs[0] if operation.type == "Reshape" else tensor
    return devices > 1 and bool(source.shape.rank) and source.shape[0] is not None and source.shape[0] % devices == 0


class ExpertsOnOneDevice:
    """Computes all experts on one device. Subclasses convert between global tensors and local rows on a mesh."""

    def to_local(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the local rows of a tensor of tokens."""
        return tensor

    def from_local(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor of tokens that has these local rows."""
        return tensor

    def with_static_rows(self, rows: list[tf.Tensor]) -> list[tf.Tensor]:
        """Set a static number of rows, if DTensor needs one, and return the rows of each local expert."""
        return rows

    def check(self, made: Any, given: Any) -> None:
        """Raise an error if the operations between tensors depend on the number of rows."""

    def of_experts(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Return the weights of each local expert, from a variable `(experts, ...)`."""
        found: list[tf.Tensor] = tf.unstack(value)
        return found

    def gradient_of(self, of_experts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the gradient of a variable from the gradients of its local experts."""
        return tf.stack(of_experts)


class AllExperts(ExpertsOnOneDevice):
    """Every device computes all experts for its local tokens. All local tensors are in parted layouts.

    Args:
        mesh: The mesh.
        count: The number of tokens.
        by_sample: True if the batch axis shards the tokens by samples.
    """

    def __init__(self, mesh: dtensor.Mesh, count: int, *, by_sample: bool):
        self._mesh, self._count, self._by_sample = mesh, count, by_sample
        self._devices = axis_sizes(mesh).data_size
        self._padding = -count % self._devices

    def to_local(self, tensor: tf.Tensor, filler: int = 0) -> tf.Tensor:
        """Return the local rows. Rows of `filler` pad the tensor if the batch axis does not divide the tokens."""
        if self._padding or not self._by_sample:
            tensor = transfer.replicate(tensor, self._mesh)
        if self._devices == 1:
            return local_shards.varying(tensor, self._mesh)
        if self._padding:
            tensor = tf.pad(tensor, [[0, self._padding], [0, 0]], constant_values=filler)
            tensor = transfer.replicate(tensor, self._mesh)
        return local_shards.local_rows(transfer.relayout(tensor, self._first(tensor), self._mesh), self._mesh)

    def from_local(self, tensor: tf.Tensor) -> tf.Tensor:
        joined = self._joined(tensor)
        if self._padding or not self._by_sample:
            return transfer.replicate(transfer.replicate(joined, self._mesh)[: self._count], self._mesh)
        return joined

    def _joined(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the global tensor of the local rows, sharded over the batch axis."""
        local = transfer.relayout(tensor, (None,) * tensor.shape.rank, self._mesh)
        return local_shards.from_local(local, self._first(tensor), self._mesh) if self._devices > 1 else local

    def with_static_rows(self, rows: list[tf.Tensor]) -> list[tf.Tensor]:
        for each in rows:
            each.set_shape((_STAND_IN, *each.shape[1:]))
        return rows

    def check(self, made: Any, given: Any) -> None:
        for constant in _constants_between(tf.nest.flatten(made), tf.nest.flatten(given)):
            value = tf.get_static_value(constant)
            if value.dtype.kind in "iuf" and np.any((value != 0) & (value % _STAND_IN == 0)):
                raise UnsupportedOperationError(
                    "Devices compute experts on as many tokens as choose them, a number that only the step knows, but "
                    "an expert uses the number while the step is traced. Use operations on one token after the other, "
                    "such as elementwise activations. Received: operation "
                    f"'{constant.consumers()[0].type}' with the number of tokens in {value.tolist()}"
                )

    def of_experts(self, value: tf.Tensor) -> list[tf.Tensor]:
        found: list[tf.Tensor] = tf.unstack(local_shards.varying(transfer.replicate(value, self._mesh), self._mesh))
        return found

    def gradient_of(self, of_experts: Sequence[tf.Tensor]) -> tf.Tensor:
        local = transfer.relayout(tf.stack(of_experts), (None,) * (of_experts[0].shape.rank + 1), self._mesh)
        return rows.psum(local, self._mesh) if self._devices > 1 else local

    def _first(self, tensor: tf.Tensor) -> tuple[str | None, ...]:
        return (axis_sizes(self._mesh).data, *(None,) * (tensor.shape.rank - 1))


class SharedExperts(AllExperts):
    """Every device computes its experts for the tokens of all devices."""

    def of_experts(self, value: tf.Tensor) -> list[tf.Tensor]:
        shard = local_shards.local_shard(value, self._first(value), self._mesh)
        found: list[tf.Tensor] = tf.unstack(local_shards.varying(shard, self._mesh))
        return found

    def gradient_of(self, of_experts: Sequence[tf.Tensor]) -> tf.Tensor:
        return self._joined(tf.stack(of_experts))


def _computed(
    route: routes.Routes,
    tokens: tf.Tensor,
    weights: tf.Tensor,
    values: Sequence[tf.Tensor],
    expert: Expert,
    placed: ExpertsOnOneDevice,
) -> tf.Tensor:
    """Return the weighted sums of the experts' results, `(tokens, new width)`.

    One custom gradient surrounds all local computations. TensorFlow passes the arguments and results of a custom
    gradient through one IdentityN, so none of them may be in a parted layout.
    """

    def apply(tokens: tf.Tensor, weights: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        with _scope(placed):
            given = placed.with_static_rows(route.send(placed.to_local(tokens)))
            of_experts = [placed.of_experts(each) for each in values]
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch([given, of_experts])
                made = [
                    expert(each, list(of_one))
                    for each, of_one in zip(given, zip(*of_experts, strict=True), strict=True)
                ]
            placed.check(made, [given, of_experts])
            items = route.collect(made)
            local_weights = tf.cast(placed.to_local(weights), items.dtype)
            result = placed.from_local(tf.reduce_sum(items * tf.expand_dims(local_weights, -1), 1))

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with _scope(placed):
                local = placed.to_local(upstream)
                of_weights = tf.cast(tf.reduce_sum(items * tf.expand_dims(local, 1), 2), weights.dtype)
                of_results = placed.with_static_rows(route.send(local, local_weights))
                of_rows, of_values = tape.gradient(
                    made,
                    [given, of_experts],
                    output_gradients=of_results,
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
                placed.check([of_rows, of_values], [given, of_experts, of_results])
                of_tokens = tf.reduce_sum(route.collect(of_rows), 1)
                return (
                    placed.from_local(of_tokens),
                    placed.from_local(of_weights),
                    *(placed.gradient_of(each) for each in of_values),
                )

        return result, gradient

    return tf.custom_gradient(apply)(tokens, weights, *values)


def _constants_between(made: Sequence[tf.Tensor], given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the constants from which `made` is computed, up to `given`."""
    seen = {each.op for each in given}
    waiting, found = [each.op for each in made], []
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if operation.type == "Const":
            found += operation.outputs
        waiting += [each.op for each in operation.inputs]
    return found


def _scope(placed: ExpertsOnOneDevice) -> contextlib.AbstractContextManager[Any]:
    return local_shards.scope() if isinstance(placed, AllExperts) else contextlib.nullcontext()
