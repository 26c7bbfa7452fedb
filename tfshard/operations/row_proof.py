"""Prove that a part of a model computes one sample after the other.

The part is traced twice, with two batch sizes. The proof follows the dim of the samples through the operations of the
second trace by the rules of `graph.dim_rules`, and compares both traces: where they differ, they may differ only in the
size of that dim. The second size is a prime number that no other dim has, so that no dim passes for the samples by
accident, and no size that the model computes from the batch stays unseen.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.graph import dim_rules
from tfshard.storage.graph_edits import OpInput

# Sizes of the batch for the second trace.
PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

# Inputs of operations that hold shapes, and not values: they may differ between the traces.
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "BroadcastTo": (1,),
    "Fill": (0,),
    "Tile": (1,),
    "Slice": (1, 2),
    "StridedSlice": (1, 2),
    **dict.fromkeys(_private.ALL_RANDOM_OPS, (0,)),
}
# Operations whose results have equal rows if no input has samples.
_FILLS = ("BroadcastTo", "Fill", "OnesLike", "ZerosLike")


class NotByRowsError(Exception):
    """A part of a model cannot be proved to compute one sample after the other. The message is the reason."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced part of a model.

    Attributes:
        operations: The operations, in order.
        samples: The inputs with samples in their first dim.
        outputs: The results.
        drawn: Random tensors, which are drawn outside of the part.
    """

    operations: Sequence[tf.Operation]
    samples: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    drawn: Sequence[tf.Tensor]


def samples_in(first: Trace, second: Trace) -> tuple[list[bool], list[bool]]:
    """Return whether each output, and each random tensor, has samples in its first dim.

    Args:
        first: The trace with the local batch.
        second: The trace with a prime number of samples.

    Raises:
        NotByRowsError: The part is not proved to compute one sample after the other.
    """
    _check_alike(first, second)
    dims: dict[Hashable, int] = {each.ref(): 0 for each in second.samples}
    pairs = {two.ref(): one for one, two in zip(_tensors(first.operations), _tensors(second.operations), strict=True)}
    for each in second.drawn:
        differing = _differing(pairs[each.ref()], each)
        if differing not in ([], [0]):
            raise NotByRowsError(f"the random numbers of operation '{each.op.name}' have the batch in dim {differing}")
        if differing:
            dims[each.ref()] = 0
    drawn = {each.ref() for each in second.drawn}
    for operation in second.operations:
        if operation.type in ("Const", "Placeholder") or any(each.ref() in drawn for each in operation.outputs):
            continue
        dims |= _advanced(operation, dims)
        for output in operation.outputs:
            if output.ref() not in dims and operation.type in _FILLS:
                # Equal rows, as many as the samples.
                dims |= {output.ref(): dim for dim in _differing(pairs[output.ref()], output)[:1]}
            expected = [dims[output.ref()]] if output.ref() in dims else []
            if _differing(pairs[output.ref()], output) != expected:
                raise NotByRowsError(f"the shape of operation '{operation.name}' ({operation.type}) is not by samples")
    for each in second.outputs:
        if dims.get(each.ref(), 0) != 0:
            raise NotByRowsError(f"result '{each.name}' has the samples in dim {dims[each.ref()]}")
    return [each.ref() in dims for each in second.outputs], [each.ref() in dims for each in second.drawn]


def _tensors(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    return [output for operation in operations for output in operation.outputs]


def _differing(one: tf.Tensor, other: tf.Tensor) -> list[int]:
    """Return the dims in which the shapes of two tensors differ."""
    if not (one.shape.is_fully_defined() and other.shape.is_fully_defined() and one.shape.rank == other.shape.rank):
        raise NotByRowsError(f"the shape of operation '{one.op.name}' ({one.op.type}) is not known")
    return [dim for dim in range(one.shape.rank) if one.shape[dim] != other.shape[dim]]


def _check_alike(first: Trace, second: Trace) -> None:
    """Check that both traces have the same operations, and constants that differ only in shapes."""
    if [each.type for each in first.operations] != [each.type for each in second.operations]:
        raise NotByRowsError("its operations depend on the size of the batch")
    for one, other in zip(first.operations, second.operations, strict=True):
        if len(one.inputs) != len(other.inputs):
            raise NotByRowsError(f"operation '{one.name}' ({one.type}) depends on the size of the batch")
        if one.type == "Const":
            values = one.outputs[0], other.outputs[0]
            if one.node_def.attr["value"] != other.node_def.attr["value"]:
                _check_sizes(*values)
        elif one.type not in ("Placeholder",):
            _check_attributes(one, other)


def _check_sizes(one: tf.Tensor, other: tf.Tensor) -> None:
    """Check that only shapes are made of two constants that differ, or what does not differ."""
    for first, second in zip(_users(one), _users(other), strict=True):
        if first.number in _SHAPES.get(first.operation.type, ()):
            continue
        results = zip(_folded(first.operation), _folded(second.operation), strict=True)
        differ = [n for n, (a, b) in enumerate(results) if not np.array_equal(a, b)]
        for n in differ:
            _check_sizes(first.operation.outputs[n], second.operation.outputs[n])


def _users(tensor: tf.Tensor) -> list[OpInput]:
    return [
        OpInput(operation=user, number=number)
        for user in dict.fromkeys(tensor.consumers())
        for number, each in enumerate(user.inputs)
        if each is tensor
    ]


def _folded(operation: tf.Operation) -> list[np.ndarray]:
    """Return the results of an operation on constants."""
    inputs = []
    for each in operation.inputs:
        value = tf.get_static_value(each)
        if value is None and each.op.inputs:
            value = _folded(each.op)[each.value_index]
        if value is None:
            raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) depends on the size of the batch")
        inputs.append(value)
    call = _private.Call(type=operation.type, inputs=(), get_attr=operation.get_attr)
    with tf.init_scope():
        return [each.numpy() for each in _private.same_operation(call, [tf.constant(each) for each in inputs])]


def _check_attributes(one: tf.Operation, other: tf.Operation) -> None:
    """Check that no attribute depends on the size of the batch."""
    first, second = one.node_def.attr, other.node_def.attr
    for name in first:
        if name not in ("_gradient_op_type", "_class", "_output_shapes", "shape") and first[name] != second[name]:
            raise NotByRowsError(f"attribute {name} of operation '{one.name}' ({one.type}) depends on the batch")


def _advanced(operation: tf.Operation, dims: Mapping[Hashable, int]) -> dict[Hashable, int]:
    """Return the dim of the samples in each output of an operation that has samples."""
    given = {number: dims[each.ref()] for number, each in enumerate(operation.inputs) if each.ref() in dims}
    if not given:
        return {}
    if _private.is_stateful(operation):
        raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) has side effects")
    if operation.type in ("Rank",):
        return {}
    found: dict[Hashable, int] | None = None
    for number, dim in given.items():
        outcome = dim_rules.advance(operation, number, dim, 1)
        if isinstance(outcome, dim_rules.Blocked):
            raise NotByRowsError(outcome.reason)
        if not isinstance(outcome, dim_rules.Flow) or outcome.statistics or not outcome.outputs:
            raise NotByRowsError(dim_rules.needs_all(operation))
        aligned = dict(outcome.aligned)
        if any(given.get(other) != place for other, place in aligned.items()):
            raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) combines samples with other rows")
        if any(other in given for other in outcome.repeated):
            raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) combines samples with samples")
        made = {operation.outputs[output].ref(): to for output, to in outcome.outputs}
        if operation.type == "IdentityN":
            found = (found or {}) | made
        elif found is not None and made != found:
            raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) combines samples with samples")
        else:
            found = made
    return found or {}


def prime_for(shapes: Sequence[Sequence[int]]) -> int:
    """Return a prime number that divides no size of some shapes.

    Raises:
        NotByRowsError: There is none.
    """
    sizes = np.unique([size for shape in shapes for size in shape])
    for prime in PRIMES:
        if all(size % prime for size in sizes if size):
            return prime
    raise NotByRowsError("the sizes of its tensors have too many factors")
