"""Turns: what is stored sharded is gathered when it is about to be used, freed, and gathered again for a later use.

DTensor starts every gather of a step at once: nothing orders them. And what is gathered stays until its last use, in
the backward pass. So a step of stage 3 would hold all parameters whole. Here its graph is changed once it is traced:

- The uses of what is stored, in the order in which they were added to the graph, are shared out among *turns*. Each
  turn has a gather of its own. What is gathered is kept from a use to a later one as long as all that is kept fits into
  `kept_bytes`; of what does not fit, what is needed last is freed first, which takes the fewest gathers there can be
  (Belady 1966, "A study of replacement algorithms for a virtual-storage computer"). What would be gathered again at
  once, since a gather may start some turns before its own, and takes more than what is used meanwhile, is not freed: a
  group would be in memory twice around each kernel that stands alone.
- A gather is tied to its turn by an IdentityN of what is stored and of the tensor that the operation of an earlier turn
  is about to work on (its *tie*). It can neither start before that tensor exists, nor be merged with the gather of
  another turn.
- In the same way an operation of the backward pass waits until what was made of a gradient before it is scattered, and
  the variable is updated, if that takes no other gradient. Else the backward pass would run ahead of reductions and
  updates, and all gradients be there whole.

TensorFlow takes away what is superfluous to it (Grappler's model pruner and dependency optimizer): outputs of an
IdentityN that lead nowhere, with their inputs, and an IdentityN whose first input is not the read of a variable. So all
outputs are used here, and the first is a read.

What is cast to a smaller dtype once it is gathered, as under mixed precision, is cast before that.

No number changes: a gather is exact.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfshard import _private
from tfshard.devices import replicas
from tfshard.layouts.config import ReshardPolicy

# What a stored value goes through between its gather and its use: made again for each turn.
ON_THE_WAY = frozenset({
    "Bitcast", "Cast", "EnsureShape", "ExpandDims", "GatherV2", "Identity", "Relayout", "Reshape", "Slice", "Squeeze",
    "StridedSlice", "Transpose", replicas.GATHER,
})  # fmt: skip

# And what is stored in integers, until it is numbers: kernels are taken apart and scaled (Keras's `quantize`).
_OF_INTEGERS = frozenset(("BitwiseAnd", "BitwiseXor", "Mul", "Pack", "RealDiv", "RightShift", "Sub"))

# What variables are computed with under mixed precision.
_NARROW = (tf.bfloat16, tf.float16)

# In which their bits are sent. A collective that gathers looks at none; of bfloat16 DTensor makes an all-reduce in
# float32.
_DTYPE_SENT = tf.float16

# What is made of the batch, but known when the step is traced.
SIZES = frozenset(("Rank", "Shape", "ShapeN", "Size"))

# What takes this share of all that is gathered, as the table of a language model may, is not whole on a device at the
# same time as its gradient.
_HEAVY = 1 / 8

# The operations whose gradients are ordered so. Not convolutions: oneDNN makes one operation of the gradients by a
# kernel and by a bias if both take outputs of one operation, even different ones (mkl_layout_pass.cc): silently wrong.
_PRODUCTS = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"))

# What is smaller than what is kept by this factor is no turn that others are counted by. What takes that little all
# together, as biases do, stays gathered.
_FAR_LESS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """What is stored as one: a variable or a group.

    Attributes:
        key: What tells it from others.
        bytes: Of what a device has once it is gathered.
        itemsize: Bytes of an element.
        is_gathered: Whether it rests sharded, and is gathered to be used.
        keeps: Whether it stays gathered from its first use to its last.
    """

    key: Hashable
    bytes: int
    itemsize: int = 4
    is_gathered: bool = True
    keeps: bool = False

    def sent_as(self, dtype: tf.DType | None) -> "Stored":
        """The same, gathered in another dtype."""
        if dtype is None:
            return self
        return dataclasses.replace(self, bytes=self.bytes // self.itemsize * dtype.size, itemsize=dtype.size)


def kept_bytes_of(stored: Iterable[Stored]) -> int:
    """Return how many gathered bytes a device keeps: as many as the largest takes, which the device needs anyway."""
    return max((each.bytes for each in stored), default=0)


@dataclasses.dataclass(kw_only=True)
class Gradient:
    """A gradient that takes less memory once it is scattered, or used up.

    Attributes:
        key: Of the `Stored` that it belongs to.
        tensor: The gradient as it waits for the update.
        is_scattered: Whether it is shards then.
        updated: What will be stored of the variable that it belongs to; None if it is not updated.
    """

    key: Hashable
    tensor: tf.Tensor
    is_scattered: bool
    updated: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """An input of an operation."""

    operation: tf.Operation
    number: int

    @property
    def tensor(self) -> tf.Tensor:
        return self.operation.inputs[self.number]

    def fill(self, tensor: tf.Tensor) -> None:
        _private.update_input(self.operation, self.number, tensor)


@dataclasses.dataclass(kw_only=True, eq=False)
class Use:
    """An operation that works on a gathered value.

    Attributes:
        operation: The operation.
        numbers: Of its inputs, by the key of what they are made of.
        narrow: The dtype that each of these keys was cast to on the way; None where it was not.
        tie: Another input of it, that is made of the batch: of several the one that was made last; None if it has none.
    """

    operation: tf.Operation
    numbers: dict[Hashable, list[int]]
    narrow: dict[Hashable, tf.DType | None]
    tie: Slot | None


def arrange(
    operations: Sequence[tf.Operation],
    reads: Sequence[tuple[Stored, tf.Tensor]],
    gradients: Iterable[Gradient],
    reshard: ReshardPolicy,
    token: Callable[[], tf.Tensor],
) -> list[tf.Tensor]:
    """Changes the graph of a step that was traced: gathers wait for their turn, and the backward pass for gradients.

    Args:
        operations: All operations of its graph, in the order in which they are to run.
        reads: What the step has read of what is stored. The same may have been read several times.
        gradients: Gradients that are to be gone before the backward pass goes on. What is `updated` of them is changed
            to what has to be stored instead.
        reshard: When to gather, and when to free.
        token: Reads a variable: a number that nobody needs.

    Returns:
        Numbers that have to be used for something, so that nothing is taken for superfluous.
    """
    whole = {each.key for each, _ in reads if not each.is_gathered}
    values = Values(((each.key, tensor) for each, tensor in reads), whole)
    with operations[0].graph.as_default(), tf.control_dependencies(None), _private.stop_recording():
        uses = list(values.uses(operations))
        sent = sent_dtypes(uses)
        stored = {each.key: each.sent_as(sent.get(each.key)) for each, _ in reads}
        kept_bytes = kept_bytes_of(stored.values())
        large = {key for key, each in stored.items() if each.bytes * _FAR_LESS > kept_bytes}
        gradients = list(gradients)
        made = ancestors(each.updated for each in gradients if each.updated is not None)
        updates = made - ancestors(each.tensor for each in gradients)
        ahead = max(reshard.prefetch - 1, 0)
        gates = _Gates(operations, [each for each in gradients if each.key in large], token, ahead)
        gathered = [[key for key in use.numbers if stored[key].is_gathered] for use in uses]
        begins = begun([[stored[key] for key in keys] for keys in gathered], kept_bytes, reshard.prefetch)
        turns: dict[Hashable, _Turn] = {}
        ties: list[Slot] = []  # Of the large turns before.
        untied: set[Hashable] = set()  # Large turns that began with what waits for nothing: the shape of a kernel.
        traced = [None if use.tie is None else use.tie.tensor for use in uses]
        for use, keys, beginning, tensor in zip(uses, gathered, begins, traced, strict=True):
            own = [] if use.tie is None else [use.tie]
            is_update = use.operation in updates  # For which an operation of a turn before may wait.
            for key in beginning:
                before = own if is_update else [*ties, *own][: max(len(ties) - reshard.prefetch, -1) + 1]
                turns[key] = _Turn(values, key, before[-1] if before else None, sent.get(key))
            if not is_update:
                untied |= large.intersection(beginning)
            if own and not untied.isdisjoint(use.numbers):
                ties += own
                untied.clear()
            for key in keys:
                for number in use.numbers[key]:
                    slot = Slot(operation=use.operation, number=number)
                    value = turns[key].of(slot.tensor)
                    if value.dtype == slot.tensor.dtype:
                        slot.fill(value)
                    else:
                        _look_up(use.operation, value)
            if use.tie is not None and not large.isdisjoint(use.numbers) and not is_update:
                gates.close(use.tie, tensor)
        last = {key: (use, tensor) for use, tensor in zip(uses, traced, strict=True) for key in use.numbers}
        all_bytes = sum(each.bytes for each in stored.values())
        for gradient in gradients:
            if gradient.key not in last or stored[gradient.key].bytes < _HEAVY * all_bytes:
                continue
            use, tensor = last[gradient.key]
            if tensor is not None and use.operation.type in _PRODUCTS:
                gates.give_way(use.operation, tensor, gradient)
        _leave_out(operations, values)
    return gates.tokens


def _leave_out(operations: Iterable[tf.Operation], values: "Values") -> None:
    """Takes stored values out of custom gradients. There an IdentityN has the results, and all arguments, of which
    nobody uses what it gives. Ties, which are an IdentityN too, stay as they are."""
    for operation in operations:
        if operation.type != "IdentityN" or "_gradient_op_type" not in operation.node_def.attr:
            continue
        users = [output.consumers() for output in operation.outputs]
        kept = [i for i, each in enumerate(operation.inputs) if not values.is_made_of_stored(each)]
        if not any(users[i] for i in kept) or any(users[i] for i in range(len(users)) if i not in kept):
            continue
        made = tf.raw_ops.IdentityN(input=[operation.inputs[i] for i in kept])
        for i, tensor in zip(kept, made, strict=True):
            for user in users[i]:
                for number, each in enumerate(user.inputs):
                    if each is operation.outputs[i]:
                        _private.update_input(user, number, tensor)


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """The operations that tensors are made by."""
    found: set[tf.Operation] = set()
    left = [tensor.op for tensor in tensors]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += [each.op for each in operation.inputs]
    return found


def is_made_of(tensor: tf.Tensor, operations: Collection[tf.Operation], passes: Callable[[tf.Operation], bool]) -> bool:
    """Whether a tensor depends on one of some operations, by way of others that `passes` lets through."""
    seen, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation in operations:
            return True
        if operation not in seen and passes(operation):
            seen.add(operation)
            left += [each.op for each in operation.inputs]
    return False


def users_of(tensor: tf.Tensor) -> list[Slot]:
    """The inputs of operations that take a tensor."""
    return [
        Slot(operation=user, number=number)
        for user in tensor.consumers()
        for number, each in enumerate(user.inputs)
        if each is tensor
    ]


def begun(uses: Sequence[Sequence[Stored]], kept_bytes: int, prefetch: int) -> list[list[Hashable]]:
    """The turns that begin with each use: what has to be gathered for it.

    Args:
        uses: What each operation takes, in order.
        kept_bytes: How much is kept of what is gathered.
        prefetch: How many turns before its own a gather may start. What would be gathered again at once is kept
            if it takes more than what is used meanwhile.
    """
    later: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
    for number, use in enumerate(uses):
        for stored in use:
            later[stored.key].append(number)
    stays = _staying(uses, kept_bytes)
    kept: dict[Hashable, Stored] = {}
    begins = []
    for number, use in enumerate(uses):
        beginning = {stored.key: stored for stored in use if stored.key not in kept}
        begins.append(list(beginning))
        if not use:
            continue
        kept |= beginning
        for stored in use:
            later[stored.key].popleft()
        using = {stored.key for stored in use}
        may_leave = [stored for stored in kept.values() if stored.key not in stays and stored.key not in using]
        may_leave.sort(key=lambda stored: later[stored.key][0])
        # What is needed last goes first.
        while may_leave and sum(stored.bytes for stored in kept.values() if stored.key not in stays) > kept_bytes:
            leaves = may_leave.pop()
            if len(may_leave) < prefetch and leaves.bytes > sum(stored.bytes for stored in use):
                between = itertools.chain.from_iterable(uses[number + 1 : later[leaves.key][0]])
                missing = {each.key for each in between if each.key not in kept and each.bytes * _FAR_LESS > kept_bytes}
                if len(missing) < prefetch:
                    break
            del kept[leaves.key]
        for key in using:
            if not later[key]:
                del kept[key]
    return begins


def _staying(uses: Sequence[Sequence[Stored]], kept_bytes: int) -> set[Hashable]:
    """The keys of what stays gathered: what is to, and the smallest, as biases are, that take little together."""
    sizes = {stored.key: stored.bytes for use in uses for stored in use}
    smallest = sorted(sizes, key=lambda key: sizes[key])
    together = itertools.accumulate(sizes[key] for key in smallest)
    small = {key for key, bytes_ in zip(smallest, together, strict=True) if bytes_ * _FAR_LESS <= kept_bytes}
    return small | {stored.key for use in uses for stored in use if stored.keeps}


class Values:
    """What is made of stored values in a graph, up to their uses.

    Args:
        reads: A key and what was read, for each read. Those of one key are the same.
        whole: The keys of what is not gathered.

    Attributes:
        first: What was read first, by key.
        key_of: The key of each tensor that is made of what was read, by reference.
        narrow_of: The dtype that it was cast to on the way; None if it was not.
    """

    def __init__(self, reads: Iterable[tuple[Hashable, tf.Tensor]], whole: Collection[Hashable] = ()):
        self._whole = whole
        self.first: dict[Hashable, tf.Tensor] = {}
        self.key_of: dict[Hashable, Hashable] = {}
        self.narrow_of: dict[Hashable, tf.DType | None] = {}
        for key, tensor in reads:
            self.first.setdefault(key, tensor)
            self._add(tensor, key, None)
        self._read = set(self.key_of)

    def is_read(self, tensor: tf.Tensor) -> bool:
        """Whether it is what was read itself."""
        return tensor.ref() in self._read

    def is_made_of_stored(self, tensor: tf.Tensor) -> bool:
        """Whether it is what was read, or made of nothing else."""
        return tensor.ref() in self.key_of

    def uses(self, operations: Sequence[tf.Operation]) -> Iterator[Use]:
        """Those of all operations of a graph that work on stored values, in the same order."""
        number_of = {operation: number for number, operation in enumerate(operations)}
        captured = _private.captured_placeholders(operations[0].graph)
        of_batch: set[Hashable] = set()
        for operation in number_of:
            inputs = list(operation.inputs)
            numbers: dict[Hashable, list[int]] = {}
            for number, each in enumerate(inputs):
                if each.ref() in self.key_of:
                    numbers.setdefault(self.key_of[each.ref()], []).append(number)
            batch = [each for each in inputs if each.ref() in of_batch]
            is_argument = (
                operation.type == "Placeholder"
                and operation.outputs[0].ref() not in captured
                and operation.outputs[0].ref() not in self.key_of
            )
            if operation.type == "IdentityN" and numbers:  # Each output is an input: a custom gradient has one.
                for each, output in zip(inputs, operation.outputs, strict=True):
                    if each.ref() in self.key_of:
                        self._add(output, self.key_of[each.ref()], self.narrow_of[each.ref()])
                    elif each.ref() in of_batch:
                        of_batch.add(output.ref())
            elif not batch and (key := self._made_of(operation, numbers)) is not None:
                number = numbers[key][0]
                narrow = self.narrow_of[inputs[number].ref()]
                if operation.type == "Cast" and inputs[0].dtype == self.first[key].dtype == tf.float32:
                    narrow = _narrow_of_cast(operation)
                for output in operation.outputs:
                    self._add(output, key, narrow)
            else:
                if is_argument or (batch and operation.type not in SIZES) or operation.type in _private.ALL_RANDOM_OPS:
                    of_batch.update(output.ref() for output in operation.outputs)
                if numbers:
                    ties = [
                        Slot(operation=operation, number=number)
                        for number, each in enumerate(inputs)
                        if each.ref() in of_batch and each.dtype not in (tf.resource, tf.variant)
                    ]
                    if operation.type in SIZES:
                        # It waits for nothing. What else takes the same may be the gradient by a convolution's kernel,
                        # of which oneDNN makes one operation with that by its bias (mkl_layout_pass.cc): then one of
                        # the two cannot wait.
                        ties = []
                    tie = max(ties, key=lambda slot: number_of[slot.tensor.op], default=None)
                    narrow = {key: self._narrowest(inputs[number] for number in of) for key, of in numbers.items()}
                    if operation.type == "GatherV2" and 0 in numbers.get(self.key_of.get(inputs[0].ref()), ()):
                        narrow[self.key_of[inputs[0].ref()]] = _narrow_of_lookup(operation)
                    yield Use(operation=operation, numbers=numbers, narrow=narrow, tie=tie)

    def _made_of(self, operation: tf.Operation, keys: Collection[Hashable]) -> Hashable | None:
        """The key of the one value that goes on through an operation which does not take the batch; None if none does,
        or the operation works on it."""
        if operation.type in ON_THE_WAY:
            return next(iter(keys)) if len(keys) == 1 else None
        gathered = [key for key in keys if key not in self._whole]
        if operation.type not in _OF_INTEGERS or len(gathered) != 1:
            return None
        return gathered[0] if self.first[gathered[0]].dtype.is_integer else None

    def _add(self, tensor: tf.Tensor, key: Hashable, narrow: tf.DType | None) -> None:
        self.key_of[tensor.ref()] = key
        self.narrow_of[tensor.ref()] = narrow

    def _narrowest(self, tensors: Iterable[tf.Tensor]) -> tf.DType | None:
        """What all of these were cast to."""
        found = {self.narrow_of[each.ref()] for each in tensors}
        return next(iter(found)) if len(found) == 1 else None


def _narrow_of_cast(operation: tf.Operation) -> tf.DType | None:
    dtype = operation.outputs[0].dtype
    return dtype if dtype in _NARROW else None


def _narrow_of_lookup(operation: tf.Operation) -> tf.DType | None:
    """The dtype that all that is made of the rows which were looked up is cast to; None if it is not."""
    users = operation.outputs[0].consumers()
    found = {_narrow_of_cast(user) if user.type == "Cast" else None for user in users}
    return next(iter(found)) if len(found) == 1 else None


def _look_up(operation: tf.Operation, table: tf.Tensor) -> None:
    """Rows are looked up in a table that is cast already."""
    (looked_up,) = _private.copied(operation, [table, *operation.inputs[1:]], dtype=table.dtype)
    for cast in operation.outputs[0].consumers():
        rows = _received(looked_up, cast.outputs[0].dtype)
        for slot in users_of(cast.outputs[0]):
            slot.fill(rows)


def sent_dtypes(uses: Iterable[Use]) -> dict[Hashable, tf.DType]:
    """The dtype, by key, of what is only ever used in one that is smaller than that in which it is stored."""
    found: dict[Hashable, set[tf.DType | None]] = collections.defaultdict(set)
    for use in uses:
        for key, narrow in use.narrow.items():
            found[key].add(narrow)
    return {key: narrow for key, (narrow, *others) in found.items() if narrow is not None and not others}


class _Gates:
    """Where the backward pass waits until gradients that it made before are no more whole, and used up.

    Args:
        operations: Those of the graph, in order.
        gradients: Those that are waited for.
        token: Reads a variable: a number that nobody needs.
        ahead: How many gradients, that were made last, are not waited for: they are reduced meanwhile.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        gradients: Iterable[Gradient],
        token: Callable[[], tf.Tensor],
        ahead: int,
    ):
        self._ahead = ahead
        self._number_of = {operation: number for number, operation in enumerate(operations)}
        self._waiting = collections.deque(sorted(gradients, key=lambda each: self._number_of[each.tensor.op]))
        self._made: collections.deque[Gradient] = collections.deque()
        self._users: dict[Hashable, list[Slot]] = collections.defaultdict(list)
        for operation in operations:
            for number, each in enumerate(operation.inputs):
                self._users[each.ref()].append(Slot(operation=operation, number=number))
        self._token = token
        self.tokens: list[tf.Tensor] = []

    def close(self, slot: Slot, tensor: tf.Tensor) -> None:
        """Lets an operation, and those after it that work on the same, wait for the gradient that was made last but for
        those that it need not wait for.

        Args:
            slot: An input of the operation.
            tensor: What it was when the graph was traced.
        """
        here = self._number_of[slot.operation]
        while self._waiting and self._number_of[self._waiting[0].tensor.op] < here:
            self._made.append(self._waiting.popleft())
        while len(self._made) > self._ahead + 1:
            self._made.popleft()
        if len(self._made) <= self._ahead:
            return
        made = self._made[0]
        held = [slot, *(user for user in self._users[tensor.ref()] if self._number_of[user.operation] > here)]
        # What is waited for must not be made of what waits for it.
        waiting = {user.operation for user in held}
        if made.updated is not None and not is_made_of(
            made.updated, waiting, lambda operation: self._number_of.get(operation, here + 1) > here
        ):
            tied, made.updated = self._tie(slot.tensor, made.updated)
            self._made.popleft()
        else:
            users = self._users[made.tensor.ref()]
            if not made.is_scattered or not users or any(self._number_of[user.operation] <= here for user in users):
                return
            tied, gradient = self._tie(slot.tensor, made.tensor)
            for user in users:
                user.fill(gradient)
        for user in held:
            user.fill(tied)

    def give_way(self, use: tf.Operation, tensor: tf.Tensor, gradient: Gradient) -> None:
        """Lets what makes a gradient wait until an operation has ended that works on the same and on what is gathered.

        Args:
            use: The operation, the last that works on it.
            tensor: What both work on, as it was when the graph was traced.
            gradient: Of what is gathered.
        """
        users = [user for output in use.outputs[:1] for user in self._users[output.ref()]]
        others = (user for user in self._users[tensor.ref()] if user.operation is not use)
        makes, before = ancestors([gradient.tensor]), ancestors(use.outputs)
        waiting = [
            user
            for user in others
            if user.operation in makes - before and use not in ancestors(user.operation.outputs[:1])
        ]
        if not waiting or not users:
            return
        tied, result = self._tie(waiting[0].tensor, use.outputs[0])
        for user in waiting:
            user.fill(tied)
        for user in users:
            user.fill(result)

    def _tie(self, tensor: tf.Tensor, made: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        token, tied, made = tf.raw_ops.IdentityN(input=[self._token(), tensor, made])
        self.tokens.append(token)
        return tied, made


class _Turn:
    """Uses of a stored value between its gather and its end.

    Args:
        values: What is made of stored values.
        key: The key of this one.
        tie: What the gather waits for; None if for nothing.
        sent: The dtype in which it is gathered, if another than that in which it is stored. What is cast once it is
            gathered is cast before that, with the same bits.
    """

    def __init__(self, values: Values, key: Hashable, tie: Slot | None, sent: tf.DType | None):
        self._values = values
        self._key = key
        self._tie = tie
        self._sent = sent
        # By the operation of which they are copies.
        self._copies: dict[tf.Operation, list[tf.Tensor]] = {}

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same tensor, of what this turn gathers."""
        if self._values.key_of.get(tensor.ref()) != self._key:
            return tensor
        if self._values.is_read(tensor):
            tensor = self._values.first[self._key]
        operation = tensor.op
        if operation.type == "IdentityN":
            return self.of(operation.inputs[tensor.value_index])
        if operation not in self._copies:
            inputs = [self.of(each) for each in operation.inputs]
            if operation.type == replicas.GATHER:
                inputs = replicas.renewed(inputs)
            if self._values.is_read(tensor):
                self._copies[operation] = [self._begin(tensor)]
            elif self._sent is not None and self._is_narrowed_by(operation):
                self._copies[operation] = [_received(inputs[0], tensor.dtype)]
            else:
                is_cast = self._values.narrow_of[tensor.ref()] is not None
                dtype = None if self._sent is None or is_cast else _DTYPE_SENT
                self._copies[operation] = _private.copied(operation, inputs, dtype=dtype)
        return self._copies[operation][tensor.value_index]

    def _is_narrowed_by(self, operation: tf.Operation) -> bool:
        """Whether an operation is the first cast on the way: a later one may cast back."""
        return operation.type == "Cast" and self._values.narrow_of[operation.inputs[0].ref()] is None

    def _begin(self, stored: tf.Tensor) -> tf.Tensor:
        if self._tie is not None:
            stored, other = tf.raw_ops.IdentityN(input=[stored, self._tie.tensor])
            self._tie.fill(other)
        if self._sent is None:
            return stored
        narrow = tf.cast(stored, self._sent)
        return narrow if self._sent == _DTYPE_SENT else tf.bitcast(narrow, _DTYPE_SENT)


def _received(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What was sent as `_DTYPE_SENT`."""
    return tensor if dtype == _DTYPE_SENT else tf.bitcast(tensor, dtype)
