"""Prove that a part of a model computes one sample after the other.

The part is traced twice, with two batch sizes. The proof follows the dim of the samples through the operations of the
second trace by the rules of `graph.dim_rules`, and compares both traces: where they differ, they may differ only in the
size of that dim. The second size is a prime number that divides no size in the first trace, so that no dim passes for
the samples by accident.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.graph import dim_rules
from tfshard.operations import online_softmax, origins, programs

# Sizes of the batch for the second trace.
PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

# Operations with inputs that hold shapes: they may differ between the traces.
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "BroadcastTo": (1,),
    "Fill": (0,),
    "Tile": (1,),
    # Of slices, only ends and sizes.
    "Slice": (2,),
    "StridedSlice": (2,),
    **dict.fromkeys(_private.ALL_RANDOM_OPS, (0,)),
}
# Operations that make rows of equal values.
_FILLS = ("BroadcastTo", "Fill", "Tile")
# Attributes that differ between equal operations.
_UNCOMPARED = frozenset(("_class", "_gradient_op_type", "_output_shapes", "shape"))


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
        written: New values of variables, which are computed outside of the part.
        upstreams: The gradients of tensors, each with the dim of its samples, if it has samples.
        gradients: Tensors that must have their samples in some dim.
    """

    operations: Sequence[tf.Operation]
    samples: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    drawn: Sequence[tf.Tensor]
    written: Sequence[tf.Tensor]
    upstreams: Sequence[tuple[tf.Tensor, int | None]] = ()
    gradients: Sequence[tuple[tf.Tensor, int]] = ()


def samples_in(first: Trace, second: Trace) -> dict[Hashable, int]:
    """Return the dim of the samples in each tensor of the first trace that has samples, by the tensor's reference.

    Outputs and random tensors have them in their first dim, or no samples.

    Args:
        first: The trace with the local batch.
        second: The trace with a prime number of samples.

    Raises:
        NotByRowsError: The part is not proved to compute one sample after the other.
    """
    comparison = _TraceComparison(first, second)
    dims: dict[Hashable, int] = {each.ref(): 0 for each in second.samples} | comparison.filled
    dims |= {each.ref(): dim for each, dim in second.upstreams if dim is not None}
    for each in second.drawn:
        differing = comparison.differing_dims(each)
        if differing not in ([], [0]):
            raise NotByRowsError(
                f"the random numbers of {origins.described(each.op)} do not have the batch in their first dim"
            )
        dims |= {each.ref(): dim for dim in differing}
    drawn = {each.ref() for each in second.drawn}
    for operation in second.operations:
        if operation.type in ("Const", "Placeholder") or any(each.ref() in drawn for each in operation.outputs):
            continue
        dims |= _advanced(operation, dims)
        for output in operation.outputs:
            differing = comparison.differing_dims(output)
            if output.ref() not in dims and operation.type in _FILLS:
                dims |= {output.ref(): dim for dim in differing[:1]}
            if differing != ([dims[output.ref()]] if output.ref() in dims else []):
                raise NotByRowsError(
                    f"the shape of {origins.described(operation)} does not have its samples in one dim"
                )
    for each in (*second.outputs, *second.written):
        if comparison.depends_on_size(each):
            raise NotByRowsError(f"result '{each.name}' depends on the size of the batch")
        if dims.get(each.ref(), 0) != 0:
            raise NotByRowsError(f"result '{each.name}' does not have the samples in its first dim")
    for each, dim in second.gradients:
        if comparison.depends_on_size(each) or dims.get(each.ref()) != dim:
            raise NotByRowsError(f"a custom gradient, {origins.described(each.op)}, does not keep the samples apart")
    return comparison.of_first(dims)


def check_custom_gradients(first: Trace, second: Trace, dims: Mapping[Hashable, int]) -> None:
    """Check that each `tf.custom_gradient` in a part computes the gradients of one sample after the other.

    Args:
        first: The trace with the local batch.
        second: The trace with a prime number of samples.
        dims: The result of `samples_in`.

    Raises:
        NotByRowsError: A gradient is not proved to, or is the gradient of a weight: its author may have divided by the
            size of the batch.
    """
    lists = [[each for each in trace.operations if not _is_constant(each)] for trace in (first, second)]
    for one, other in zip(*lists, strict=True):
        # The gradient of attention in blocks is ours.
        is_ours = any(online_softmax.kind_of_call(each.op) is not None for each in one.inputs)
        if programs.has_custom_gradients([one]) and not is_ours:
            made = [_with_gradients(*each, one, dims) for each in ((first, one), (second, other))]
            samples_in(*made)


def _with_gradients(trace: Trace, operation: tf.Operation, one: tf.Operation, dims: Mapping[Hashable, int]) -> Trace:
    """Return the trace with the gradients of a `tf.custom_gradient`, whose counterpart in the first trace is `one`."""
    outputs = [(each, dims.get(first.ref())) for each, first in zip(operation.outputs, one.outputs, strict=True)]
    outputs = [(each, dim) for each, dim in outputs if each.dtype.is_floating]
    inputs = [(each, dims.get(first.ref())) for each, first in zip(operation.inputs, one.inputs, strict=True)]
    inputs = [(each, dim) for each, dim in inputs if each.dtype.is_floating]
    known = [each for forward in trace.operations for each in forward.outputs]
    with operation.graph.as_default(), _private.stop_recording():
        ups = [(tf.compat.v1.placeholder(each.dtype, each.shape), dim) for each, dim in outputs]
        made = tf.gradients([each for each, _ in outputs], [each for each, _ in inputs], [each for each, _ in ups])
        pairs = [
            (tf.convert_to_tensor(gradient), each, dim)
            for gradient, (each, dim) in zip(made, inputs, strict=True)
            if gradient is not None
        ]
    for _, each, dim in pairs:
        if dim is None and tf.get_static_value(each) is None:
            raise NotByRowsError(f"{origins.described(operation)} has a custom gradient of what has no samples")
    gradients = [(gradient, dim) for gradient, _, dim in pairs if dim is not None]
    added = programs.between([*known, *(each for each, _ in ups)], [each for each, _ in gradients])
    operations = [*trace.operations, *(each.op for each, _ in ups), *added]
    return dataclasses.replace(trace, operations=operations, outputs=(), written=(), upstreams=ups, gradients=gradients)


def first_differing(first: Trace, second: Trace) -> tf.Operation | None:
    """Return the first operation of two traces of the same shapes that differs; None if a part is always the same."""
    for one, other in itertools.zip_longest(first.operations, second.operations):
        if one is None or other is None or one.type != other.type:
            return one or other
        attributes, others = one.node_def.attr, other.node_def.attr
        if any(attributes[name] != others[name] for name in attributes if name not in _UNCOMPARED):
            return one
    return None


def prime_for(shapes: Sequence[Sequence[int]]) -> int:
    """Return a prime number that divides no size of some shapes.

    Raises:
        NotByRowsError: There is none.
    """
    sizes = {size for shape in shapes for size in shape if size}
    for prime in PRIMES:
        if all(size % prime for size in sizes):
            return prime
    raise NotByRowsError("the sizes of its inputs have too many factors")


class _TraceComparison:
    """The comparison of two traces of a part.

    Both have the same operations, apart from constants: TensorFlow makes a constant of a small tensor of equal values,
    and a `Fill` of a large one. Constants are compared by value, where operations take them.

    Attributes:
        filled: The dim of the samples in each constant of the second trace with equal rows, as many as the samples.

    Raises:
        NotByRowsError: The traces differ in more than the number of samples.
    """

    def __init__(self, first: Trace, second: Trace):
        self.filled: dict[Hashable, int] = {}
        self._partner: dict[Hashable, tf.Tensor] = {}
        # The values of tensors of the second trace that are known in both traces, and differ.
        self._different: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}
        self._constants = Constants(), Constants()
        lists = [[each for each in trace.operations if not _is_constant(each)] for trace in (first, second)]
        for one, other in itertools.zip_longest(*lists):
            if one is None or other is None or one.type != other.type or len(one.inputs) != len(other.inputs):
                raise NotByRowsError(f"{origins.described(one or other)} depends on the size of the batch")
            self._partner |= {b.ref(): a for a, b in zip(one.outputs, other.outputs, strict=True)}
            self._compare(one, other)

    def differing_dims(self, tensor: tf.Tensor) -> list[int]:
        """Return the dims in which a tensor of the second trace has another size than in the first trace."""
        partner = self._partner.get(tensor.ref())
        if partner is None:  # A `Fill` that is a constant in the first trace.
            return [self.filled[tensor.ref()]] if tensor.ref() in self.filled else []
        return _differing(partner, tensor)

    def of_first(self, dims: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Return dims of tensors of the second trace for their partners in the first trace."""
        return {self._partner[each].ref(): dim for each, dim in dims.items() if each in self._partner}

    def depends_on_size(self, tensor: tf.Tensor) -> bool:
        """Return whether the value of a tensor of the second trace is known, and is another than in the first trace."""
        return tensor.ref() in self._different

    def _compare(self, one: tf.Operation, other: tf.Operation) -> None:
        attributes, others = one.node_def.attr, other.node_def.attr
        if one.type == "Relayout":
            raise NotByRowsError("its devices communicate in the middle of it, because its layout map shards a tensor")
        attends = online_softmax.kind_of_call(one) if one.type == "PartitionedCall" else None
        uncompared = _UNCOMPARED if attends is None else _UNCOMPARED | {"f"}
        if attends is not None and attends != online_softmax.kind_of_call(other):
            raise NotByRowsError(f"{origins.described(one)} depends on the size of the batch")
        for name in attributes:
            if name not in uncompared and attributes[name] != others[name]:
                raise NotByRowsError(f"attribute '{name}' of {origins.described(one)} depends on the size of the batch")
        differs = False
        for number, (a, b) in enumerate(zip(one.inputs, other.inputs, strict=True)):
            if self._partner.get(b.ref()) is a and b.ref() not in self._different:
                continue
            if number in _SHAPES.get(other.type, ()):
                continue
            differs |= not self._is_equal(a, b, other)
        if differs:
            self._fold(one, other)

    def _is_equal(self, a: tf.Tensor, b: tf.Tensor, user: tf.Operation) -> bool:
        """Return whether an operation takes the same values, or equal rows, in both traces."""
        if b.ref() in self.filled:
            return True
        if b.ref() in self._different:
            return False
        one, other = self._constants[0].value(a), self._constants[1].value(b)
        if one is None or other is None:
            raise NotByRowsError(f"an input of {origins.described(user)} depends on the size of the batch")
        if np.array_equal(one, other):
            return True
        dim = _dim_of_equal_rows(one, other)
        if dim is not None:
            self.filled[b.ref()] = dim
            return True
        self._different[b.ref()] = one, other
        return False

    def _fold(self, one: tf.Operation, other: tf.Operation) -> None:
        """Compute the results of an operation that takes different constants."""
        first, second = self._constants[0].results(one), self._constants[1].results(other)
        if first is None or second is None:
            raise NotByRowsError(f"{origins.described(one)} depends on the size of the batch")
        for tensor, a, b in zip(other.outputs, first, second, strict=True):
            if not np.array_equal(a, b):
                self._different[tensor.ref()] = a, b


class Constants:
    """The values of tensors that are computed from constants alone."""

    def __init__(self) -> None:
        self._results: dict[str, list[np.ndarray] | None] = {}

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """Return the value of a tensor; None if it depends on more than constants."""
        found: np.ndarray | None = tf.get_static_value(tensor)
        if found is None and tensor.op.inputs:
            results = self.results(tensor.op)
            found = None if results is None else results[tensor.value_index]
        return found

    def results(self, operation: tf.Operation) -> list[np.ndarray] | None:
        """Return the results of an operation on constants; None for other operations."""
        if operation.name not in self._results:
            self._results[operation.name] = self._computed(operation)
        return self._results[operation.name]

    def _computed(self, operation: tf.Operation) -> list[np.ndarray] | None:
        if _private.is_stateful(operation) or operation.type in ("Const", "Placeholder"):
            return None
        inputs = []
        for each in operation.inputs:
            value = self.value(each)
            if value is None:
                return None
            inputs.append(value)
        call = _private.Call(type=operation.type, inputs=tuple(operation.inputs), get_attr=operation.get_attr)
        with tf.init_scope():
            return [np.asarray(each) for each in _private.same_operation(call, [tf.constant(each) for each in inputs])]


def _is_constant(operation: tf.Operation) -> bool:
    return operation.type == "Const" or (
        operation.type == "Fill" and all(tf.get_static_value(each) is not None for each in operation.inputs)
    )


def _differing(one: tf.Tensor, other: tf.Tensor) -> list[int]:
    """Return the dims in which the shapes of two tensors differ."""
    if not (one.shape.is_fully_defined() and other.shape.is_fully_defined() and one.shape.rank == other.shape.rank):
        raise NotByRowsError(f"the shape of {origins.described(one.op)} is not known")
    return [dim for dim in range(one.shape.rank) if one.shape[dim] != other.shape[dim]]


def _dim_of_equal_rows(one: np.ndarray, other: np.ndarray) -> int | None:
    """Return the dim in which two arrays have different numbers of equal rows; None if they differ otherwise."""
    one, other = np.asarray(one), np.asarray(other)
    differing = [dim for dim in range(one.ndim) if one.ndim != other.ndim or one.shape[dim] != other.shape[dim]]
    if len(differing) != 1:
        return None
    rows = [np.moveaxis(each, differing[0], 0) for each in (one, other)]
    return differing[0] if all(np.array_equal(row, rows[0][0]) for each in rows for row in each) else None


def _advanced(operation: tf.Operation, dims: Mapping[Hashable, int]) -> dict[Hashable, int]:
    """Return the dim of the samples in each output of an operation that takes samples."""
    given = {number: dims[each.ref()] for number, each in enumerate(operation.inputs) if each.ref() in dims}
    if not given or operation.type == "Rank":
        return {}
    if _private.is_stateful(operation):
        raise NotByRowsError(f"{origins.described(operation)} has side effects")
    if operation.type.startswith("FusedBatchNorm") and operation.get_attr("is_training"):
        raise NotByRowsError(f"batch normalization needs all samples: {origins.described(operation)}")
    if online_softmax.kind_of_call(operation) is not None:
        results = online_softmax.samples_in_results(operation, given)
        if results is None:
            raise NotByRowsError(f"{origins.described(operation)} combines samples with other samples")
        return {operation.outputs[number].ref(): dim for number, dim in results.items()}
    found: dict[Hashable, int] | None = None
    for number, dim in given.items():
        outcome = dim_rules.advance(operation, number, dim, 1)
        if isinstance(outcome, dim_rules.Blocked) and outcome.reason != dim_rules.needs_all(operation):
            raise NotByRowsError(f"{outcome.reason}{origins.block_line(operation)}")
        if not isinstance(outcome, dim_rules.Flow) or outcome.statistics or not outcome.outputs:
            raise NotByRowsError(f"{origins.described(operation)} needs all samples")
        if any(given.get(other) != place for other, place in outcome.aligned) or any(
            other in given for other in outcome.repeated
        ):
            raise NotByRowsError(f"{origins.described(operation)} combines samples with other samples")
        made = {operation.outputs[output].ref(): to for output, to in outcome.outputs}
        if found is not None and made != found and operation.type != "IdentityN":
            raise NotByRowsError(f"{origins.described(operation)} combines samples with other samples")
        found = made | (found or {})
    return found or {}
