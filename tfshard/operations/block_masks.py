"""Masks of attention, computed block by block.

Keras and KerasHub make a mask of small tensors: the padding of each sample, and positions that they compare. The full
mask has an element for each pair of a query and a key. Here a mask is followed back through the operations that made
it, to the tensors that depend on the query alone or on the key alone. The same operations then compute a block of it.
Tensors that other operations made are parts as they are, and a block is cut out of them.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The dims of scores: batch, heads, queries, keys.
_QUERIES, _KEYS = 2, 3

# Operations of one element after the other.
_ELEMENTWISE: Mapping[str, Callable[..., tf.Tensor]] = {
    "AddV2": tf.add,
    "BitwiseAnd": tf.bitwise.bitwise_and,
    "BitwiseOr": tf.bitwise.bitwise_or,
    "Equal": tf.equal,
    "Greater": tf.greater,
    "GreaterEqual": tf.greater_equal,
    "Less": tf.less,
    "LessEqual": tf.less_equal,
    "LogicalAnd": tf.logical_and,
    "LogicalNot": tf.logical_not,
    "LogicalOr": tf.logical_or,
    "Maximum": tf.maximum,
    "Minimum": tf.minimum,
    "Mul": tf.multiply,
    "NotEqual": tf.not_equal,
    "SelectV2": tf.where,
    "Sub": tf.subtract,
}
# Operations that return the elements of their first input.
_REARRANGING = ("BroadcastTo", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient", "PreventGradient")

# Descriptions of how to compute a block: ("part", number), (type of operation, inputs...), ("Cast", dtype, input),
# ("Cumsum", dim, number of equal elements), ("MatrixBandPart", lower, upper, input), ("Kept", input) for a mask made
# boolean, and ("Numbers", dim, first, step, dtype) for numbers that grow by equal steps along a dim.
_Node = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """How to compute a block of a mask. Equal masks compute the same of equal parts.

    Attributes:
        node: The description.
        first_query: The index of the part `(1, 1, 1, 1)` with the position of the first query; None for position 0.
    """

    node: _Node
    first_query: int | None = None

    def block(
        self, parts: Sequence[tf.Tensor], first: tuple[tf.Tensor, tf.Tensor], sizes: tuple[int, int]
    ) -> tf.Tensor:
        """Return a block of the mask, `(B or 1, N or 1, queries or 1, keys or 1)`, boolean.

        Args:
            parts: The parts, `(B or 1, N or 1, T or 1, S or 1)`, as many as `mask_of` returned.
            first: The numbers of the first query and key of the block.
            sizes: The numbers of queries and keys of the block.
        """
        # Parts count queries from the first local query, and positions from the first of the sequence.
        begin = 0 if self.first_query is None else tf.reshape(parts[self.first_query], ())
        found = _computed(self.node, parts, first, sizes, begin)
        return _kept(found)


def mask_of(mask: tf.Tensor, shape: Sequence[int]) -> tuple[BlockMask, list[tf.Tensor]]:
    """Return how to compute a mask by blocks, and its parts.

    Args:
        mask: The mask, in a graph, with a static shape that broadcasts to `shape`.
        shape: The shape of the scores, `(B, N, T, S)`.
    """
    finder = _PartFinder(tuple(shape))
    places = tuple(range(4 - mask.shape.rank, 4))
    return BlockMask(finder.node_of(mask, places)), finder.parts


def _kept(values: tf.Tensor) -> tf.Tensor:
    """Return a mask as booleans: True where a query attends to a key."""
    if values.dtype == tf.bool:
        return values
    return values > tf.constant(0.5 if values.dtype.is_floating else 0, values.dtype)


def of_full_sequences(
    mask: BlockMask, parts: Sequence[tf.Tensor], rows: int
) -> tuple[BlockMask, list[tf.Tensor]] | None:
    """Return the mask of full sequences for a mask of chunks, and its parts.

    Constants that count positions become nodes that count the positions of the full sequence. The caller gathers the
    other parts over all chunks.

    Args:
        mask: The mask of queries and keys of a chunk.
        parts: Its parts.
        rows: The rows of the batch.

    Returns:
        The mask and its parts; None if a part has a value for each pair of a query and a key, or is a constant that
        does not count positions.
    """
    nodes: list[_Node] = []
    left: list[tf.Tensor] = []
    for part in parts:
        sizes = tuple(part.shape)
        long = [place for place in (_QUERIES, _KEYS) if sizes[place] > 1]
        if len(long) > 1 or sizes[1] > 1:
            return None
        values = _constant_value(part) if long else None
        if values is not None and np.all(values == values[:1]):
            numbers = _numbers(values[0].reshape(-1), long[0], part.dtype)
            if numbers is None:
                return None
            nodes.append(numbers)
        elif long and sizes[0] != rows:
            return None
        else:
            nodes.append(("part", len(left)))
            left.append(part)
    return BlockMask(_with_parts(mask.node, nodes)), left


def _with_parts(node: _Node, nodes: Sequence[_Node]) -> _Node:
    """Return a node with another node in place of each part."""
    if node[0] == "part":
        return nodes[node[1]]
    return tuple(_with_parts(each, nodes) if isinstance(each, tuple) else each for each in node)


def _numbers(values: np.ndarray, place: int, dtype: tf.DType) -> _Node | None:
    """Return a node for values that begin at a number and grow by equal steps; None for others."""
    if dtype == tf.bool:
        return None
    first, step = float(values[0]), float(values[1] - values[0])
    if not np.array_equal(values, first + step * np.arange(len(values))):
        return None
    return ("Numbers", place, first, step, dtype.name)


_REARRANGED_CONSTANTS = ("ExpandDims", "Squeeze", "Reshape", "Identity", "Relayout", "CopyToMesh", "StopGradient")
_COMPUTED_CONSTANTS: Mapping[str, Callable[..., Any]] = {
    "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply,  # A clip may begin behind the positions of a chunk.
}  # fmt: skip


def _constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Return the value of a tensor that is computed from constants only; None for other tensors."""
    found = tf.get_static_value(tensor)
    if found is not None:
        return np.asarray(found)
    operation = tensor.op
    if operation.type == "Range":
        bounds: list[Any] = [_constant_value(each) for each in operation.inputs]
        return None if any(each is None for each in bounds) else np.arange(*bounds, dtype=tensor.dtype.as_numpy_dtype)
    if operation.type == "Cast":
        found = _constant_value(operation.inputs[0])
        return None if found is None else found.astype(tensor.dtype.as_numpy_dtype)
    if operation.type in _REARRANGED_CONSTANTS and tensor.shape.is_fully_defined():
        found = _constant_value(operation.inputs[0])
        return None if found is None else found.reshape(tuple(tensor.shape))
    if operation.type in _COMPUTED_CONSTANTS:
        values = [_constant_value(each) for each in operation.inputs]
        return None if any(each is None for each in values) else _COMPUTED_CONSTANTS[operation.type](*values)
    return None


def of_later_queries(
    mask: BlockMask | None, parts: Sequence[tf.Tensor], first_query: tf.Tensor, *, is_causal: bool
) -> tuple[BlockMask, list[tf.Tensor]]:
    """Return a mask for queries that begin at a later position of their sequence, and its parts.

    Args:
        mask: The mask; None if the only mask is causal.
        parts: Its parts.
        first_query: The position of the first query, int32, `(1, 1, 1, 1)`.
        is_causal: True to add a causal mask: the query at position i attends to keys 0 to i only.
    """
    made = [*parts, first_query]
    node = None if mask is None else mask.node
    if is_causal:
        causal = ("GreaterEqual", *(("Numbers", place, 0.0, 1.0, "int32") for place in (_QUERIES, _KEYS)))
        node = causal if node is None else ("LogicalAnd", ("Kept", node), causal)
    assert node is not None
    return BlockMask(node, first_query=len(parts)), made


class _PartFinder:
    """Follows a mask back to its parts."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape
        self._numbers: dict[Hashable, int] = {}
        self.parts: list[tf.Tensor] = []

    def node_of(self, tensor: tf.Tensor, places: tuple[int, ...]) -> _Node:
        """Return how to compute a block of a tensor.

        Args:
            tensor: The tensor.
            places: For each dim of the tensor, the dim of the scores.
        """
        square = {place for place, size in zip(places, tensor.shape, strict=True) if size > 1} >= {_QUERIES, _KEYS}
        return (self._followed(tensor, places) if square else None) or self._part(tensor, places)

    def _part(self, tensor: tf.Tensor, places: tuple[int, ...]) -> _Node:
        key = tensor.ref(), places
        if key not in self._numbers:
            self._numbers[key] = len(self.parts)
            sizes = dict(zip(places, tensor.shape, strict=True))
            self.parts.append(tf.reshape(tensor, [sizes.get(place, 1) for place in range(4)]))
        return ("part", self._numbers[key])

    def _followed(self, tensor: tf.Tensor, places: tuple[int, ...]) -> _Node | None:
        operation = tensor.op
        inputs = operation.inputs
        if any(not each.shape.is_fully_defined() for each in inputs):
            return None
        if operation.type in _ELEMENTWISE:
            aligned = [places[len(places) - each.shape.rank :] for each in inputs]
            return (operation.type, *(self.node_of(each, at) for each, at in zip(inputs, aligned, strict=True)))
        if operation.type == "Cast":
            return ("Cast", operation.get_attr("DstT").as_numpy_dtype().dtype.name, self.node_of(inputs[0], places))
        if operation.type == "Const":
            value = _equal_value(tensor)
            return None if value is None else self._part(tf.constant(value), ())
        if operation.type == "Fill":
            return self.node_of(inputs[1], ())
        if operation.type in _REARRANGING or _is_full_slice(operation):
            before = _places_before(operation, places)
            return None if before is None else self.node_of(inputs[0], before)
        if operation.type == "MatrixBandPart" and places[-2:] == (_QUERIES, _KEYS):
            bounds = [tf.get_static_value(each) for each in inputs[1:]]
            if all(each is not None for each in bounds):
                return ("MatrixBandPart", *map(int, bounds), self.node_of(inputs[0], places))
        if operation.type == "Cumsum":
            return _counted(operation, places)
        return None


def _is_full_slice(operation: tf.Operation) -> bool:
    """Return whether an operation is a slice of all elements, perhaps with further dims of size 1."""
    if operation.type not in ("Slice", "StridedSlice"):
        return False
    strides = [1] if operation.type == "Slice" else tf.get_static_value(operation.inputs[3])
    return strides is not None and bool(np.all(np.asarray(strides) == 1))


def _places_before(operation: tf.Operation, places: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims of the scores of an input with other dims of size 1; None if it has other dims."""
    source, result = operation.inputs[0].shape, operation.outputs[0].shape
    if operation.type == "BroadcastTo":
        return places[len(places) - source.rank :]
    long = [(size, place) for size, place in zip(result, places, strict=True) if size > 1]
    sizes = [size for size in source if size > 1]
    if sizes != [size for size, _ in long]:
        return None
    waiting = iter(place for _, place in long)
    # A dim of size 1 belongs to any dim of the scores before the next one.
    found: list[int] = []
    for size in source:
        found.append(next(waiting) if size > 1 else -1)
    return tuple(found)


def _counted(operation: tf.Operation, places: tuple[int, ...]) -> _Node | None:
    """Return a node for the cumulative sum of equal elements: their numbers along a dim."""
    source, axis = operation.inputs[0], tf.get_static_value(operation.inputs[1])
    if axis is None or operation.get_attr("exclusive") or operation.get_attr("reverse"):
        return None
    while source.op.type in ("BroadcastTo", "Fill", "Identity"):
        source = source.op.inputs[1 if source.op.type == "Fill" else 0]
    value = _equal_value(source)
    if value is None:
        return None
    place = places[int(axis)]
    if place not in (_QUERIES, _KEYS):
        return None
    return ("Cumsum", place, float(value), operation.outputs[0].dtype.name)


def _equal_value(tensor: tf.Tensor) -> Any:
    """Return the value of the elements of a constant, if all are equal; otherwise None."""
    values = tf.get_static_value(tensor)
    if values is None or not np.size(values):
        return None
    first = np.reshape(values, -1)[0]
    return first if np.all(values == first) else None


def _computed(
    node: _Node,
    parts: Sequence[tf.Tensor],
    first: tuple[tf.Tensor, tf.Tensor],
    sizes: tuple[int, int],
    begin: tf.Tensor | int,
) -> tf.Tensor:
    kind, *rest = node

    def numbers(place: int) -> tf.Tensor:
        found = first[place - _QUERIES] + tf.range(sizes[place - _QUERIES])
        found += begin if place == _QUERIES else 0
        return tf.reshape(found, [-1 if dim == place else 1 for dim in range(4)])

    if kind == "part":
        part = parts[rest[0]]
        starts, extents = [0, 0, 0, 0], part.shape.as_list()
        for place in (_QUERIES, _KEYS):
            if part.shape[place] > 1:
                starts[place], extents[place] = first[place - _QUERIES], sizes[place - _QUERIES]
        return tf.slice(part, tf.stack(starts), extents)
    if kind == "Cast":
        return tf.cast(_computed(rest[1], parts, first, sizes, begin), rest[0])
    if kind == "Kept":
        return _kept(_computed(rest[0], parts, first, sizes, begin))
    if kind == "Numbers":
        place, least, step, dtype = rest
        found = tf.cast(numbers(place), tf.float64) * step + least
        return tf.cast(found, dtype)
    if kind == "Cumsum":
        return tf.cast(numbers(rest[0]) + 1, rest[2]) * tf.cast(rest[1], rest[2])
    if kind == "MatrixBandPart":
        lower, upper, inner = rest
        below = numbers(_QUERIES) - numbers(_KEYS)
        in_band = ((below <= lower) if lower >= 0 else tf.constant(True)) & (
            (-below <= upper) if upper >= 0 else tf.constant(True)
        )
        found = _computed(inner, parts, first, sizes, begin)
        return tf.where(in_band, found, tf.zeros([], found.dtype))
    return _ELEMENTWISE[kind](*(_computed(each, parts, first, sizes, begin) for each in rest))
