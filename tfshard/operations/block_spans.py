"""Weights of a compiled block that lie side by side in a group: its programs take and return them as one tensor.

A group stores small variables in one flat buffer. A step would cut each weight out of the gathered buffer, and pack the
gradients of all weights again: about forty operations for each weight, which DTensor compiles and each device runs. The
programs of a block take the part of the buffer that holds the weights of the block, and cut it themselves. They return
the gradients of the weights as one flat tensor, which the update of the group takes as it is.

Gradient tapes differentiate by a number that stands for each weight (`ShardedVariable.read_in_span`). The step adds no
operation for a single weight unless something reads the weight alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfshard.devices import transfer
from tfshard.operations.programs import Pack
from tfshard.storage import steps
from tfshard.storage.formats import Flat
from tfshard.storage.step_record import GradientSpan
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightSpan:
    """Weights of a block that follow each other in a group.

    Attributes:
        storage: The group.
        variables: The weights, in the order of the group.
        pack: Which inputs of the programs the weights are.
        dtype: The dtype in which the programs take them.
        start: The offset of the first weight in the flat buffer of the group.
    """

    storage: Storage
    variables: Sequence[ShardedVariable]
    pack: Pack
    dtype: tf.DType
    start: int

    def value(self) -> tf.Tensor:
        """Return the weights in the step, as one flat tensor."""
        return tf.cast(self.storage.full_span(self.start, self.start + self.pack.length), self.dtype)

    def gradients(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradient of each weight, of a flat gradient that is summed over the devices."""
        first, step = self.variables[0], steps.current()
        flat = transfer.relayout(tf.cast(flat, first.dtype), (None,), first.mesh)
        parts = [
            transfer.relayout(part, (None,) * part.shape.rank, first.mesh)
            for part in self.pack.split(flat, [each.layout.spec.shape for each in self.variables])
        ]
        assert step is not None, "Blocks are compiled in steps."
        for each in self.variables:
            each.note_dense_gradient()
        span = GradientSpan(storage=self.storage, flat=flat, parts=parts)
        step.record.gradient_spans |= {each.ref(): span for each in parts}
        return parts


def find(reads: Sequence[tuple[Any, tf.Tensor]], taken: Sequence[tf.Tensor], first: int) -> list[WeightSpan]:
    """Return the spans of a block's weights, each of two or more.

    Args:
        reads: The variables of the block, each with its placeholder.
        taken: For each variable, the tensor that the programs take: its placeholder, or a cast of it.
        first: The number of the first variable among the inputs of the programs.
    """
    groups: dict[tuple[Storage, tf.DType], list[tuple[int, int, int]]] = {}
    for number, ((variable, _), value) in enumerate(zip(reads, taken, strict=True)):
        place = _place(variable)
        if place is not None:
            groups.setdefault((variable.storage, value.dtype), []).append((*place, number))
    found: list[WeightSpan] = []
    for (storage, dtype), places in groups.items():
        for run in _side_by_side(sorted(places)):
            if len(run) > 1:
                numbers = [number for _, _, number in run]
                pack = Pack(
                    numbers=tuple(first + number for number in numbers),
                    sizes=tuple(end - start for start, end, _ in run),
                )
                variables = [reads[number][0] for number in numbers]
                found.append(WeightSpan(storage=storage, variables=variables, pack=pack, dtype=dtype, start=run[0][0]))
    return found


def _place(variable: Any) -> tuple[int, int] | None:
    """Return where a variable begins and ends in the flat buffer of its group. None if it must be read alone."""
    if not isinstance(variable, ShardedVariable) or variable.layout.kind is not None:
        return None
    storage = variable.storage
    places = storage.format.places() if isinstance(storage.format, Flat) else None
    recorded = storage.recorded()
    if places is None or not variable.dtype.is_floating or (recorded is not None and recorded.written):
        return None
    if not variable.is_reduced_by_dtensor():
        return None
    place = places[variable.member]
    return place.offset, place.end


def _side_by_side(places: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    runs: list[list[tuple[int, int, int]]] = []
    for place in places:
        if runs and runs[-1][-1][1] == place[0]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def joined(gradients: Mapping[int, tf.Tensor], pack: Pack, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the gradients of packed inputs as one flat tensor.

    Args:
        gradients: The gradients, by the numbers of the inputs. Zeros replace missing gradients.
        pack: The inputs.
        inputs: All inputs.
    """
    parts = []
    for number, size in zip(pack.numbers, pack.sizes, strict=True):
        gradient = gradients.get(number)
        parts.append(tf.zeros([size], inputs[number].dtype) if gradient is None else tf.reshape(gradient, [size]))
    return tf.concat(parts, 0)
