"""What is in memory while the operations of a graph run one after the other: the liveness of its tensors."""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from tfshard import _private
from tfshard.layouts.variable_layout import ALIGNMENT_BYTES
from tfshard.planning import joining, loop_memory, step_flops
from tfshard.planning.training_graph import CUTS, VIEWS, WITHOUT_WORK, Cost, Kind, TrainingGraph

# Kernels that write their result where an input was that nobody else needs (forward_input_or_allocate_output).
_IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Ceil Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor Inv InvGrad LeakyRelu "
    "LeakyReluGrad Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg Pow RealDiv "
    "Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad ScatterNdNonAliasingAdd Select "
    "SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax Softplus SoftplusGrad Softsign SoftsignGrad Sqrt "
    "SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad Xdivy Xlogy".split()
)
# Of several results, the one that is written where an input was.
_IN_PLACE_OUTPUT = {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}
# What takes a transposed matrix as it is (Grappler's FoldTransposeIntoMatMul).
_PRODUCTS = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """What the operations of a graph had made and not freed at the peak.

    Attributes:
        bytes: All of it.
        made: Bytes, by what they are, the most first; of what is no gradient, and was made of none, the name of the
            operation that made it.
        operation: The name of what ran.
    """

    bytes: int
    made: dict[Kind | str, int]
    operation: str


def peak_of(graph: TrainingGraph, *, at_once: bool = False, least: int = 0) -> Moment:
    """Runs the operations of a step one after the other, on one device, and notes when most is in memory.

    Operations run in the order in which one thread of TensorFlow's executor takes them (`_Ready`). A collective has
    memory for its result as soon as it can start. What gradients are joined in is there with the first of them; they
    are written there one after the other, each as soon as those before it are (`joining`). A tensor is freed after its
    last use, as the executor does. What rests, and the batch, is not counted.

    Args:
        graph: The step.
        at_once: As on a busy machine: whether reductions that do not wait for each other have their buffers at the
            same time, and what an update replaces is still there when the last of its values are made.
        least: Bytes below which a tensor does not count, as a trace leaves out what is smaller.
    """
    return _Run(graph, at_once, least).run()


def is_aligned(cut: tf.Operation) -> bool:
    """Whether a cut copies nothing: it takes rows of the first dim that begin and end at a multiple of
    `ALIGNMENT_BYTES` (IsDim0SliceAligned of TensorFlow's slice_op.cc and strided_slice_op.cc)."""
    given, result = cut.inputs[0], cut.outputs[0]
    begin = tf.get_static_value(cut.inputs[1])
    if begin is None or not (given.shape.is_fully_defined() and result.shape.is_fully_defined() and given.shape.rank):
        return False
    row = given.shape[1:]
    skips = cut.type == "StridedSlice" and tf.get_static_value(cut.inputs[3])[0] != 1
    if skips or row not in (result.shape, result.shape[1:]):
        return False
    edges = [int(begin[0]) % given.shape[0], result.shape.num_elements()]
    if row.rank:
        edges = [row.num_elements()]
    return all(each * given.dtype.size % ALIGNMENT_BYTES == 0 for each in edges)


class _Buffer:
    """Memory that one or more tensors are in.

    Attributes:
        bytes: How much; 0 for what is not counted.
        what: What made it.
        uses: How many inputs of operations are still to take a tensor in it.
        is_own: Whether the step made it, so that it may be written again.
    """

    __slots__ = ("bytes", "is_own", "uses", "what")

    def __init__(self, bytes_: int, what: Kind | str, is_own: bool = True):
        self.bytes, self.what, self.is_own, self.uses = bytes_, what, is_own, 0


class _Ready:
    """What can run, in the order of a thread of TensorFlow's executor (`ExecutorState::ScheduleReady`).

    Of what an operation makes ready the thread goes on with what takes next to no time, then with the last of the
    others; the rest waits, what comes last in front. At the end of such a chain collectives end as well, one after the
    other: here they take turns with what waits. What they make ready another thread adds, behind all others.
    """

    def __init__(self) -> None:
        self.sent: collections.deque[tf.Operation] = collections.deque()
        self._chain: collections.deque[tf.Operation] = collections.deque()
        self._waiting: collections.deque[tf.Operation] = collections.deque()
        self._is_sent_next = False

    def __bool__(self) -> bool:
        return bool(self._chain or self._waiting or self.sent)

    def add(self, found: Iterable[tuple[tf.Operation, bool]]) -> None:
        """Adds what an operation made ready, each with whether it takes next to no time."""
        others: list[tf.Operation] = []
        for operation, is_quick in found:
            (self._chain if is_quick else others).append(operation)
        if others and not self._chain:
            self._chain.append(others.pop())
        self._waiting.extendleft(others)

    def add_behind(self, found: Iterable[tf.Operation]) -> None:
        """Adds what a collective made ready."""
        self._waiting.extend(found)

    def pop(self) -> tf.Operation:
        """What runs, or ends, next."""
        if self._chain:
            return self._chain.popleft()
        if self.sent and (self._is_sent_next or not self._waiting):
            self._is_sent_next = False
            return self.sent.popleft()
        self._is_sent_next = True
        return self._waiting.popleft()


class _Run:
    def __init__(self, graph: TrainingGraph, at_once: bool, least: int):
        self._graph = graph
        self._at_once = at_once
        self._least = least
        self._inputs = graph.needed
        self._gradients = self._made_for_updates()
        self._users: dict[Hashable, int] = collections.Counter(
            each.ref() for inputs in self._inputs.values() for each in inputs
        )
        self._buffers: dict[Hashable, _Buffer] = {}
        self._live: dict[_Buffer, None] = {}
        # Of what gradients are joined in, those that are not there yet, in the order in which they are written.
        self._joining = {
            operation: collections.deque(self._in_order(self._inputs[operation]))
            for operation, cost in graph.costs.items()
            if cost.kind is Kind.JOINED and operation in self._inputs
        }
        self._bytes = 0
        self._peak = Moment(bytes=0, made={}, operation="")

    def _made_for_updates(self) -> set[Hashable]:
        """References to gradients as they come out of the backward pass."""
        left = [
            each for operation in self._inputs if operation in self._graph.costs for each in self._inputs[operation]
        ]
        found: set[Hashable] = set()
        while left:
            tensor = left.pop()
            if tensor.ref() not in found and tensor.op not in self._graph.costs and tensor.op.type != "Placeholder":
                found.add(tensor.ref())
                if tensor.op.type == "IdentityN":
                    left.append(tensor.op.inputs[tensor.value_index])
                elif self._is_view(tensor.op):
                    left.append(tensor.op.inputs[0])
        return found

    def run(self) -> Moment:
        waits = {operation: len({each.op for each in inputs}) for operation, inputs in self._inputs.items()}
        users: dict[tf.Operation, list[tf.Operation]] = collections.defaultdict(list)
        for operation in self._graph.operations:
            for maker in {each.op for each in self._inputs.get(operation, ())}:
                users[maker].append(operation)
        ready = _Ready()

        def start(found: Iterable[tf.Operation], is_sent: bool = False) -> None:
            others: list[tf.Operation] = []
            for operation in found:
                cost = self._graph.costs.get(operation)
                if self._is_sent(operation):
                    ready.sent.append(operation)
                    if cost is not None:
                        self._begin(operation, cost)
                else:
                    others.append(operation)
            if is_sent:
                ready.add_behind(others)
            else:
                ready.add((each, each not in self._graph.costs and self._is_quick(each)) for each in others)

        for operation in self._graph.operations:
            if operation in waits and not waits[operation]:
                start([operation])
        while ready:
            operation = ready.pop()
            self._execute(operation)
            found = []
            for user in users[operation]:
                cost = self._graph.costs.get(user)
                if cost is not None and cost.kind is Kind.JOINED:
                    self._join(user, cost)
                waits[user] -= 1
                if not waits[user]:
                    found.append(user)
            start(found, is_sent=self._is_sent(operation))
        return self._peak

    def _is_sent(self, operation: tf.Operation) -> bool:
        """Whether the devices wait for each other in it."""
        cost = self._graph.costs.get(operation)
        return operation in self._graph.summed_over_devices if cost is None else cost.is_collective

    def _begin(self, operation: tf.Operation, cost: Cost) -> None:
        """Gives it memory for its result, if it has a result of its own and none yet."""
        if cost.output is not None and operation.outputs[0].ref() not in self._buffers:
            self._hold(operation.outputs[0], self._allocated(cost.output, cost.kind))
            self._note(operation)
        if self._begins_early(cost):
            self._bytes += cost.temporary
            self._note(operation)

    def _begins_early(self, cost: Cost) -> bool:
        return self._at_once and cost.kind is Kind.REDUCTION

    def _execute(self, operation: tf.Operation) -> None:
        inputs = self._inputs[operation]
        cost = self._graph.costs.get(operation)
        made = []
        if operation.type == "Placeholder":
            made = [_Buffer(0, "placeholder", is_own=False)]
        elif cost is not None:
            if operation.outputs[0].ref() not in self._buffers:
                taken = self._buffers[inputs[0].ref()] if cost.output is None else None
                self._hold(operation.outputs[0], taken or self._allocated(cost.output or 0, cost.kind))
            if self._begins_early(cost):
                self._bytes -= cost.temporary
            self._note(operation, cost.temporary - self._written_over(operation, cost), cost.kind)
        elif operation.type == "IdentityN":
            made = []
            for number, output in enumerate(operation.outputs):
                if output.ref() in self._users:
                    given = self._buffers.get(operation.inputs[number].ref())
                    self._hold(output, given or _Buffer(0, operation.name, is_own=False))  # Else of what is known.
        elif operation.inputs and operation.inputs[0].ref() in self._buffers and self._is_view(operation):
            made = [self._buffers[operation.inputs[0].ref()]]
        elif operation.type in step_flops.LOOPS:
            made = self._results_of_loop(operation, inputs)
            self._note(operation, self._in_a_turn(operation), operation.name)
        else:
            made = [self._result(operation, output, inputs) for output in operation.outputs]
            self._note(operation, self._expanded(operation), operation.name)
        for output, buffer in zip(operation.outputs, made, strict=False):
            self._hold(output, buffer)
        for each in () if operation in self._joining else inputs:
            self._use(each)
        for output in operation.outputs:
            if output.ref() in self._buffers:
                self._free_if_unused(self._buffers[output.ref()])

    def _in_order(self, joined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The loss, and gradients in the order in which they are joined."""
        loss, *gradients = joined
        first, *others = joining.in_order(gradients, self._graph.operations, in_loop=self._graph.is_part)
        return [first, loss, *others] if self._graph.is_part else [loss, first, *others]

    def _join(self, operation: tf.Operation, cost: Cost) -> None:
        """Writes gradients to where they are joined, up to the first that is not there yet. A loss that is the first of
        all is there with any gradient, wherever it runs on paper."""
        waiting = self._joining[operation]
        if not self._graph.is_part or (waiting and waiting[0].ref() in self._buffers):
            self._begin(operation, cost)
        while waiting and waiting[0].ref() in self._buffers:
            self._use(waiting.popleft())

    def _use(self, tensor: tf.Tensor) -> None:
        """An operation has taken it."""
        buffer = self._buffers[tensor.ref()]
        buffer.uses -= 1
        self._free_if_unused(buffer)

    def _written_over(self, operation: tf.Operation, cost: Cost) -> int:
        """Bytes of a gradient that nobody else needs: an update writes new values there, as of a slot."""
        if cost.kind is not Kind.UPDATE or self._at_once:
            return 0
        gradient = self._buffers[self._inputs[operation][0].ref()]
        return gradient.bytes if gradient.is_own and gradient.uses == 1 and gradient.bytes == cost.output else 0

    def _hold(self, tensor: tf.Tensor, buffer: _Buffer) -> None:
        self._buffers[tensor.ref()] = buffer
        buffer.uses += self._users.get(tensor.ref(), 0)

    def _expanded(self, operation: tf.Operation) -> int:
        """What DTensor's expansion of an operation has besides: softmax cross entropy of sharded classes is computed
        step by step, with the labels as a matrix."""
        if operation.type not in _IN_PLACE_OUTPUT or self._graph.shares(operation.inputs[0]) == 1:
            return 0
        return 2 * self._size(operation.inputs[0])

    def _results_of_loop(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[_Buffer]:
        made: list[_Buffer] = []
        for output, result in zip(operation.outputs, loop_memory.results_of(operation, least=self._least), strict=True):
            if result.same is not None:
                made.append(made[result.same])
            elif result.given is not None:
                given = self._buffers.get(operation.inputs[result.given].ref())
                made.append(given or _Buffer(0, operation.name, is_own=False))  # Else of what is known.
            elif result.bytes is not None:
                made.append(self._allocated(result.bytes, operation.name))
            else:
                made.append(self._result(operation, output, inputs))
        return made

    def _in_a_turn(self, operation: tf.Operation) -> int:
        """What a turn of a loop has at most that it neither was given nor gives on."""
        body = _private.function_graph(operation, "body")
        if body is None:  # Of TensorFlow 1.
            return 0
        share = self._graph.shares(operation.outputs[0])
        turn = dataclasses.replace(
            self._graph, operations=tuple(body.get_operations()), results=tuple(body.outputs), costs={},
            stored=frozenset(), shards=frozenset(), devices=1, shares=lambda tensor: share,
        )  # fmt: skip
        return peak_of(turn, least=self._least).bytes

    def _result(self, operation: tf.Operation, output: tf.Tensor, inputs: Iterable[tf.Tensor]) -> _Buffer:
        if operation.type in loop_memory.TAKEN:
            return _Buffer(0, operation.name, is_own=False)
        if operation.type == "TensorListFromTensor":
            return self._allocated(self._in_elements(operation.inputs[0]), operation.name)
        bytes_ = self._size(output) // (self._graph.devices if operation in self._graph.shards else 1)
        what: Kind | str = Kind.GRADIENT if output.ref() in self._gradients else operation.name
        if operation.type in _IN_PLACE or _IN_PLACE_OUTPUT.get(operation.type) == output.value_index:
            own = collections.Counter(self._buffers[each.ref()] for each in inputs)
            for buffer, uses in own.items():
                if buffer.is_own and buffer.uses == uses and buffer.bytes == bytes_ >= self._least:
                    buffer.what = what
                    return buffer
        return self._allocated(bytes_, what)

    def _in_elements(self, tensor: tf.Tensor) -> int:
        """Bytes of a tensor as a list of what its first dim has."""
        size = self._size(tensor)
        return size if size >= self._least * (tensor.shape[0] or 1) else 0

    def _is_quick(self, operation: tf.Operation) -> bool:
        return operation.type in WITHOUT_WORK or self._is_view(operation)

    def _is_view(self, operation: tf.Operation) -> bool:
        """Whether it gives its first input, or a part of it, and copies nothing."""
        if operation.type in CUTS:
            return is_aligned(operation)
        if operation.type != "Transpose":
            return operation.type in VIEWS
        order = tf.get_static_value(operation.inputs[1])
        if order is None or len(order) < 2:
            return False
        swapped = [*range(len(order) - 2), len(order) - 1, len(order) - 2]
        users = [user for user in operation.outputs[0].consumers() if user in self._inputs]
        return list(order) == swapped and all(user.type in _PRODUCTS for user in users)

    def _size(self, tensor: tf.Tensor) -> int:
        count = tensor.shape.num_elements()
        if count is None or tensor.dtype in (tf.resource, tf.variant):
            return 0
        return int(count * tensor.dtype.size) // self._graph.shares(tensor)

    def _allocated(self, bytes_: int, what: Kind | str) -> _Buffer:
        bytes_ = bytes_ if bytes_ >= self._least else 0
        buffer = _Buffer(bytes_, what)
        self._live[buffer] = None
        self._bytes += bytes_
        return buffer

    def _free_if_unused(self, buffer: _Buffer) -> None:
        if not buffer.uses and buffer in self._live:
            del self._live[buffer]
            self._bytes -= buffer.bytes

    def _note(self, operation: tf.Operation, temporary: int = 0, what: Kind | str = "") -> None:
        if self._bytes + temporary > self._peak.bytes:
            made: dict[Kind | str, int] = collections.Counter()
            for buffer in self._live:
                made[buffer.what] += buffer.bytes
            if temporary:
                made[what] += temporary
            self._peak = Moment(
                bytes=self._bytes + temporary,
                made=dict(sorted(made.items(), key=lambda each: -each[1])),
                operation=operation.name,
            )
