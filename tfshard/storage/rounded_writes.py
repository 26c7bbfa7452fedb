"""Keep rounded reads of a variable out of the values that a step writes to the same variable.

Gathers in codes round the variables that a step reads (`gather_dtype`). The stored shards stay exact, because no step
writes a rounded value back. Optimizers' updates read exactly, and so does a read behind a write in the same step. If a
step itself assigns a sum or difference, such as `variable.assign(variable - step)`, `exact_value` adds to the exact
value instead. It refuses other values that are computed element by element from a rounded read of the variable.
"""

from typing import Any

import tensorflow as tf

from tfshard import _private
from tfshard.devices import replicas
from tfshard.errors import StrategyError
from tfshard.storage import steps
from tfshard.storage.graph_edits import ancestors
from tfshard.storage.unshard_schedule import ON_THE_WAY

_ELEMENTWISE = frozenset(
    "Abs Add AddN AddV2 ClipByValue DivNoNan Maximum Minimum Mul Neg RealDiv Round Select SelectV2 Sqrt Square "
    "StopGradient Sub".split()
)
_SUMS = frozenset(("Add", "AddV2"))


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
    if step is None or variable.storage.format.codes is None or not steps.rounds_gathers():
        return value
    reads = {read.tensor.op for read in step.record.reads if read.storage is variable.storage}
    if not _is_made_of(value, reads, ON_THE_WAY | _ELEMENTWISE):
        return value
    operation = value.op
    if operation.type in _SUMS | {"Sub"}:
        first, second = operation.inputs
        if operation.type in _SUMS and _is_made_of(second, reads, ON_THE_WAY):
            first, second = second, first
        if _is_made_of(first, reads, ON_THE_WAY) and not _is_made_of(second, reads, ON_THE_WAY | _ELEMENTWISE):
            with steps.exact_reads():
                read = variable.value()
            return read + second if operation.type in _SUMS else read - second
    codes = variable.storage.format.codes
    raise StrategyError(
        f"A step assigns variable '{variable.path}' a value that it computed from a read of the variable. Reads are "
        f"rounded to {codes} (gather_dtype), and the roundings of all steps would add up. Use assign_add, assign_sub "
        "or an optimizer, or gather the variable exactly: "
        f"gather_dtype={{'{variable.path}': 'float32', '.*': '{codes}'}}."
    )


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
        else:
            sources = list(operation.inputs) if operation.type in through else []
        for source in sources:
            if source is not None and source.ref() not in seen:
                seen.add(source.ref())
                waiting.append(source)
    return False
