"""Recomputation: free what a block of the forward pass computed, and compute it again in the backward pass.

The pass changes the graph of a step once it is traced. If the backward pass takes a tensor that an operation of a block
computed, it gets the tensor from a copy of the operation. Copies take the results of copies, back to the inputs of the
block. A barrier joins these inputs with the gradient of the block's outputs: copies cannot start before the gradient
exists, and TensorFlow cannot merge them with the originals. The bits are the same, masks of dropout included, since
their seeds are inputs. Writes of the block (batch statistics, seeds) are not copied, so they happen once. (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost"; by blocks, as in Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".)

Memory keeps the inputs and outputs of the block, the results of operations with state or random numbers, of loops and
branches, and the results of the operations in `keeps`.
"""

import collections
import contextlib
from collections.abc import Collection, Hashable, Iterator, Sequence

import tensorflow as tf

from tfshard import _private
from tfshard.devices import merges
from tfshard.storage import unshard_schedule
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, ancestors
from tfshard.storage.step_record import Block, StepRecord

# Matrix products and convolutions are expensive to recompute.
PRODUCTS = frozenset(
    (
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Conv2D",
        "Conv3D",
        "DepthwiseConv2dNative",
        "Einsum",
        "MatMul",
    )
)

# The name scope of operations with results that stay in memory: rows that devices send each other.
STAYS = "stays_in_memory"

_NEVER = frozenset(("Const", "Placeholder", "ReadVariableOp"))
# Operations with results that are known when the step is traced.
_KNOWN = unshard_schedule.SIZES | {"BroadcastGradientArgs", "Const"}
_WITH_BODIES = ("Case", "If", "PartitionedCall", "While")


class BlockRecorder:
    """Records the blocks of a graph while it is traced.

    Args:
        graph: The graph; None in eager code.
        blocks: The list that blocks are added to.
    """

    def __init__(self, graph: tf.Graph | None, blocks: list[Block]):
        self.blocks = blocks
        self._graph = graph
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """True while the operations of a block are traced."""
        return self._is_open

    @contextlib.contextmanager
    def block(self, name: str, keeps: frozenset[str]) -> Iterator[None]:
        """Make a block of the operations that the scope adds to the recorder's graph.

        A block inside a block is part of it. Operations in other graphs, such as bodies of loops, are not recomputed.

        Args:
            name: The name of the block. If the block before has the same name, this one continues it.
            keeps: Types of operations. Their results stay in memory.
        """
        graph = self._graph
        if graph is None or graph is not tf.compat.v1.get_default_graph() or _private.is_eager() or self._is_open:
            yield
            return
        self._is_open = True
        begin = len(graph.get_operations())
        try:
            yield
        finally:
            self._is_open = False
        if self.blocks and self.blocks[-1].name == name:
            begin = self.blocks.pop().begin
        end = len(graph.get_operations())
        self.blocks.append(Block(name=name, begin=begin, end=end, keeps=keeps))


def recompute_blocks(record: StepRecord, barrier: Barrier) -> None:
    """Compute the blocks of a step again in the backward pass (`StepRecord.operations` then has the copies)."""
    if record.traced is not None:
        merges.choose(record.mesh, record.traced)
        read = {each.tensor.ref() for each in record.reads}
        record.operations = recompute(record.traced, record.blocks, barrier, read)


def recompute(
    graph: tf.Graph, blocks: Sequence[Block], barrier: Barrier, stored: Collection[Hashable] = ()
) -> list[tf.Operation]:
    """Change a traced graph.

    Args:
        graph: The graph.
        blocks: The blocks to compute again. They do not overlap.
        barrier: Makes barriers.
        stored: References to reads of variables. The unshard schedule copies the operations that compute a use from
            them.

    Returns:
        All operations of the graph, in the order in which they should run.
    """
    operations = graph.get_operations()
    places: dict[tf.Operation, tuple[int, int]] = {operation: (n, 0) for n, operation in enumerate(operations)}
    captured, known = _private.captured_placeholders(graph), known_before(operations)
    with graph.as_default(), tf.control_dependencies(None), _private.stop_recording():
        number_of = {operation: number for number, operation in enumerate(operations)}
        # Tapes add operations in the name scope of `tf.GradientTape`. A custom gradient of the model
        # (`tf.custom_gradient`, as in silu) adds operations without the scope, but behind an operation that has it.
        tapes = [number for operation, number in number_of.items() if "gradient_tape/" in operation.name]
        for block in blocks:
            backward = next((number for number in tapes if number >= block.end), len(operations))
            inside = operations[block.begin : block.end]
            found = _Recomputation(inside, block, number_of, stored, captured, known, backward)
            if found.needed:
                found.carry_out(barrier, places)
    return sorted(places, key=lambda operation: places[operation])


def known_before(operations: Sequence[tf.Operation]) -> frozenset[tf.Operation]:
    """Return the operations with results that are known before they run: constants and shapes.

    They must stay known: DTensor needs some of the results when it expands a step.
    """
    found: set[tf.Operation] = set()
    for operation in operations:
        is_made = operation.inputs and all(each.op in found for each in operation.inputs)
        if operation.type in _KNOWN or (is_made and not _private.is_stateful(operation)):
            found.add(operation)
    return frozenset(found)


class _Recomputation:
    """The recomputation of one block.

    Attributes:
        needed: The inputs of the backward pass that copies compute again, each with its tensor.
    """

    def __init__(
        self,
        inside: Sequence[tf.Operation],
        block: Block,
        number_of: dict[tf.Operation, int],
        stored: Collection[Hashable],
        captured: Collection[Hashable],
        known: Collection[tf.Operation],
        backward: int,
    ):
        self._inside = set(inside)
        self._number_of = number_of
        self._block = block
        self._stored = stored
        self._captured = captured
        self._known = known
        self._backward = backward
        # Operations that other blocks have added have no number, and do not count as users. They may read the token,
        # and this block captured the token's handle.
        self._given = {
            output.ref()
            for operation in inside
            for output in operation.outputs
            if any(block.end <= number_of.get(user, -1) < backward for user in output.consumers())
        }
        users = [
            (OpInput(operation=user, number=number), tensor)
            for operation in inside
            if self._is_copied(operation)
            for tensor in operation.outputs
            if tensor.ref() not in self._given
            for user in dict.fromkeys(tensor.consumers())
            if number_of.get(user, -1) >= backward
            for number, each in enumerate(user.inputs)
            if each is tensor
        ]
        self._gradient = None
        self.needed: list[tuple[OpInput, tf.Tensor]] = []
        if users:
            self._gradient = self._gradient_before(
                min((user.operation for user, _ in users), key=number_of.__getitem__)
            )
        if self._gradient is not None:
            self.needed = users

    def _gradient_before(self, first: tf.Operation) -> tf.Tensor | None:
        """Return the gradient that an operation of the backward pass takes, or an operation that uses its result.

        None if no gradient arrives: a custom gradient of the model may begin with tensors of the block alone.
        """
        after, numbers = self._made_after(), range(self._backward, self._number_of[first])
        left, seen = collections.deque([first]), {first}
        while left:
            operation = left.popleft()
            for each in operation.inputs:
                if each.ref() in after and self._number_of[each.op] in numbers and each.dtype.is_floating:
                    return each
            for user in [user for output in operation.outputs for user in output.consumers()]:
                if user in self._number_of and user not in seen:
                    seen.add(user)
                    left.append(user)
        return None

    def carry_out(self, barrier: Barrier, places: dict[tf.Operation, tuple[int, int]]) -> None:
        """Add the copies where the first of them is needed, and give them to the operations that need them.

        Args:
            barrier: Makes barriers.
            places: The place of each operation in the order. New operations are added.
        """
        assert self._gradient is not None
        wanted: dict[tf.Operation, None] = {}
        left = [tensor.op for _, tensor in self.needed]
        while left:
            operation = left.pop()
            if operation not in wanted:
                wanted[operation] = None
                left += [each.op for each in operation.inputs if self._is_made_again(each)]
        order = sorted(wanted, key=lambda operation: self._number_of[operation])
        incoming = {
            each.ref(): each
            for operation in order
            for each in operation.inputs
            if not self._is_made_again(each) and self._is_activation(each)
        }
        first = min(self._number_of[user.operation] for user, _ in self.needed)
        gradient_users = [
            OpInput(operation=user, number=number)
            for user in self._gradient.consumers()
            if self._number_of.get(user, -1) >= first
            for number, each in enumerate(user.inputs)
            if each is self._gradient
        ]
        read = barrier.read_token()
        gradient, *tied = barrier.tie(self._gradient, *incoming.values(), read=read)
        made = dict(zip(incoming, tied, strict=True))
        places[read.op] = (self._block.begin, -1)
        added = [gradient.op]
        for operation in order:
            outputs = _private.copied(operation, [made.get(each.ref(), each) for each in operation.inputs])
            added.append(outputs[0].op)
            made.update((old.ref(), new) for old, new in zip(operation.outputs, outputs, strict=True))
        places.update((operation, (first - 1, n)) for n, operation in enumerate(added, start=1))
        for user, tensor in self.needed:
            user.replace(made[tensor.ref()])
        for user in gradient_users:
            user.replace(gradient)
        for tensor in {each.ref(): each for _, each in self.needed}.values():
            self._keep_apart(tensor, read, barrier, places)

    def _keep_apart(
        self, tensor: tf.Tensor, read: tf.Tensor, barrier: Barrier, places: dict[tf.Operation, tuple[int, int]]
    ) -> None:
        """Give each forward operation that uses a tensor a separate output of a barrier around the tensor.

        If the tensor had no other use, TensorFlow would fuse the operations before and behind it, which rounds
        differently. TensorFlow would also fuse operations behind the tensor with each other, such as a product with the
        sigmoid of the same tensor.
        """
        users = [user for user in dict.fromkeys(tensor.consumers()) if user in self._inside]
        if not users or self._is_stored(tensor):
            return  # The unshard schedule copies each use of a stored value.
        apart = barrier.tie(*[tensor] * len(users), read=read)
        places[apart[0].op] = (self._number_of[tensor.op], 1)
        for user, separate in zip(users, apart, strict=True):
            for number, each in enumerate(user.inputs):
                if each is tensor:
                    _private.update_input(user, number, separate)

    def _is_stored(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is a read on its way to a use. Rows that were looked up for a batch are not."""
        while tensor.ref() not in self._stored:
            operation = tensor.op
            if operation.type == "IdentityN":
                tensor = operation.inputs[tensor.value_index]
                continue
            if not unshard_schedule.is_on_the_way(operation):
                return False
            # Known operations are not followed: the shape of an activation leads to all of the forward pass.
            others = ancestors(each for each in operation.inputs[1:] if each.op not in self._known)
            if any(self._is_argument(each) for each in others):
                return False
            tensor = operation.inputs[0]
        return True

    def _is_argument(self, operation: tf.Operation) -> bool:
        """Return whether an operation is an argument of the step, such as a batch."""
        return operation.type == "Placeholder" and operation.outputs[0].ref() not in self._captured

    def _is_copied(self, operation: tf.Operation) -> bool:
        return (
            operation.type not in _NEVER
            and operation not in self._known
            and STAYS not in operation.name
            and operation.type not in self._block.keeps
            and not _private.is_stateful(operation)
            and not operation.type.endswith(_WITH_BODIES)
            and bool(operation.outputs)
            and not any(each.dtype in (tf.resource, tf.variant) for each in (*operation.inputs, *operation.outputs))
        )

    def _is_made_again(self, tensor: tf.Tensor) -> bool:
        return tensor.op in self._inside and tensor.ref() not in self._given and self._is_copied(tensor.op)

    def _is_activation(self, tensor: tf.Tensor) -> bool:
        """Return whether to tie an input of the block: not a stored value, its gather or a constant."""
        if tensor.op.type in _NEVER:
            return tensor.op.type == "Placeholder" and bool(tensor.dtype.is_floating)
        return tensor.op not in self._known and not self._is_stored(tensor)

    def _made_after(self) -> set[Hashable]:
        """Return the tensors computed from the outputs of the block."""
        after = set(self._given)
        left = collections.deque(user for ref in self._given for user in ref.deref().consumers())
        seen: set[tf.Operation] = set()
        while left:
            operation = left.popleft()
            if operation not in seen and operation in self._number_of:
                seen.add(operation)
                for output in operation.outputs:
                    after.add(output.ref())
                    left.extend(output.consumers())
        return after
