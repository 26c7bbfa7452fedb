"""XLA programs: parts of a traced graph that each device runs as one program on its local shards."""

import collections
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import compilations, expansions, local_shards
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import online_softmax, origins

_Made = TypeVar("_Made")

# The operation that runs a program.
CALL = "XlaCallModule"


class NotCompiledError(Exception):
    """XLA cannot compile a part of a graph. The message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Inputs of a program that come in one flat operand, one behind the other.

    Attributes:
        numbers: The numbers of the inputs.
        sizes: The elements of each input.
    """

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """The elements of the operand."""
        return sum(self.sizes)

    def split(self, flat: tf.Tensor, shapes: Iterable[Sequence[int]]) -> list[tf.Tensor]:
        """Return the inputs, in their shapes, from the operand."""
        parts = tf.split(flat, self.sizes) if len(self.sizes) > 1 else [flat]
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled part of a graph.

    Attributes:
        module: The serialized StableHLO module.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        used: The numbers of the given inputs, and of the packs behind them, that the program takes.
        results: The local shape and dtype of each result.
    """

    module: bytes
    device_type: str
    used: tuple[int, ...]
    results: tuple[tf.TensorSpec, ...]

    def call(self, inputs: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """Run the program in a step that is traced, and return its local results, in their local shapes.

        Args:
            inputs: A local tensor, or one in a parted layout, for each input that was given to `lower`, and then for
                each pack. Inputs in packs may be None.
        """
        _allow_calls()
        return _private.call_stablehlo(
            self.module,
            [inputs[number] for number in self.used],
            [each.dtype for each in self.results],
            [each.shape for each in self.results],
            self.device_type,
        )


class ProgramCache(Generic[_Made]):
    """The programs of parts of graphs, by what they compute, and the reasons why other parts have none.

    Args:
        error: The error that says why a part has no program.
    """

    def __init__(self, error: type[Exception]):
        self._error = error
        self._entries: collections.OrderedDict[Hashable, _Made | Exception] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all programs."""
        self._entries.clear()

    def find(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return what `make` returned for a key, or raise the error that it raised."""
        if key not in self._entries:
            try:
                self._entries[key] = make()
            except self._error as error:
                self._entries[key] = type(error)(*error.args)  # Without the frames that made it.
            while len(self._entries) > _MOST:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        found = self._entries[key]
        if isinstance(found, Exception):
            raise type(found)(*found.args)
        return found


# The entries of a cache.
_MOST = 256


@functools.cache
def _allow_calls() -> None:
    """Let each device run programs on its local tensors, when their results are used."""
    expansions.allow_local(CALL)
    _private.run_when_used([CALL])


def lower(
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    mesh: dtensor.Mesh,
    *,
    packs: Sequence[Pack] = (),
    takes_parted: bool = False,
) -> Program:
    """Make a program that computes tensors of a graph from other tensors of the graph, and begin to compile it.

    Args:
        inputs: The tensors that are known.
        outputs: The tensors to compute. Each follows from the inputs and from constants.
        mesh: The mesh of the step.
        packs: Inputs that come packed.
        takes_parted: True if the step gives the program tensors in parted layouts (`local_shards.parted`).

    Raises:
        NotCompiledError: XLA cannot compile the operations.
    """
    order = between(inputs, outputs)
    taken = {each.ref() for operation in order for each in operation.inputs} | {each.ref() for each in outputs}
    needed = {number for number, each in enumerate(inputs) if each.ref() in taken}
    behind = [len(inputs) + number for number, pack in enumerate(packs) if needed & set(pack.numbers)]
    used = (*sorted(needed.difference(*(pack.numbers for pack in packs))), *behind)

    def program(*arguments: tf.Tensor) -> list[tf.Tensor]:
        made: dict[Hashable, tf.Tensor] = {}
        for number, argument in zip(used, arguments, strict=True):
            if number < len(inputs):
                made[inputs[number].ref()] = argument
                continue
            pack = packs[number - len(inputs)]
            parts = pack.split(argument, [inputs[each].shape for each in pack.numbers])
            made |= {inputs[each].ref(): part for each, part in zip(pack.numbers, parts, strict=True)}
        graph = tf.compat.v1.get_default_graph()
        for operation in order:
            copies = _private.copied(operation, [made[each.ref()] for each in operation.inputs], graph=graph)
            for old, new in zip(operation.outputs, copies, strict=True):
                made.setdefault(old.ref(), new)
        # An input that is returned as it is has to be a result of an operation.
        return [tf.identity(made[each.ref()]) for each in outputs]

    # No rewrite rule for global tensors applies.
    program.__name__ = local_shards.NAME
    given = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    given += [tf.TensorSpec([pack.length], inputs[pack.numbers[0]].dtype) for pack in packs]
    specs = [given[number] for number in used]
    try:
        module = _private.stablehlo(program, specs, mesh.device_type())
    except (tf.errors.OpError, NotImplementedError, ValueError, TypeError) as error:
        raise NotCompiledError(_reason_of(error)) from error
    made = Program(
        module=module,
        device_type=mesh.device_type(),
        used=used,
        results=tuple(tf.TensorSpec(each.shape, each.dtype) for each in outputs),
    )
    layouts = [local_shards.parted_name(each.shape.rank, mesh) for each in made.results] if takes_parted else []
    compilations.start(made.module, specs, made.results, mesh, layouts=layouts)
    return made


def call(function: Callable[..., Any], inputs: Sequence[tf.Tensor], mesh: dtensor.Mesh) -> list[tf.Tensor]:
    """Run a function of local tensors as one program, in a step that is traced.

    You can differentiate the result to any order. The gradient is a program that computes the function again.

    Args:
        function: The function. It captures nothing.
        inputs: Local tensors.
        mesh: The mesh of the step.

    Raises:
        UnsupportedOperationError: XLA cannot compile the function.
    """
    for number, each in enumerate(inputs):
        if not each.shape.is_fully_defined():
            raise UnsupportedOperationError(
                f"XLA compiles a function for known shapes. Received: argument {number} of shape={each.shape}"
            )
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    for number, each in enumerate(traced.outputs):
        if not each.shape.is_fully_defined():
            raise UnsupportedOperationError(
                f"XLA cannot compile a function of local_map: the shape of result {number} depends on values. "
                f"Operation: '{each.op.name}' ({each.op.type}). Received: shape={each.shape}"
            )
    try:
        program = lower(traced.inputs, traced.outputs, mesh)
    except NotCompiledError as error:
        raise UnsupportedOperationError(f"XLA cannot compile a function of local_map. {error}") from error
    floats = [number for number, each in enumerate(inputs) if _has_gradient(each)]

    def gradient(*arguments: tf.Tensor) -> list[tf.Tensor]:
        taken, upstreams = arguments[: len(inputs)], arguments[len(inputs) :]
        with tf.GradientTape() as tape:
            tape.watch([taken[number] for number in floats])
            results = [each for each in tf.nest.flatten(function(*taken)) if _has_gradient(each)]
        found: list[tf.Tensor] = tape.gradient(
            results, [taken[number] for number in floats], list(upstreams), tf.UnconnectedGradients.ZERO
        )
        return found

    # No rewrite rule for global tensors applies.
    gradient.__name__ = local_shards.NAME

    def apply(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor | None]]]:
        def backward(*upstreams: tf.Tensor) -> list[tf.Tensor | None]:
            given = [up for up, result in zip(upstreams, traced.outputs, strict=True) if _has_gradient(result)]
            made = iter(call(gradient, [*tensors, *given], mesh))
            return [next(made) if number in floats else None for number in range(len(tensors))]

        return program.call(tensors), backward

    return list(tf.custom_gradient(apply)(*inputs)) if floats else program.call(inputs)


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def between(inputs: Iterable[tf.Tensor], outputs: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """Return the operations that compute tensors from others, in the order of the graph."""
    known, found = {each.ref() for each in inputs}, set()
    left = [each for each in outputs if each.ref() not in known]
    while left:
        operation = left.pop().op
        if operation not in found:
            found.add(operation)
            left += [each for each in operation.inputs if each.ref() not in known]
    if not found:
        return []
    graph = next(iter(found)).graph
    return [operation for operation in graph.get_operations() if operation in found]


def recomputed_from(
    tensors: Iterable[tf.Tensor], known: Collection[Hashable], kept: Collection[str]
) -> list[tf.Tensor]:
    """Return the results of operations of some types from which tensors can be computed again.

    Args:
        tensors: The tensors.
        known: References to tensors that are known.
        kept: Types of operations. With products, attention in blocks is kept, too.
    """
    found: dict[Hashable, tf.Tensor] = {}
    left, seen = list(tensors), set()
    while left:
        tensor = left.pop()
        if tensor.ref() in known or tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if tensor.op.type in kept or (kept and online_softmax.kind_of_call(tensor.op) is not None):
            found[tensor.ref()] = tensor
        else:
            left += tensor.op.inputs
    return list(found.values())


def digest(operations: Sequence[tf.Operation], tensors: Sequence[tf.Tensor]) -> bytes:
    """Return a digest that is equal for operations that compute the same, whatever their names.

    Args:
        operations: All operations of a graph, in order.
        tensors: The tensors to compute.
    """
    numbers: dict[Hashable, int] = {}
    for operation in operations:
        for output in operation.outputs:
            numbers[output.ref()] = len(numbers)
    made = hashlib.sha256()
    for operation in operations:
        definition = operation.node_def
        made.update(operation.type.encode())
        for name in sorted(definition.attr):
            if name not in _NAMES:
                made.update(name.encode() + definition.attr[name].SerializeToString(deterministic=True))
        for tensor in (*operation.inputs, *operation.outputs):
            made.update(f"{numbers[tensor.ref()]} {tensor.shape} {tensor.dtype.name}".encode())
    made.update(repr([numbers[each.ref()] for each in tensors]).encode())
    return made.digest()


def _reason_of(error: Exception) -> str:
    """Return the reason of an error of XLA, with the operation that cannot be compiled and the line that made it."""
    match = _NO_KERNEL.search(str(error))
    if match is None:
        return " ".join(str(error).split())[:400]
    places = "; ".join(origins.find(match[1])) or "an unknown line"
    return f"XLA has no kernel for TensorFlow operation '{match[1]}'. It is made by: {places}"


_NO_KERNEL = re.compile(r"(\w+) \(No registered")


def has_custom_gradients(operations: Iterable[tf.Operation]) -> bool:
    """Return whether operations have gradients of `tf.custom_gradient`, which `digest` does not compare."""
    return any(_CUSTOM_GRADIENT in operation.node_def.attr for operation in operations)


_CUSTOM_GRADIENT = "_gradient_op_type"
# Attributes that differ between equal operations.
_NAMES = frozenset((_CUSTOM_GRADIENT, "_class"))
