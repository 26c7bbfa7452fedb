"""Finds the operation of a step that is computed wrongly: TensorFlow computes each operation again on one device."""

import dataclasses
import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import local_shards
from tfshard.operations import programs
from tfshard.operations.origins import PACKAGE

# Files that call other code.
_BETWEEN = re.compile(r"/tensorflow/(python|_api|dtensor)/|/(contextlib|functools)\.py$|/optree/|^<")
# With more operations, the check takes too long.
MAX_OPERATIONS = 5000

# A number of a tensor. A shape or a word replaces a missing number.
Number = bool | int | float | complex | str | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation with a differing value.

    Attributes:
        name: The name in the graph of the step, which begins with the name of the layer.
        type: The TensorFlow type of the operation.
        line: The line of code that made the operation.
        reason: A description of the comparison.
        sharded: A number of the result in the sharded step.
        one_device: The same number on one device.
        index: The index of the number in the result.
    """

    name: str
    type: str
    line: str
    reason: str
    sharded: Number
    one_device: Number
    index: tuple[int, ...]

    def __str__(self) -> str:
        numbers = f"sharded {self.sharded}, one device {self.one_device} at index {self.index}"
        return f"operation '{self.name}' ({self.type}), {self.reason}: {numbers}" + (
            f"; from {self.line}" if self.line else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """The value of a variable's buffer before a step.

    Attributes:
        name: The name of the variable, or of the first variable of a group.
        value: The full value, on the host.
    """

    name: str
    value: np.ndarray


def is_fetched(tensor: tf.Tensor) -> bool:
    """Return True if a step can return the tensor for a comparison."""
    return tensor.dtype not in (tf.resource, tf.variant, tf.string)


def ancestors(targets: Iterable[tf.Tensor], known: set[str]) -> list[tf.Operation]:
    """Return the operations from which `targets` are computed, up to the tensors named in `known`, in graph order."""
    targets = list(targets)
    if not targets:
        return []
    graph = targets[0].graph
    order = {operation.name: i for i, operation in enumerate(graph.get_operations())}
    found: dict[str, tf.Operation] = {}
    waiting = list(targets)
    while waiting:
        tensor = waiting.pop()
        if tensor.op.name in found or (tensor.name in known and all(tensor is not target for target in targets)):
            continue
        found[tensor.op.name] = tensor.op
        waiting += list(tensor.op.inputs)
        if tensor.op.type == "ReadVariableOp":
            waiting += [write.inputs[1] for write in writes_before(tensor.op, order)]
    return sorted(found.values(), key=lambda operation: order[operation.name])


def writes_before(read: tf.Operation, order: Mapping[str, int]) -> list[tf.Operation]:
    """Return the assignments of a variable that were added to the graph before a read."""
    written = [op for op in read.inputs[0].consumers() if op.type == "AssignVariableOp"]
    return sorted((op for op in written if order[op.name] < order[read.name]), key=lambda op: order[op.name])


def assigned(graph: tf.Graph, handle: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors that a step assigns to a variable, given by its resource handle outside of the graph."""
    inside = [internal for external, internal in _captures(graph) if external is handle]
    return [op.inputs[1] for tensor in inside for op in tensor.consumers() if op.type == "AssignVariableOp"]


def _captures(graph: tf.Graph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    return list(graph.captures)


def line_of(operation: tf.Operation) -> str:
    """Return the line of the user's code that made an operation, or else the line of Keras's or KerasHub's code."""
    fallback = ""
    for frame in reversed(list(operation.traceback or ())):
        path = frame.filename.replace(os.sep, "/")
        if path == f"{PACKAGE}/verifying/step_recording.py" and frame.name == "traced":
            break
        if path.startswith(f"{PACKAGE}/") or _BETWEEN.search(path):
            continue
        text = f"{os.path.basename(path)}:{frame.lineno}: {linecache.getline(frame.filename, frame.lineno).strip()}"
        if not re.search(r"/keras(_hub)?/src/", path):
            return text
        if not fallback and not re.search(r"/keras/src/(backend|utils|ops)/", path):
            fallback = text
    return fallback


def first_wrong(
    operations: Sequence[tf.Operation], values: Mapping[str, np.ndarray], before: Mapping[str, "Held"], rtol: float
) -> Operation | None:
    """Return the first operation with a result that TensorFlow does not compute on one device from the same inputs.

    Args:
        operations: Operations of the graph of a sharded step, in order.
        values: Tensors of that step by name, in full on the host.
        before: The values of variables before the step, by the name of their handle in the graph.
        rtol: The tolerance of a result, relative to its largest number.
    """
    if not operations:
        return None
    order = {operation.name: i for i, operation in enumerate(operations[0].graph.get_operations())}
    alone = _SingleOperations(operations)
    for operation in operations:
        if _differs_by_device(operation):
            continue
        inputs = [values.get(tensor.name) for tensor in operation.inputs]
        if operation.type == "ReadVariableOp":
            writes = writes_before(operation, order)
            held = before.get(operation.inputs[0].name)
            found = values.get(writes[-1].inputs[1].name) if writes else held.value if held is not None else None
            expected = None if found is None else [found]
            reason = f"which reads variable '{held.name if held is not None else operation.inputs[0].name}'"
            reason += " as it was before it was written" if writes else ""
        elif operation.type in ("Relayout", "RelayoutLike"):
            expected, reason = None if inputs[0] is None else [inputs[0]], "which only moves its input"
        elif any(value is None for value in inputs) or not operation.inputs:
            continue
        else:
            expected, reason = alone.run(operation, inputs), "computed from the same inputs"
        if expected is None:
            continue
        scale = max((largest(v) for v in inputs if v is not None and v.dtype.kind not in "biu"), default=0.0)
        for tensor, theirs in list(zip(operation.outputs, expected, strict=False))[: _useful(operation)]:
            if tensor.name not in values:
                continue
            worst = worst_of(values[tensor.name], theirs, rtol, floor=1e-3 * scale)
            if worst is not None:
                return _operation(operation, reason, worst)
    return None


def _differs_by_device(operation: tf.Operation) -> bool:
    """Return whether devices compute an operation from their local shards, so that one value says nothing about it."""
    if operation.type == programs.CALL:
        return True
    tensors = [*operation.inputs, *(each for tensor in operation.inputs for each in tensor.op.inputs)]
    return any(map(local_shards.is_parted, (*operation.outputs, *tensors)))


def _useful(operation: tf.Operation) -> int:
    """Return the number of an operation's outputs that are not only for its gradient."""
    return 3 if operation.type.startswith("FusedBatchNorm") else len(operation.outputs)


def first_other(
    operations: Sequence[tf.Operation],
    values: Mapping[str, np.ndarray],
    other: Mapping[str, np.ndarray],
    rtol: float,
    blocks: Mapping[str, Operation],
) -> Operation | None:
    """Return the first operation of a sharded step with a result that differs from the same operation on one device.

    Args:
        operations: Operations of the graph of a sharded step, in order.
        values: Tensors of that step by name, in full on the host.
        other: The same for the step on one device.
        rtol: The tolerance of a result, relative to its largest number.
        blocks: The programs of compiled blocks with other results than on one device, by the name of the operation.
    """
    for operation in operations:
        if operation.name in blocks:
            return blocks[operation.name]
        if _differs_by_device(operation):
            continue
        if operation.type == "Const" and not operation.outputs[0].dtype.is_floating:
            continue  # A shape or an index.
        for tensor in list(operation.outputs)[: _useful(operation)]:
            if tensor.name in values and tensor.name in other:
                worst = worst_of(values[tensor.name], other[tensor.name], rtol)
                if worst is not None:
                    return _operation(operation, "which returns a different value on one device", worst)
    for operation in operations:
        output = next(iter(operation.outputs), None)
        if output is None or output.name in other or output.name not in values or _is_ours(operation):
            continue
        if _differs_by_device(operation):
            continue
        first = values[output.name].reshape(-1)[:1]
        worst = Worst(sharded=first.item() if first.size else None, one_device=None, index=(), error=float("inf"))
        return _operation(operation, "which the step on one device does not have", worst)
    return None


def alike(operation: tf.Operation, other: tf.Operation) -> bool:
    """Return True if operations of one name in two graphs match: TensorFlow numbers operations without names."""
    shapes = [[tuple(t.shape) if t.shape.rank is not None else None for t in op.outputs] for op in (operation, other)]
    return operation.type == other.type and shapes[0] == shapes[1] and line_of(operation) == line_of(other)


def _is_ours(operation: tf.Operation) -> bool:
    """Return True if tfshard made the operation, or if it only passes its input on, or is a shape or an index."""
    if operation.type in ("Placeholder", "Relayout", "RelayoutLike", "Identity", "IdentityN"):
        return True
    if operation.type == "Const" and not operation.outputs[0].dtype.is_floating:
        return True
    paths = [frame.filename.replace(os.sep, "/") for frame in reversed(list(operation.traceback or ()))]
    outside = [path for path in paths if not _BETWEEN.search(path)]
    return bool(outside) and outside[0].startswith(f"{PACKAGE}/")


def _operation(operation: tf.Operation, reason: str, worst: "Worst") -> Operation:
    return Operation(
        name=operation.name, type=operation.type, line=line_of(operation), reason=reason, sharded=worst.sharded,
        one_device=worst.one_device, index=worst.index,
    )  # fmt: skip


class _SingleOperations:
    """Runs single operations of a graph on the host."""

    def __init__(self, operations: Sequence[tf.Operation]):
        definition = operations[0].graph.as_graph_def()
        nodes = {node.name: node for node in definition.node}
        graph_def = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
        self._numbers: dict[str, int] = {}
        for number, operation in enumerate(operations):
            touches_state = any(not is_fetched(tensor) for tensor in (*operation.inputs, *operation.outputs))
            random = operation.type in _private.ALL_RANDOM_OPS
            if touches_state or random or operation.type in ("Placeholder", "Const", "Relayout", "RelayoutLike"):
                continue
            self._numbers[operation.name] = number
            node = graph_def.node.add()
            node.CopyFrom(nodes[operation.name])
            node.name, node.device = f"operation_{number}", ""
            node.attr.pop("_class", None)
            del node.input[:]
            for i, tensor in enumerate(operation.inputs):
                source = graph_def.node.add(name=f"input_{number}_{i}", op="Placeholder")
                source.attr["dtype"].type = tensor.dtype.as_datatype_enum
                node.input.append(source.name)
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.import_graph_def(graph_def, name="")
        self._session = tf.compat.v1.Session(
            graph=self._graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        )

    def run(self, operation: tf.Operation, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
        """Return the outputs of an operation; None if it cannot run alone."""
        number = self._numbers.get(operation.name)
        if number is None:
            return None
        feeds = {f"input_{number}_{i}:0": value for i, value in enumerate(inputs)}
        names = [f"operation_{number}:{i}" for i in range(len(operation.outputs))]
        try:
            outputs: list[np.ndarray] = self._session.run(names, feeds)
        except (tf.errors.OpError, ValueError):
            return None  # The host has no kernel for the operation, or the operation fails on the host, too.
        return outputs


# --- Comparing two tensors ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest difference between two tensors.

    Attributes:
        sharded: The number in the sharded step.
        one_device: The number on one device.
        index: The index of the number; empty if the shapes differ, and then the numbers are the shapes.
        error: The difference, relative to the largest number of the tensor on one device; inf for different shapes and
            for NaN.
    """

    sharded: Number
    one_device: Number
    index: tuple[int, ...]
    error: float


def error_of(ours: np.ndarray, theirs: np.ndarray, *, floor: float = 0.0, scale: float | None = None) -> Worst:
    """Return the largest difference of two tensors, in units of `scale`.

    By default, `scale` is the largest number of the second tensor, or `floor` if that is larger. For integers and
    booleans it is 1.
    """
    if ours.shape != theirs.shape:
        return Worst(sharded=ours.shape, one_device=theirs.shape, index=(), error=float("inf"))
    if ours.size == 0:
        return Worst(sharded=0, one_device=0, index=(), error=0.0)
    wide = "complex128" if ours.dtype.kind == "c" else "float64"
    a, b = ours.astype(wide), theirs.astype(wide)
    with np.errstate(invalid="ignore"):
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    distance = np.where(np.isnan(distance), np.inf, distance)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), distance.shape))
    if ours.dtype.kind in "biu":
        scale = 1.0
    elif scale is None:
        scale = max(largest(b), floor)
    error = float(distance[index]) / scale if scale else (float("inf") if distance[index] else 0.0)
    return Worst(sharded=ours[index].item(), one_device=theirs[index].item(), index=index, error=error)


def worst_of(ours: np.ndarray, theirs: np.ndarray, rtol: float, floor: float = 0.0) -> Worst | None:
    """Return `error_of`, or None if the error is at most `rtol`; integers and booleans must be equal."""
    worst = error_of(ours, theirs, floor=floor)
    exact = ours.dtype.kind in "biu"
    return worst if worst.error > (0.0 if exact else rtol) else None


def largest(value: np.ndarray) -> float:
    """Return the largest finite magnitude in a tensor."""
    if value.size == 0:
        return 0.0
    magnitude = np.abs(value.astype("complex128" if value.dtype.kind == "c" else "float64"))
    return float(np.max(magnitude, initial=0.0, where=np.isfinite(magnitude)))
