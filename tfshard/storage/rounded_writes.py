"""Refuse writes of what a step computed from a rounded read of the same variable.

Gathers in codes round what a step reads (`gather_dtype`). The stored shards stay exact, because nothing writes a rounded
value back: updates, `assign_add` and `assign_sub` read exactly, and a read behind a write in the same step is exact. In
`variable.assign(0.9 * variable)` of a step of the user's, the read could be any read.
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
    "Abs Add AddN AddV2 ClipByValue DivNoNan IdentityN Maximum Minimum Mul Neg RealDiv Round Select SelectV2 Sqrt "
    "Square StopGradient Sub".split()
)


def check(variable: Any, value: tf.Tensor) -> None:
    """Raise `StrategyError` if a step assigns a variable a value that it computed element by element from a rounded
    read of the variable.

    Args:
        variable: A `ShardedVariable`.
        value: The value.
    """
    step = steps.current()
    if step is None or variable.storage.format.codes is None or not steps.rounds_gathers():
        return
    reads = {read.tensor.op for read in step.record.reads if read.storage is variable.storage}
    left, seen = [value], set()
    while left:
        tensor = left.pop()
        operation = tensor.op
        if _private.has_mark(operation, replicas.CODED):
            if not reads.isdisjoint(ancestors([tensor])):
                _refuse(variable)
            continue
        if operation.type == "Placeholder":
            sources = [_private.captured(tensor)]
        elif operation.type == "IdentityN":
            sources = [operation.inputs[tensor.value_index]]
        else:
            sources = list(operation.inputs) if operation.type in ON_THE_WAY | _ELEMENTWISE else []
        for source in sources:
            if source is not None and source.ref() not in seen:
                seen.add(source.ref())
                left.append(source)


def _refuse(variable: Any) -> None:
    raise StrategyError(
        f"A step assigns variable '{variable.path}' a value that it computed from a read of the variable. Reads are "
        f"rounded to {variable.storage.format.codes} (gather_dtype), and the roundings of all steps would add up. Use "
        "assign_add or assign_sub, which read exactly, or gather the variable exactly: "
        f"gather_dtype={{'{variable.path}': 'float32', '.*': '{variable.storage.format.codes}'}}."
    )
