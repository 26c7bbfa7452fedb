"""Trace a block of a model with the local shapes of one device.

The trace has a graph of its own. Reads of variables give placeholders there, and writes are recorded, so that a trace
changes no variable and no loss. Python code of the layer runs once for each trace: a tensor that it stores on the layer
belongs to a trace. `compiled_blocks` makes programs of the graph.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.devices import local_shards
from tfshard.operations import draws, online_softmax, origins
from tfshard.operations.row_proof import NotByRowsError
from tfshard.storage import steps


@dataclasses.dataclass(eq=False)
class BlockVariables:
    """The variables that a block reads and writes while it is traced (`steps.LocalVariables`).

    Attributes:
        graph: The graph of the trace.
        reads: Each variable that was read, with its placeholder, by the id of the variable.
        writes: Each variable that was written, with its new value.
        changes: Results of `reshard`, with the dim that the model axis shards from here on.
    """

    graph: tf.Graph
    reads: dict[int, tuple[Any, tf.Tensor]] = dataclasses.field(default_factory=dict)
    writes: dict[int, tuple[Any, tf.Tensor]] = dataclasses.field(default_factory=dict)
    changes: list[tuple[tf.Tensor, int | None]] = dataclasses.field(default_factory=list)

    def read(self, variable: Any) -> tf.Tensor:
        if variable.layout.kind is not None:
            raise NotByRowsError(f"variable '{variable.path}' is one of the {variable.layout.kind.noun}")
        if id(variable) in self.writes:
            return self.writes[id(variable)][1]
        if id(variable) not in self.reads:
            with self.graph.as_default():  # A branch or a loop may read it.
                value = tf.compat.v1.placeholder(variable.dtype, variable.layout.spec.shape)
            self.reads[id(variable)] = variable, value
        return self.reads[id(variable)][1]

    def write(self, variable: Any, value: tf.Tensor) -> None:
        self.writes[id(variable)] = variable, value

    def reshard(self, tensor: tf.Tensor, dim: int | None) -> tf.Tensor:
        made = tf.identity(tensor)
        self.changes.append((made, dim))
        return made


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTrace:
    """A traced block.

    Attributes:
        graph: The graph.
        arguments: The placeholder of each tensor among the arguments, and of each mask.
        variables: The variables.
        captured: Other tensors of the step that the block uses, each with its placeholder.
        result: What the block returned.
        outputs: The tensors in the result, and their masks.
        operations: The operations of the graph, without those of gradients that are added later.
        drawn: The random tensors.
    """

    graph: tf.Graph
    arguments: list[tf.Tensor]
    variables: BlockVariables
    captured: list[tuple[tf.Tensor, tf.Tensor]]
    result: Any
    outputs: list[tf.Tensor]
    operations: list[tf.Operation]
    drawn: list[tf.Tensor]

    @property
    def written(self) -> list[tf.Tensor]:
        """The new value of each variable that the block writes."""
        return [value for _, value in self.variables.writes.values()]

    @property
    def read(self) -> list[tf.Tensor]:
        """What the block takes of each variable: its placeholder, or the only cast of it.

        Under mixed precision a variable is cast before it is gathered, which sends fewer bytes.
        """
        casts = [(_only_cast(value), value) for _, value in self.variables.reads.values()]
        return [value if cast is None else cast for cast, value in casts]


def masks_of(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the Keras masks of tensors, of those that have one."""
    found = [_private.mask_of(each) for each in tensors]
    return [each for each in found if isinstance(each, tf.Tensor)]


def tensors_in(structure: Any) -> list[tf.Tensor]:
    """Return the tensors in a structure of arguments or results."""
    return [each for each in keras.tree.flatten(structure) if isinstance(each, tf.Tensor)]


def replaced(structure: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Return the structure with other tensors, in order."""
    waiting = iter(tensors)
    return keras.tree.map_structure(lambda each: next(waiting) if isinstance(each, tf.Tensor) else each, structure)


def trace(
    function: Callable[..., Any],
    arguments: tuple[Any, Any],
    shapes: Sequence[tuple[int, ...]],
    layers: Sequence[keras.Layer],
) -> LocalTrace:
    """Call a block with placeholders.

    Args:
        function: The call of the block's layer.
        arguments: Its arguments and keyword arguments.
        shapes: The shape of each tensor among them, and then of each mask of these tensors.
        layers: The layers of the block.

    Raises:
        NotByRowsError: The block does more than to compute tensors.
    """
    graph = _private.func_graph(local_shards.NAME)
    variables = BlockVariables(graph)
    given = tensors_in(arguments)
    losses = [_private.own_losses(layer) for layer in layers]
    counts = [len(each) for each in losses]
    with graph.as_default(), steps.changed(local=variables):
        placeholders = [
            tf.compat.v1.placeholder(each.dtype, shape)
            for each, shape in zip([*given, *masks_of(given)], shapes, strict=True)
        ]
        masks = iter(placeholders[len(given) :])
        for each, made in zip(given, placeholders, strict=False):
            if masks_of([each]):
                _private.set_mask(made, next(masks))
        args, kwargs = replaced(arguments, placeholders)
        try:
            result = function(*args, **kwargs)
        except NotByRowsError:
            raise
        # The layer may raise anything for the rows of one device. Its error for all rows comes from the plain call.
        except Exception as error:
            raise NotByRowsError(f"its call fails with the samples of one device ({_text_of(error)})") from error
        finally:
            added = any(len(each) > count for each, count in zip(losses, counts, strict=True))
            for each, count in zip(losses, counts, strict=True):
                del each[count:]
        if added:
            raise NotByRowsError("it adds a loss to the model (add_loss, or activity_regularizer)")
        outputs = tensors_in(result)
        outputs += masks_of(outputs)
        if any(getattr(each, "graph", None) is not graph for each in outputs):
            raise NotByRowsError("it returns a tensor of another part of the model")
    operations = graph.get_operations()
    _check_operations(operations)
    for each in keras.tree.flatten((arguments, result)):
        if isinstance(each, tf.__internal__.CompositeTensor):
            raise NotByRowsError(f"it takes or returns a {type(each).__name__}")
    return LocalTrace(
        graph=graph,
        arguments=placeholders,
        variables=variables,
        captured=list(graph.captures),
        result=result,
        outputs=outputs,
        operations=operations,
        drawn=[_drawn(each) for each in operations if each.type in _private.ALL_RANDOM_OPS],
    )


def _text_of(error: Exception) -> str:
    """Return the first line of an error, without the lines that Keras puts around it."""
    found = re.search(r"\x1b\[1m(.*)\x1b\[0m", str(error), re.DOTALL)
    text = str(error) if found is None else found[1]
    return text.strip().partition("\n")[0][:300] or type(error).__name__


def _check_operations(operations: Sequence[tf.Operation]) -> None:
    for each in operations:
        if _private.is_stateful(each) and each.type not in _private.ALL_RANDOM_OPS:
            raise NotByRowsError(f"{origins.described(each)} has side effects")
        if any(output.dtype.is_complex for output in each.outputs):
            raise NotByRowsError(f"{origins.described(each)} has complex results")
    for each in operations:
        if _private.calls_functions(each) and not online_softmax.is_call(each):
            # The gradient of a loop or a branch changes its operation: a trace cannot be cut into programs after that.
            kind = _KINDS.get(each.type, "calls of a tf.function")
            raise NotByRowsError(f"tfshard has no rule for {kind} in a block: {origins.described(each)}")
    for each in operations:
        if any(tensor.dtype in (tf.variant, tf.resource) for tensor in each.outputs):
            raise NotByRowsError(f"{origins.described(each)} makes a {each.outputs[0].dtype.name}, not numbers")


# What the operations are that call functions.
_KINDS = {
    **dict.fromkeys(("While", "StatelessWhile"), "loops"),
    **dict.fromkeys(("Case", "If", "StatelessCase", "StatelessIf"), "branches"),
}


def _drawn(operation: tf.Operation) -> tf.Tensor:
    if operation.type not in draws.GENERATORS and operation.type not in draws.OLD_GENERATORS:
        raise NotByRowsError(f"{origins.described(operation)} draws random numbers in full")
    return operation.outputs[0]


def _only_cast(value: tf.Tensor) -> tf.Tensor | None:
    users = value.consumers()
    return users[0].outputs[0] if len(users) == 1 and users[0].type == "Cast" else None
