"""Keep rounded reads of a variable out of the values that a step writes to the same variable.

Gathers in codes round the variables that a step reads (`gather_dtype`). The stored shards stay exact, because no step
writes a rounded value back. Optimizers' updates read exactly, and so does a read behind a write in the same step. If a
step itself assigns a sum or difference, such as `variable.assign(variable - step)`, `exact_value` adds to the exact
value instead. For `variable.assign(other)`, it copies the exact value of the other variable. It refuses other values
that hold the rounding errors of a read of the variable, also if a branch or a loop computes them.
"""

from typing import Any

import tensorflow as tf

from tfshard import _private
from tfshard.devices import replicas
from tfshard.errors import StrategyError
from tfshard.storage import steps
from tfshard.storage.graph_edits import ancestors
from tfshard.storage.unshard_schedule import ON_THE_WAY

# The results of these operations hold the rounding errors of their inputs.
_KEEPS_ROUNDINGS = frozenset(
    "Abs Add AddN AddV2 Atanh BatchMatMulV2 ClipByValue ConcatV2 Cos DivNoNan Einsum Erf Exp Expm1 Inv Log Log1p "
    "MatMul Maximum Minimum Mul MulNoNan Neg Pack Pad PadV2 Pow Qr RealDiv Reciprocal Relu Relu6 ReverseV2 Roll "
    "Round Rsqrt Select SelectV2 Sigmoid Sin Softmax Softplus SplitV Sqrt Square SquaredDifference StopGradient Sub "
    "Svd Tanh TensorScatterAdd TensorScatterUpdate Tile Unpack".split()
)
_SUMS = frozenset(("Add", "AddV2"))
_COPIES = frozenset(("EnsureShape", "Identity", "Relayout", "StopGradient"))


def exact_value(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Return a value to assign to a variable, computed from the exact value of the variable.

    Args:
        variable: A `ShardedVariable`.
        value: A tensor of the step that is being traced.

    Raises:
        StrategyError: The value is computed from a rounded read, but is not the sum or difference of the variable and
            another tensor.
    """
    step = steps.current()
    if step is None or not steps.rounds_gathers():
        return value
    source = _copied(value, step.reads)
    if source is not None:
        with steps.exact_reads():
            # The step may have written the other variable behind the read.
            return variable.to_tensor(source.storage.value_before_writes(source.member))
    if variable.storage.format.codes is None:
        return value
    reads = {read.tensor.op for read in step.record.reads if read.storage is variable.storage}
    if not _is_made_of(value, reads, ON_THE_WAY | _KEEPS_ROUNDINGS):
        return value
    operation = value.op
    if operation.type in _SUMS | {"Sub"}:
        first, second = operation.inputs
        if operation.type in _SUMS and _is_made_of(second, reads, ON_THE_WAY):
            first, second = second, first
        # `second` may hold a multiple of the rounded value, such as the gradient of a regularizer.
        if _is_made_of(first, reads, ON_THE_WAY) and not _is_made_of(second, reads, ON_THE_WAY):
            with steps.exact_reads():
                read = variable.storage.value_before_writes(variable.member)
            return read + second if operation.type in _SUMS else read - second
    codes = variable.storage.format.codes
    raise StrategyError(
        f"A step assigns variable '{variable.path}' a value that it computed from a read of the variable. Reads are "
        f"rounded to {codes} (gather_dtype), and the roundings of all steps would add up. Use assign_add, assign_sub "
        "or an optimizer, or gather the variable exactly: "
        f"gather_dtype={{'{variable.path}': 'float32', '.*': '{codes}'}}."
    )


def _copied(value: tf.Tensor, reads: steps.ReadLog) -> tf.Variable | None:
    """Return the variable if a value is an unchanged rounded read of it, else None."""
    tensor: tf.Tensor | None = value
    while tensor is not None:
        source = reads.rounded(tensor)
        if source is not None:
            return source
        if tensor.op.type == "Placeholder":
            tensor = _private.captured(tensor)
        else:
            tensor = tensor.op.inputs[0] if tensor.op.type in _COPIES else None
    return None


def _is_made_of(value: tf.Tensor, reads: set[tf.Operation], through: frozenset[str]) -> bool:
    """Return whether a tensor is computed from a rounded read by operations of the types in `through` only."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op
        if _private.has_mark(operation, replicas.CODED):
            if not reads.isdisjoint(ancestors([tensor])):
                return True
            continue
        if operation.type == "Placeholder":
            sources = [_private.captured(tensor)]
        elif operation.type == "IdentityN":
            sources = [operation.inputs[tensor.value_index]]
        elif operation.type in ("If", "StatelessIf"):
            sources = _private.branch_results(tensor)
        elif operation.type in ("While", "StatelessWhile"):
            sources = [operation.inputs[tensor.value_index]]
        else:
            sources = list(operation.inputs) if operation.type in through else []
        for source in sources:
            if source is not None and source.ref() not in seen:
                seen.add(source.ref())
                waiting.append(source)
    return False
