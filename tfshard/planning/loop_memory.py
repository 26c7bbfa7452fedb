"""What the loops of a step hold: lists of tensors that their turns fill, for the backward pass or as a result."""

import dataclasses
from collections.abc import Hashable

import tensorflow as tf

from tfshard import _private
from tfshard.planning import step_flops
from tfshard.planning.training_graph import VIEWS

# What puts a tensor into a list, by the number of the input that it is; and what takes one out.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
TAKEN = frozenset(("TensorListGetItem", "TensorListPopBack"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a loop gives.

    Attributes:
        bytes: Of what its turns put into it, if it is a list; None if it is none that they fill.
        given: The number of what the loop is given that it is, or from which what is in it was taken.
        same: The number of a result before it, a list of the same tensors.
    """

    bytes: int | None = None
    given: int | None = None
    same: int | None = None


def results_of(loop: tf.Operation, *, least: int = 0) -> list[Result]:
    """What each result of a loop is.

    Args:
        loop: The loop.
        least: Bytes below which a tensor does not count.
    """
    body = _private.function_graph(loop, "body")
    if body is None:  # Of TensorFlow 1.
        return [Result() for _ in loop.outputs]
    numbers = {each.ref(): number for number, each in enumerate(body.inputs)}
    sources = [_source(each) for each in body.outputs]
    turns = step_flops.turns_of(loop) or 1
    list_of: dict[Hashable, int] = {}
    found = []
    for number, source in enumerate(sources):
        item = None
        put: set[Hashable] = set()
        while source.op.type in _PUT:
            item = _source(source.op.inputs[_PUT[source.op.type]])
            if item.ref() in numbers:  # As the turn before made it.
                item = sources[numbers[item.ref()]]
            put.add(item.ref())
            source = _source(source.op.inputs[0])
        if item is None:
            found.append(Result(given=number if numbers.get(source.ref()) == number else None))
        elif item.op.type in TAKEN:
            found.append(Result(given=numbers.get(_source(item.op.inputs[0]).ref())))
        elif item.ref() in list_of:
            found.append(Result(same=list_of[item.ref()]))
        else:
            list_of |= dict.fromkeys(put, number)
            # What is given on as it is, is the same in all turns.
            size = 0 if item.ref() in numbers else len(put) * (item.shape.num_elements() or 0) * item.dtype.size
            found.append(Result(bytes=turns * size if size >= least else 0))
    return found


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor is, or is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor
