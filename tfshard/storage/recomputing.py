"""Recomputation: what a block made in the forward pass is freed, and made again when the backward pass comes to it.

A step's graph is changed once it is traced. Where the backward pass takes a tensor that an operation of a block made,
it is given one by a copy of that operation; copies work on copies, back to what came into the block. What comes in is
tied by an IdentityN to the gradient of what the block gave: copies cannot start before that exists, nor be merged with
the originals. The bits are the same, masks of dropout included, whose seeds are inputs. What a block writes (batch
statistics, seeds) is not copied, so it happens once. (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost"; of blocks, as Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".)

What is kept: what comes in, what the block gave or others use, what has state or draws numbers by it, loops and
branches, and what `keeps` says.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence

import tensorflow as tf

from tfshard import _private
from tfshard.storage import turns

# The results of matrix products and convolutions: dear to make again.
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

# In the names of operations whose results stay: of what devices ask each other for.
STAYS = "stays_in_memory"

_NEVER = frozenset(("Const", "Placeholder", "ReadVariableOp"))
# What is known of shapes, and constants.
_KNOWN = turns.SIZES | {"BroadcastGradientArgs", "Const"}
_WITH_BODIES = ("Case", "If", "PartitionedCall", "While")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the forward pass.

    Attributes:
        name: Of the block.
        begin: The number of its first operation, in the order in which they were added to the graph.
        end: One more than that of its last.
        keeps: Types of operations whose results stay.
    """

    name: str
    begin: int
    end: int
    keeps: frozenset[str] = frozenset()


def recompute(
    graph: tf.Graph, blocks: Sequence[Block], token: Callable[[], tf.Tensor], stored: Collection[Hashable] = ()
) -> "Recomputed":
    """Changes the graph of a step that was traced.

    Args:
        graph: The graph.
        blocks: Which parts are to be computed again. They do not overlap.
        token: Reads a variable: a number that nobody needs.
        stored: References to what was read of variables. What is made of it on the way to a use has turns.
    """
    operations = graph.get_operations()
    places: dict[tf.Operation, tuple[int, int]] = {operation: (n, 0) for n, operation in enumerate(operations)}
    tokens = []
    captured, known = _private.captured_placeholders(graph), known_before(operations)
    with graph.as_default(), tf.control_dependencies(None), _private.stop_recording():
        number_of = {operation: number for number, operation in enumerate(operations)}
        # What tapes add (their name scope: `tf.GradientTape`). By a gradient of a model's own (`tf.custom_gradient`, as
        # silu has) they add it without a name, but after something that has one.
        tapes = [number for operation, number in number_of.items() if "gradient_tape/" in operation.name]
        for block in blocks:
            backward = next((number for number in tapes if number >= block.end), len(operations))
            inside = operations[block.begin : block.end]
            found = _Recomputation(inside, block, number_of, stored, captured, known, backward)
            if found.needed:
                tokens += found.carry_out(token, places)
    return Recomputed(operations=sorted(places, key=lambda operation: places[operation]), tokens=tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputed:
    """A graph in which blocks are computed again.

    Attributes:
        operations: All of the graph, in the order in which they are to run.
        tokens: Numbers that have to be used for something, so that nothing is taken for superfluous.
    """

    operations: list[tf.Operation]
    tokens: list[tf.Tensor]


def known_before(operations: Sequence[tf.Operation]) -> frozenset[tf.Operation]:
    """Those whose results are known before they run: of constants, and of shapes. They have to stay so: DTensor needs
    some of them when it expands a step."""
    found: set[tf.Operation] = set()
    for operation in operations:
        is_made = operation.inputs and all(each.op in found for each in operation.inputs)
        if operation.type in _KNOWN or (is_made and not _private.is_stateful(operation)):
            found.add(operation)
    return frozenset(found)


class _Recomputation:
    """Of one block.

    Attributes:
        needed: The inputs of operations of the backward pass that are to be made again: operation and number of each.
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
        # What other blocks have added is no user: it has no number. It may read the token's variable, whose handle was
        # captured in this block.
        self._given = {
            output.ref()
            for operation in inside
            for output in operation.outputs
            if any(block.end <= number_of.get(user, -1) < backward for user in output.consumers())
        }
        users = [
            (user, number, tensor)
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
        self.needed: list[tuple[tf.Operation, int, tf.Tensor]] = []
        if users:
            self._gradient = self._gradient_before(
                min((user for user, _, _ in users), key=lambda each: number_of[each])
            )
        if self._gradient is not None:
            self.needed = users

    def _gradient_before(self, first: tf.Operation) -> tf.Tensor | None:
        """The gradient that comes to an operation of the backward pass, or to what uses its result; None if none does.

        A gradient of a model's own may begin with operations on tensors of the block alone.
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

    def carry_out(self, token: Callable[[], tf.Tensor], places: dict[tf.Operation, tuple[int, int]]) -> list[tf.Tensor]:
        """Adds the copies, where the first of them is needed, and gives them to those that need them.

        Returns:
            Tokens that have to be used.
        """
        assert self._gradient is not None
        wanted: dict[tf.Operation, None] = {}
        left = [tensor.op for _, _, tensor in self.needed]
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
        first = min(self._number_of[user] for user, _, _ in self.needed)
        gradient_users = [
            (user, number)
            for user in self._gradient.consumers()
            if self._number_of.get(user, -1) >= first
            for number, each in enumerate(user.inputs)
            if each is self._gradient
        ]
        read = token()
        tied = tf.raw_ops.IdentityN(input=[read, self._gradient, *incoming.values()])
        made = dict(zip(incoming, tied[2:], strict=True))
        places[read.op] = (self._block.begin, -1)
        added = [tied[0].op]
        for operation in order:
            outputs = _private.copied(operation, [made.get(each.ref(), each) for each in operation.inputs])
            added.append(outputs[0].op)
            made.update((old.ref(), new) for old, new in zip(operation.outputs, outputs, strict=True))
        places.update((operation, (first - 1, n)) for n, operation in enumerate(added, start=1))
        for user, number, tensor in self.needed:
            _private.update_input(user, number, made[tensor.ref()])
        for user, number in gradient_users:
            _private.update_input(user, number, tied[1])
        kept_apart = [
            self._keep_apart(tensor, read, places) for tensor in {t.ref(): t for _, _, t in self.needed}.values()
        ]
        return [tied[0], *itertools.chain(*kept_apart)]

    def _keep_apart(
        self, tensor: tf.Tensor, read: tf.Tensor, places: dict[tf.Operation, tuple[int, int]]
    ) -> list[tf.Tensor]:
        """Gives the forward pass its tensor through an IdentityN, each operation by an output of its own.

        With no other use left TensorFlow would fuse the operations before and behind it, or those behind it with each
        other (a product with the sigmoid of the same), and round otherwise.
        """
        users = [user for user in dict.fromkeys(tensor.consumers()) if user in self._inside]
        if not users or self._is_stored(tensor):
            return []  # Each use of what is stored has a turn.
        other, *apart = tf.raw_ops.IdentityN(input=[read, *[tensor] * len(users)])
        places[other.op] = (self._number_of[tensor.op], 1)
        for user, own in zip(users, apart, strict=True):
            for number, each in enumerate(user.inputs):
                if each is tensor:
                    _private.update_input(user, number, own)
        return [other]

    def _is_stored(self, tensor: tf.Tensor) -> bool:
        """Whether it is what was read of a variable, on its way to a use; not what was looked up in it for a batch."""
        while tensor.ref() not in self._stored:
            operation = tensor.op
            if operation.type == "IdentityN":
                tensor = operation.inputs[tensor.value_index]
                continue
            if operation.type not in turns.ON_THE_WAY:
                return False
            # What is known is not followed back: the shape of an activation leads to all of the forward pass.
            others = turns.ancestors(each for each in operation.inputs[1:] if each.op not in self._known)
            if any(self._is_argument(each) for each in others):
                return False
            tensor = operation.inputs[0]
        return True

    def _is_argument(self, operation: tf.Operation) -> bool:
        """Whether a step is given what it gives, such as a batch."""
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
        """Whether a tensor that comes in is to be tied: not what is stored, nor a gather of it, and not a constant."""
        if tensor.op.type in _NEVER:
            return tensor.op.type == "Placeholder" and bool(tensor.dtype.is_floating)
        return tensor.op not in self._known and not self._is_stored(tensor)

    def _made_after(self) -> set[Hashable]:
        """What is made of what the block gave."""
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
