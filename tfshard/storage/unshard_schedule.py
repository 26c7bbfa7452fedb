"""The unshard schedule: gather a sharded value shortly before its use, free it, and gather it again for a later use.

DTensor starts every all-gather of a step at once, since nothing orders them, and a gathered value stays until its last
use in the backward pass. A step of stage 3 would hold all parameters unsharded. This pass therefore changes the graph
of a step once it is traced:

- It lists the uses of stored values in the order in which they were added to the graph, and gives each *unshard* a
  separate gather. A gathered value is kept from one use to a later one as long as all kept values fit into
  `kept_bytes`. The value that is needed last is freed first, which takes the fewest gathers (Belady 1966, "A study of
  replacement algorithms for a virtual-storage computer"). A gather may start some unshards ahead (`prefetch`). A value
  is not freed if it would be gathered again at once, and is larger than the values used meanwhile: otherwise a group
  would be in memory twice around each kernel that is stored alone.
- A barrier joins the stored value with the input that the operation of an earlier unshard waits for. The gather cannot
  start before that tensor exists, and DTensor cannot merge it with the gather of another unshard.
- In the same way an operation of the backward pass waits until an earlier gradient is scattered, and its variable is
  updated, if the update takes no other gradient. Otherwise the backward pass would run ahead of reductions and updates
  and hold all gradients unsharded.

A value that is cast to a smaller dtype after its gather, as under mixed precision, is cast before the gather instead.
Gathers in codes keep their cast behind the gather, because codes take fewer bytes than the smaller dtype.

The results of a step do not change: each copy of a gather has the same result.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfshard import _private
from tfshard.devices import replicas
from tfshard.layouts.config import ReshardPolicy
from tfshard.storage import barrier as barriers
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, ancestors, consumers, depends_on
from tfshard.storage.step_record import StepRecord

# Operations between the gather of a stored value and its use. Each unshard copies them.
ON_THE_WAY = frozenset({
    "Bitcast", "Cast", "EnsureShape", "ExpandDims", "GatherV2", "Identity", "Relayout", "Reshape", "Slice", "Squeeze",
    "StridedSlice", "Transpose", replicas.GATHER,
})  # fmt: skip

# Operations that make numbers of stored integers: Keras's `quantize` packs and scales kernels.
_OF_INTEGERS = frozenset(("BitwiseAnd", "BitwiseXor", "Mul", "Pack", "RealDiv", "RightShift", "Sub"))

# The compute dtypes of mixed precision.
_NARROW = (tf.bfloat16, tf.float16)

# The dtype in which their bits are sent. A gather reads no bits; DTensor would send bfloat16 as a float32 all-reduce.
_DTYPE_SENT = tf.float16

# Operations on the batch with results that are known when the step is traced.
SIZES = frozenset(("Rank", "Shape", "ShapeN", "Size"))

# A value with this share of all gathered bytes, such as a language model's table, is not unsharded while its gradient
# is.
_HEAVY = 1 / 8

# The operations with gradients that wait for an update. Convolutions do not (barrier.py, oneDNN).
_PRODUCTS = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"))

# Values that are smaller than `kept_bytes` by this factor do not count as unshards to wait for. The smallest values,
# such as biases, stay gathered if all of them together take that little.
_FAR_LESS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBuffer:
    """A stored variable or group.

    Attributes:
        key: The identity of the buffer.
        bytes: The bytes that a device holds of the gathered buffer.
        itemsize: Bytes of an element.
        is_gathered: True if the buffer is stored sharded, and gathered for each use.
        keeps: True if the buffer stays gathered from its first use to its last.
        is_coded: True if devices send the buffer in codes, and decode the codes behind the gather.
    """

    key: Hashable
    bytes: int
    itemsize: int = 4
    is_gathered: bool = True
    keeps: bool = False
    is_coded: bool = False

    def sent_as(self, dtype: tf.DType | None) -> "StoredBuffer":
        """Return the same buffer, gathered in another dtype."""
        if dtype is None:
            return self
        return dataclasses.replace(self, bytes=self.bytes // self.itemsize * dtype.size, itemsize=dtype.size)


def is_on_the_way(operation: tf.Operation) -> bool:
    """Return whether an operation between a read and its use belongs to the gather, and each unshard copies it."""
    return operation.type in ON_THE_WAY or _private.has_mark(operation, replicas.CODED)


def kept_bytes_of(stored: Iterable[StoredBuffer]) -> int:
    """Return how many gathered bytes a device keeps: as many as the largest takes, which the device needs anyway."""
    return max((each.bytes for each in stored), default=0)


@dataclasses.dataclass(kw_only=True)
class WaitingGradient:
    """A gradient that takes less memory once it is scattered or used by an update.

    Attributes:
        key: The key of its `StoredBuffer`.
        tensor: The gradient as it waits for the update.
        is_scattered: True if the gradient is sharded while it waits.
        updated: The new value that will be stored for its variable; None if the step does not update the variable.
    """

    key: Hashable
    tensor: tf.Tensor
    is_scattered: bool
    updated: tf.Tensor | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Use:
    """An operation that uses a gathered value.

    Attributes:
        operation: The operation.
        numbers: The numbers of its inputs that come from stored buffers, by the buffer's key.
        narrow: The dtype that each of these buffers was cast to on the way; None without a cast.
        batch_input: Another input that is computed from the batch, the last one that was added to the graph. None
            without such an input.
    """

    operation: tf.Operation
    numbers: dict[Hashable, list[int]]
    narrow: dict[Hashable, tf.DType | None]
    batch_input: OpInput | None


def schedule_unshards(record: StepRecord, barrier: Barrier) -> None:
    """Let gathers of a step wait for their unshard, and the backward pass for gradients."""
    if record.traced is None or record.reshard is None:
        return
    buffers = {
        read.storage: StoredBuffer(
            key=id(read.storage),
            bytes=read.storage.format.gathered_elements * read.tensor.dtype.size,
            itemsize=read.tensor.dtype.size,
            is_gathered=read.storage.format.is_gathered,
            keeps=record.reshard.keeps(read.storage.paths),
            is_coded=read.storage.format.codes is not None,
        )
        for read in record.reads
    }
    written = record.values | record.results
    last = {each.storage: each.tensor for each in record.gradients}  # Two tapes give a variable two gradients.
    gradients = {
        (each.storage, each.tensor.ref()): WaitingGradient(
            key=id(each.storage),
            tensor=each.tensor,
            is_scattered=each.is_scattered,
            updated=written.get(each.storage) if last[each.storage] is each.tensor else None,
        )
        for each in record.gradients
    }
    if not gradients and not any(each.is_gathered for each in buffers.values()):
        return
    operations = record.operations or record.traced.get_operations()
    operations = [each for each in operations if each not in record.unused] if record.unused else operations
    reads = [(buffers[read.storage], read.tensor) for read in record.reads]
    arrange(operations, reads, gradients.values(), record.reshard, barrier)
    for (storage, _), each in gradients.items():
        if each.updated is not None:
            for tensors in (record.values, record.results):
                if storage in tensors:
                    tensors[storage] = each.updated


def arrange(
    operations: Sequence[tf.Operation],
    reads: Sequence[tuple[StoredBuffer, tf.Tensor]],
    gradients: Iterable[WaitingGradient],
    reshard: ReshardPolicy,
    barrier: Barrier,
) -> None:
    """Change a traced graph: gathers wait for their unshard, and the backward pass waits for gradients.

    Args:
        operations: All operations of the graph, in the order in which they should run.
        reads: Reads of stored buffers. A buffer may have been read several times.
        gradients: Gradients that should be gone before the backward pass goes on. The function replaces `updated` by
            the tensor that the step must store instead.
        reshard: When to gather and when to free.
        barrier: Makes barriers.
    """
    reads = _encoded_once(reads)
    replicated = {each.key for each, _ in reads if not each.is_gathered}
    values = StoredValues(((each.key, tensor) for each, tensor in reads), replicated)
    with operations[0].graph.as_default(), tf.control_dependencies(None), _private.stop_recording():
        uses = list(values.uses(operations))
        coded = {each.key for each, _ in reads if each.is_coded}
        # A step casts the rows that it looks up in a coded table. The gathered table keeps its dtype.
        wide = coded.intersection(key for use in uses if use.operation.type == "GatherV2" for key in use.numbers)
        narrow = {key: dtype for key, dtype in sent_dtypes(uses).items() if key not in wide}
        stored = {each.key: each.sent_as(narrow.get(each.key)) for each, _ in reads}
        sent = {key: dtype for key, dtype in narrow.items() if key not in coded}
        kept_bytes = kept_bytes_of(stored.values())
        large = {key for key, each in stored.items() if each.bytes * _FAR_LESS > kept_bytes}
        gradients = list(gradients)
        made = ancestors(each.updated for each in gradients if each.updated is not None)
        updates = made - ancestors(each.tensor for each in gradients)
        ahead = max(reshard.prefetch - 1, 0)
        gates = _BackwardGates(operations, [each for each in gradients if each.key in large], barrier, ahead)
        gathered = [[key for key in use.numbers if stored[key].is_gathered] for use in uses]
        begins = unshards([[stored[key] for key in keys] for keys in gathered], kept_bytes, reshard.prefetch)
        current: dict[Hashable, _Unshard] = {}
        waits: list[OpInput] = []  # The batch inputs of earlier large unshards.
        waiting: set[Hashable] = set()  # Large unshards without a batch input so far.
        traced = [None if use.batch_input is None else use.batch_input.tensor for use in uses]
        for use, keys, beginning, tensor in zip(uses, gathered, begins, traced, strict=True):
            here = [] if use.batch_input is None else [use.batch_input]
            is_update = use.operation in updates  # An operation of an earlier unshard may wait for an update.
            for key in beginning:
                before = here if is_update else [*waits, *here][: max(len(waits) - reshard.prefetch, -1) + 1]
                current[key] = _Unshard(values, key, before[-1] if before else None, sent.get(key))
            if not is_update:
                waiting |= large.intersection(beginning)
            if here and not waiting.isdisjoint(use.numbers):
                waits += here
                waiting.clear()
            for key in keys:
                for number in use.numbers[key]:
                    each = OpInput(operation=use.operation, number=number)
                    value = current[key].rebuilt(each.tensor)
                    if value.dtype == each.tensor.dtype:
                        each.replace(value)
                    else:
                        _look_up(use.operation, value)
            if use.batch_input is not None and not large.isdisjoint(use.numbers) and not is_update:
                gates.hold_back(use.batch_input, tensor)
        last = {key: (use, tensor) for use, tensor in zip(uses, traced, strict=True) for key in use.numbers}
        all_bytes = sum(each.bytes for each in stored.values())
        for gradient in gradients:
            if gradient.key not in last or stored[gradient.key].bytes < _HEAVY * all_bytes:
                continue
            use, tensor = last[gradient.key]
            if tensor is not None and use.operation.type in _PRODUCTS:
                gates.delay_gradient(use.operation, tensor, gradient)
        _drop_unused_arguments(operations, values)


def _encoded_once(
    reads: Sequence[tuple[StoredBuffer, tf.Tensor]],
) -> list[tuple[StoredBuffer, tf.Tensor]]:
    """Return the reads, with the codes in place of each buffer that all reads gather in codes.

    A step then encodes such a buffer once, and keeps the codes, a quarter of the shards, for all of its unshards.
    """
    codes = [_codes_of(tensor) if each.is_coded else None for each, tensor in reads]
    exact = {each.key for (each, _), words in zip(reads, codes, strict=True) if words is None}
    return [
        (each, tensor if words is None or each.key in exact else words)
        for (each, tensor), words in zip(reads, codes, strict=True)
    ]


def _codes_of(stored: tf.Tensor) -> tf.Tensor | None:
    """Return the tensor of codes that a gather of a stored value sends; None if the gather sends the value itself."""
    waiting, seen = [stored], {stored.ref()}
    while waiting:
        for user in waiting.pop().consumers():
            if user.type == replicas.GATHER:
                return user.inputs[0] if _private.has_mark(user, replicas.CODED) else None
            if user.type == "Relayout" or _private.has_mark(user, replicas.CODED):
                outputs = [each for each in user.outputs if each.ref() not in seen]
                seen.update(each.ref() for each in outputs)
                waiting += outputs
    return None


def _drop_unused_arguments(operations: Iterable[tf.Operation], values: "StoredValues") -> None:
    """Take stored values out of custom gradients.

    TensorFlow passes the results and all arguments of a custom gradient through one IdentityN. Nothing uses the outputs
    for the arguments. Barriers, which have no gradient function, stay as they are.
    """
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


def unshards(uses: Sequence[Sequence[StoredBuffer]], kept_bytes: int, prefetch: int) -> list[list[Hashable]]:
    """Return the keys that have to be gathered for each use.

    Args:
        uses: The buffers that each operation uses, in order.
        kept_bytes: How many gathered bytes are kept.
        prefetch: How many unshards ahead a gather may start. A buffer that would be gathered again at once is kept if
            it is larger than the buffers used meanwhile.
    """
    later: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
    for number, use in enumerate(uses):
        for stored in use:
            later[stored.key].append(number)
    stays = _staying(uses, kept_bytes)
    kept: dict[Hashable, StoredBuffer] = {}
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
        # The buffer that is needed last is freed first.
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


def _staying(uses: Sequence[Sequence[StoredBuffer]], kept_bytes: int) -> set[Hashable]:
    """Return the keys of buffers that stay gathered: on request, or among the smallest that take little together."""
    sizes = {stored.key: stored.bytes for use in uses for stored in use}
    smallest = sorted(sizes, key=lambda key: sizes[key])
    together = itertools.accumulate(sizes[key] for key in smallest)
    small = {key for key, bytes_ in zip(smallest, together, strict=True) if bytes_ * _FAR_LESS <= kept_bytes}
    return small | {stored.key for use in uses for stored in use if stored.keeps}


class StoredValues:
    """The tensors that a graph computes from stored buffers alone, up to their uses.

    Args:
        reads: The key and the tensor of each read. Reads of one key have the same value.
        replicated: The keys of buffers that are not gathered.

    Attributes:
        first: The first read of each key.
        key_of: The key of each tensor, by reference.
        narrow_of: The dtype that each tensor was cast to on the way, by reference; None without a cast.
    """

    def __init__(self, reads: Iterable[tuple[Hashable, tf.Tensor]], replicated: Collection[Hashable] = ()):
        self._replicated = replicated
        self.first: dict[Hashable, tf.Tensor] = {}
        self.key_of: dict[Hashable, Hashable] = {}
        self.narrow_of: dict[Hashable, tf.DType | None] = {}
        for key, tensor in reads:
            self.first.setdefault(key, tensor)
            self._add(tensor, key, None)
        self._read = set(self.key_of)

    def is_read(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is a read itself."""
        return tensor.ref() in self._read

    def is_made_of_stored(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is a read, or computed from reads of one key alone."""
        return tensor.ref() in self.key_of

    def uses(self, operations: Sequence[tf.Operation]) -> Iterator[Use]:
        """Yield the uses of stored buffers among all operations of a graph, in the same order."""
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
            if operation.type == "IdentityN" and numbers:  # A custom gradient's: each output equals its input.
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
                    candidates = [
                        OpInput(operation=operation, number=number)
                        for number, each in enumerate(inputs)
                        if each.ref() in of_batch and each.dtype not in (tf.resource, tf.variant)
                    ]
                    if operation.type in SIZES:
                        # A shape waits for nothing. The gradient by a convolution's kernel may take the same tensor,
                        # and oneDNN joins that gradient with the bias's (barrier.py): then one of them cannot wait.
                        candidates = []
                    last = max(candidates, key=lambda each: number_of[each.tensor.op], default=None)
                    narrow = {key: self._narrowest(inputs[number] for number in of) for key, of in numbers.items()}
                    if operation.type == "GatherV2" and 0 in numbers.get(self.key_of.get(inputs[0].ref()), ()):
                        narrow[self.key_of[inputs[0].ref()]] = _narrow_of_lookup(operation)
                    yield Use(operation=operation, numbers=numbers, narrow=narrow, batch_input=last)

    def _made_of(self, operation: tf.Operation, keys: Collection[Hashable]) -> Hashable | None:
        """Return the key of the buffer that an operation without a batch input passes on; None if the operation uses
        the buffer, or several."""
        if is_on_the_way(operation):
            return next(iter(keys)) if len(keys) == 1 else None
        gathered = [key for key in keys if key not in self._replicated]
        if operation.type not in _OF_INTEGERS or len(gathered) != 1:
            return None
        return gathered[0] if self.first[gathered[0]].dtype.is_integer else None

    def _add(self, tensor: tf.Tensor, key: Hashable, narrow: tf.DType | None) -> None:
        self.key_of[tensor.ref()] = key
        self.narrow_of[tensor.ref()] = narrow

    def _narrowest(self, tensors: Iterable[tf.Tensor]) -> tf.DType | None:
        """Return the dtype that all of these tensors were cast to."""
        found = {self.narrow_of[each.ref()] for each in tensors}
        return next(iter(found)) if len(found) == 1 else None


def _narrow_of_cast(operation: tf.Operation) -> tf.DType | None:
    dtype = operation.outputs[0].dtype
    return dtype if dtype in _NARROW else None


def _narrow_of_lookup(operation: tf.Operation) -> tf.DType | None:
    """Return the dtype that every consumer casts the looked-up rows to; None without one."""
    users = operation.outputs[0].consumers()
    found = {_narrow_of_cast(user) if user.type == "Cast" else None for user in users}
    return next(iter(found)) if len(found) == 1 else None


def _look_up(operation: tf.Operation, table: tf.Tensor) -> None:
    """Look the rows up in a table that is cast already."""
    (looked_up,) = _private.copied(operation, [table, *operation.inputs[1:]], dtype=table.dtype)
    for cast in operation.outputs[0].consumers():
        rows = _received(looked_up, cast.outputs[0].dtype)
        for each in consumers(cast.outputs[0]):
            each.replace(rows)


def sent_dtypes(uses: Iterable[Use]) -> dict[Hashable, tf.DType]:
    """Return the smaller dtype of each key that all uses cast to the same smaller dtype."""
    found: dict[Hashable, set[tf.DType | None]] = collections.defaultdict(set)
    for use in uses:
        for key, narrow in use.narrow.items():
            found[key].add(narrow)
    return {key: narrow for key, (narrow, *others) in found.items() if narrow is not None and not others}


class _BackwardGates:
    """The places where the backward pass waits until earlier gradients are scattered and used.

    Args:
        operations: The operations of the graph, in order.
        gradients: The gradients to wait for.
        barrier: Makes barriers.
        ahead: How many of the latest gradients nothing waits for: they are reduced meanwhile.
    """

    def __init__(
        self, operations: Sequence[tf.Operation], gradients: Iterable[WaitingGradient], barrier: Barrier, ahead: int
    ):
        self._ahead = ahead
        self._number_of = {operation: number for number, operation in enumerate(operations)}
        self._waiting = collections.deque(sorted(gradients, key=lambda each: self._number_of[each.tensor.op]))
        self._made: collections.deque[WaitingGradient] = collections.deque()
        self._users: dict[Hashable, list[OpInput]] = collections.defaultdict(list)
        for operation in operations:
            for number, each in enumerate(operation.inputs):
                self._users[each.ref()].append(OpInput(operation=operation, number=number))
        self._barrier = barrier

    def hold_back(self, batch_input: OpInput, tensor: tf.Tensor) -> None:
        """Let an operation, and later operations on the same tensor, wait for an earlier gradient.

        Args:
            batch_input: An input of the operation.
            tensor: The tensor of this input when the graph was traced.
        """
        here = self._number_of[batch_input.operation]
        while self._waiting and self._number_of[self._waiting[0].tensor.op] < here:
            self._made.append(self._waiting.popleft())
        while len(self._made) > self._ahead + 1:
            self._made.popleft()
        if len(self._made) <= self._ahead:
            return
        made = self._made[0]
        held = [batch_input, *(user for user in self._users[tensor.ref()] if self._number_of[user.operation] > here)]
        # The gradient or update must not depend on an operation that waits for it.
        waiting = {user.operation for user in held}
        if made.updated is not None and not depends_on(
            made.updated, waiting, lambda operation: self._number_of.get(operation, here + 1) > here
        ):
            _, made.updated = self._barrier.hold((batch_input.tensor, held), (made.updated, ()))
            self._made.popleft()
        else:
            users = self._users[made.tensor.ref()]
            if not made.is_scattered or not users or any(self._number_of[user.operation] <= here for user in users):
                return
            self._barrier.hold((batch_input.tensor, held), (made.tensor, users))

    def delay_gradient(self, use: tf.Operation, tensor: tf.Tensor, gradient: WaitingGradient) -> None:
        """Let the operations that compute a gradient wait until the last use of its unsharded value has ended.

        Args:
            use: The last operation that uses the unsharded value.
            tensor: The tensor that both take, as it was when the graph was traced.
            gradient: The gradient.
        """
        users = [user for output in use.outputs[:1] for user in self._users[output.ref()]]
        others = (user for user in self._users[tensor.ref()] if user.operation is not use)
        makes, before = ancestors([gradient.tensor]), ancestors(use.outputs)
        waiting = [
            user
            for user in others
            if user.operation in makes - before and use not in ancestors(user.operation.outputs[:1])
        ]
        if waiting and users:
            self._barrier.hold((waiting[0].tensor, waiting), (use.outputs[0], users))


class _Unshard:
    """A gather of a stored buffer, and the uses until the gathered value is freed.

    Args:
        values: The tensors computed from stored buffers.
        key: The key of the buffer.
        after: The input that the gather waits for; None if it waits for nothing.
        sent: The dtype of the gather, if it differs from the stored dtype. A cast behind the gather then comes before
            it, with the same bits.
    """

    def __init__(self, values: StoredValues, key: Hashable, after: OpInput | None, sent: tf.DType | None):
        self._values = values
        self._key = key
        self._after = after
        self._sent = sent
        # The copies of operations on the way, by the original.
        self._copies: dict[tf.Operation, list[tf.Tensor]] = {}

    def rebuilt(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the same tensor, computed from the value that this unshard gathers."""
        if self._values.key_of.get(tensor.ref()) != self._key:
            return tensor
        if self._values.is_read(tensor):
            tensor = self._values.first[self._key]
        operation = tensor.op
        if operation.type == "IdentityN":
            return self.rebuilt(operation.inputs[tensor.value_index])
        if operation not in self._copies:
            inputs = [self.rebuilt(each) for each in operation.inputs]
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
        """Return whether an operation is the first cast on the way: a later cast may cast back."""
        return operation.type == "Cast" and self._values.narrow_of[operation.inputs[0].ref()] is None

    def _begin(self, stored: tf.Tensor) -> tf.Tensor:
        if self._after is not None:
            stored, _ = barriers.hold(stored, (self._after.tensor, [self._after]))
        if self._sent is None:
            return stored
        narrow = tf.cast(stored, self._sent)
        return narrow if self._sent == _DTYPE_SENT else tf.bitcast(narrow, _DTYPE_SENT)


def _received(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Bitcast a tensor that was sent as `_DTYPE_SENT` back to its dtype."""
    return tensor if dtype == _DTYPE_SENT else tf.bitcast(tensor, dtype)
