"""Follow the tokens of a batch through a model, to find operations that combine positions of a sequence.

Context parallelism gives the model a row for each chunk of a sequence (layouts/sequence_chunks.py). The results match
single-device Keras if every operation computes each position by itself. Attention and position embeddings know the
chunks, and are left out of the graph. `find_fault` follows the two dims of the tokens, samples and positions, through
the operations of a forward pass. `find_difference` finds operations that depend on the length of the sequences.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfshard.graph import dim_rules
from tfshard.graph.dim_rules import Flow
from tfshard.graph.model_graph import ModelGraph

# The dims of the samples and of the positions of a tensor; one dim if they are merged.
Dims = tuple[int, ...]
TOKENS: Dims = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFault:
    """An operation that combines positions, or a result without them.

    Attributes:
        operation: The name of the operation, or of the tensor.
        reason: The fault, in words.
    """

    operation: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPoints:
    """Where tokens enter and leave the graph of a model, besides its inputs and outputs.

    Attributes:
        sources: The names of tensors that hold tokens: results of attention and of position embeddings.
        sinks: The name of each tensor that must hold tokens, such as queries and keys, and what takes the tensor, in
            words.
    """

    sources: frozenset[str]
    sinks: Mapping[str, str]


def find_fault(graph: ModelGraph, points: TokenPoints) -> TokenFault | None:
    """Return the first operation of a forward pass that combines positions, or None."""
    return _TokenFlow(graph, points).fault()


def find_difference(
    graph: ModelGraph, points: TokenPoints, split: ModelGraph, split_points: TokenPoints, contexts: int
) -> TokenFault | None:
    """Return the first operation of a model that works for sequences of one length only, or None.

    Args:
        graph: The forward pass on a batch `(B, T, ...)`, without a fault.
        points: The points of `graph`.
        split: The forward pass on the same batch in rows, `(B * contexts, T / contexts, ...)`.
        split_points: The points of `split`.
        contexts: The chunks of a sequence.
    """
    flow = _TokenFlow(graph, points)
    flow.fault()
    return _difference(flow, _TokenFlow(split, split_points), contexts)


class _FaultError(Exception):
    """An operation combines positions. The message is the reason."""


class _TokenFlow:
    """The tokens in a graph."""

    def __init__(self, graph: ModelGraph, points: TokenPoints):
        self.graph, self._points = graph, points
        self.used = self._used()
        self.dims: dict[str, Dims] = {}

    def _used(self) -> set[str]:
        """Return the names of the operations that outputs, losses, queries, keys and values depend on."""
        by_output = {tensor.name: each for each in self.graph.operations for tensor in each.outputs}
        waiting = [by_output[name] for name in (*self.graph.outputs, *self.graph.losses, *self._points.sinks)]
        found: set[str] = set()
        while waiting:
            operation = waiting.pop()
            if operation.name not in found:
                found.add(operation.name)
                waiting += [tensor.op for tensor in operation.inputs]
        return found

    def fault(self) -> TokenFault | None:
        """Follow the tokens through the operations, and return the first fault."""
        for operation in self.graph.operations:
            if operation.name not in self.used:
                continue
            for tensor in operation.outputs:
                if tensor.name in self._points.sources or tensor.name in self.graph.inputs:
                    self.dims[tensor.name] = TOKENS
            try:
                self.dims.update(self._after(operation))
            except _FaultError as fault:
                return TokenFault(operation=operation.name, reason=str(fault))
        for name, taker in self._points.sinks.items():
            if self.dims.get(name) != TOKENS:
                return TokenFault(operation=name, reason=f"{taker} takes a tensor that has no sequence in dim 1")
        ranks = {tensor.name: tensor.shape.rank for each in self.graph.operations for tensor in each.outputs}
        for name in sorted(self.graph.outputs):
            if self.dims.get(name) != TOKENS:
                return TokenFault(operation=name, reason="an output of the model has no sequence in dim 1")
            if ranks[name] == 2:
                reason = "an output has no dim behind the sequence, and losses reduce the last dim: return (B, T, 1)"
                return TokenFault(operation=name, reason=reason)
        return None

    def _after(self, operation: tf.Operation) -> dict[str, Dims]:
        """Return the dims of tokens in the results of an operation.

        Raises:
            _FaultError: The operation combines positions.
        """
        given = {n: self.dims[t.name] for n, t in enumerate(operation.inputs) if t.name in self.dims}
        found: dict[str, Dims] = {}
        for number, dims in given.items():
            for output, to in self._through(operation, number, dims, given).items():
                name = operation.outputs[output].name
                if found.setdefault(name, to) != to:
                    raise _FaultError("it combines every position with every other")
        return found

    def _through(self, operation: tf.Operation, number: int, dims: Dims, given: Mapping[int, Dims]) -> dict[int, Dims]:
        """Return the dims of the tokens of input `number` in each result."""
        if operation.type == "Reshape" and number == 0:
            return {0: _reshaped(operation, dims)}
        if operation.type == "OneHot" and number == 0:
            return {0: _after_one_hot(operation, dims)}
        if operation.type in ("Sum", "Mean") and number == 0 and _sums_all(operation, dims):
            return {}
        flows = []
        for dim in dims:
            outcome = dim_rules.advance(operation, number, dim, 1)
            if not isinstance(outcome, Flow) or outcome.statistics:
                raise _FaultError(_reason(operation, outcome))
            flows.append(outcome)
        for flow in flows:
            for other, place in flow.aligned:
                if place not in given.get(other, ()) and not _is_random(operation.inputs[other]):
                    raise _FaultError("it combines the positions with a tensor that has a value for each position")
        for flow in flows:
            for other in flow.repeated:
                if other in given:
                    raise _FaultError("it combines every position with every other")
        return {
            output: tuple(dict(flow.outputs)[output] for flow in flows)
            for output, _ in flows[0].outputs
            if all(output in dict(flow.outputs) for flow in flows)
        }


def _reason(operation: tf.Operation, outcome: dim_rules.Outcome) -> str:
    if isinstance(outcome, dim_rules.Blocked) and not dim_rules.has_rule(operation):
        return f"tfshard does not know whether TensorFlow operation {operation.type} combines positions"
    return f"TensorFlow operation {operation.type} combines the positions of a sequence"


def _reshaped(operation: tf.Operation, dims: Dims) -> Dims:
    """Return the dims of the tokens in the result of a Reshape, which may merge or split samples and positions."""
    before, after = tuple(operation.inputs[0].shape), tuple(operation.outputs[0].shape)
    if None in before or None in after:
        raise _FaultError("it reshapes to a shape that is not known")
    first, last = dims[0], dims[-1]
    front, count = math.prod(before[:first]), math.prod(before[first : last + 1])
    back = math.prod(before[last + 1 :])
    sizes = tuple(before[dim] for dim in dims)
    if last - first + 1 == len(dims):
        for to in range(len(after)):
            if math.prod(after[:to]) != front:
                continue
            if after[to] == count and math.prod(after[to + 1 :]) == back:
                return (to,)
            pair = after[to : to + 2]
            is_split = len(pair) == 2 and math.prod(pair) == count and math.prod(after[to + 2 :]) == back
            if is_split and (len(dims) == 1 or pair == sizes):
                return (to, to + 1)
    raise _FaultError(f"it reshapes {before} to {after}, which merges positions with another dim")


def _after_one_hot(operation: tf.Operation, dims: Dims) -> Dims:
    axis = operation.get_attr("axis")
    at = len(operation.outputs[0].shape) - 1 if axis == -1 else axis
    return tuple(dim + (at <= dim) for dim in dims)


def _sums_all(operation: tf.Operation, dims: Dims) -> bool:
    """Return whether an operation sums over all tokens: samples and positions."""
    axes = tf.get_static_value(operation.inputs[1])
    if axes is None:
        return False
    rank = len(operation.inputs[0].shape)
    return {int(axis) % rank for axis in np.atleast_1d(axes)} >= set(dims)


def _is_random(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is computed element by element from random numbers."""
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if "Random" in operation.type:
            return True
        if operation.name not in seen and dim_rules.is_elementwise(operation):
            seen.add(operation.name)
            waiting += [each.op for each in operation.inputs]
    return False


def _difference(flow: _TokenFlow, split: _TokenFlow, contexts: int) -> TokenFault | None:
    """Return the first operation that works for sequences of one length only.

    Such an operation has, for example, a constant that Keras computed from the length when the model was built.
    """
    in_full = [each for each in flow.graph.operations if each.name in flow.used]
    in_rows = [each for each in split.graph.operations if each.name in split.used]
    if [each.type for each in in_full] != [each.type for each in in_rows]:
        return TokenFault(
            operation=in_full[-1].name,
            reason="the model has other operations for shorter sequences than for longer ones",
        )
    for operation, other in zip(in_full, in_rows, strict=True):
        for tensor, part in zip(operation.outputs, other.outputs, strict=True):
            dims = flow.dims.get(tensor.name)
            if dims is not None and tuple(part.shape) != _split_shape(tuple(tensor.shape), dims, contexts):
                return TokenFault(operation=operation.name, reason="it was made for sequences of a certain length")
        if dim_rules.is_elementwise(operation) and any(each.name in flow.dims for each in operation.inputs):
            for tensor, part in zip(operation.inputs, other.inputs, strict=True):
                if tensor.name not in flow.dims and not _are_equal(tensor, part):
                    return TokenFault(operation=operation.name, reason="it computes with the length of the sequences")
    return None


def _split_shape(shape: tuple[int, ...], dims: Dims, contexts: int) -> tuple[int, ...]:
    """Return the shape that a tensor of the full batch has for rows of chunks."""
    if len(dims) == 1:  # Samples and positions are merged.
        return shape
    return tuple(
        size * contexts if dim == dims[0] else size // contexts if dim == dims[1] else size
        for dim, size in enumerate(shape)
    )


def _are_equal(tensor: tf.Tensor, other: tf.Tensor) -> bool:
    """Return whether two constants are equal. Other tensors count as equal."""
    first, second = tf.get_static_value(tensor), tf.get_static_value(other)
    return first is None or second is None or np.array_equal(first, second)
