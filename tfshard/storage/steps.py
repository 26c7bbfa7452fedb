"""Step: records the reads and writes of a step function, and runs the passes that end the step (passes.py).

The context of a thread holds its open step and its open update. `step_scope` and `update_scope` open them.

# Note: why writes are deferred

DTensor's all-reduce combiner ends in a topological sort by operands only. A resource read has no operand, so it can
move ahead of the write it should follow. Adam, RMSprop and Adagrad, which write a slot and read it again, then train
silently wrong (tests/storage/test_stale_read.py reproduces it). Turning the combiner off avoids this, and costs a
collective for each gradient. Instead, a step is a pure function of its reads:

- inside a step a write only records the new value, and a later read sees the recorded value;
- at the end of the step each written storage is assigned once, in its storage layout.

Branches of a `tf.cond` return their writes, and microbatches pass their writes on, so that the step records them.
A write in a `tf.function` that the step calls cannot be recorded: its value belongs to the function. The function
assigns the storage, as its last operation on it, and using the variable after the call in the same step is an
error rather than a stale read. A write in the body of any other `tf.while_loop` is an error.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar, Protocol, TypeAlias

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import compilations, host_meshes
from tfshard.errors import StrategyError
from tfshard.layouts.config import ReshardPolicy
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import barrier as barriers
from tfshard.storage import passes, slot_reads, traced_steps
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import graphs_out_to
from tfshard.storage.microbatch import BatchShapes
from tfshard.storage.recomputing import BlockRecorder
from tfshard.storage.step_record import (
    Block,
    JointUpdate,
    PartialUpdate,
    PendingGradient,
    SlicedRead,
    StepRecord,
    StoredRead,
)
from tfshard.storage.write_log import WriteLog
from tfshard.storage.writes import Writable

# Gathered values by the identity of their source. Each entry holds its source, so that the id in the key stays valid.
Gathered: TypeAlias = dict[Hashable, tuple[tf.Tensor, tf.Tensor | None]]

# Reduces a local gradient of a variable over the devices. Returns None if DTensor should reduce it.
ReduceGradient: TypeAlias = Callable[[tf.Tensor, Any], tf.Tensor | None]


class OnMesh(Protocol):
    """A variable, as far as a step knows where it is."""

    path: str
    mesh: dtensor.Mesh


class LocalVariables(Protocol):
    """The variables of a block that is traced with the local shapes of a device."""

    def read(self, variable: Any) -> tf.Tensor:
        """Return the value of a variable in the graph of the block."""

    def write(self, variable: Any, value: tf.Tensor) -> None:
        """Record a new value in the graph of the block."""

    def reshard(self, tensor: tf.Tensor, dim: int | None) -> tf.Tensor:
        """Return a tensor that the model axis shards along `dim` from here on. None: on each device in full."""


class ReadLog:
    """The reads of one step: gathered values, and the last read of each trained variable.

    Args:
        graph: The graph of the step; None in eager code.
    """

    def __init__(self, graph: tf.Graph | None):
        self._graph = graph
        self._gathered: dict[tf.Graph | None, Gathered] = {}
        # The variable of each read, so that its id stays valid, and the tensor or handle.
        self._last: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self._sources: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self._rounded: dict[Hashable, tf.Variable] = {}

    def gathered(self, graph: tf.Graph | None) -> Gathered:
        """Return the values that the step has gathered in a graph, or in eager code (None)."""
        return self._gathered.setdefault(graph, {})

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the trained variables that the step has read."""
        return {tuple(variable.shape) for variable, _ in self._last.values()}

    def note(self, variable: tf.Variable, read: tf.Tensor) -> None:
        """Record the tensor or handle that a gradient by a trained variable is taken with respect to."""
        self._last[id(variable)] = variable, read

    def last(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return the last recorded tensor or handle of a variable, unless another branch read it."""
        _, read = self._last.get(id(variable), (None, None))
        graph = getattr(read, "graph", None)  # The handle of a buffer, and eager tensors, have none.
        return read if graph is None or graph in graphs_out_to(self._graph) else None

    def note_rounded(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Record a value of a variable that was gathered in codes."""
        self._rounded[value.ref()] = variable

    def rounded(self, value: tf.Tensor) -> tf.Variable | None:
        """Return the variable that `note_rounded` has recorded with a value."""
        return self._rounded.get(value.ref())

    def set_source(self, variable: tf.Variable, source: tf.Tensor) -> None:
        """Set the tensor that tapes differentiate by in all reads of a variable from here on."""
        self._sources[id(variable)] = variable, source

    def source(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return the tensor that `set_source` has set."""
        return self._sources.get(id(variable), (None, None))[1]


class Step:
    """The trace of a step function, or an eager run of it.

    The step collects data in its record, and looks up earlier reads and writes. `finish` runs the passes.

    Args:
        graph: The graph of the step; None in eager code.
        reshard: When to gather and free sharded values; None leaves both to DTensor.
        reduce_gradient: Reduces local gradients of variables; None leaves reductions to DTensor.
        only_mesh: The mesh of all variables that the step may use; None allows any mesh.
        rounds_gathers: True if the step gathers variables in codes, where their layouts say so.

    Attributes:
        record: The data for the passes.
        reduce_gradient: As in the arguments.
        rounds_gathers: As in the arguments.
        batch: The shapes of the step's batch, and its microbatch.
        blocks: Records blocks of the forward pass.
        heads: The last projections of models, by their logits (`operations.projection_heads`).
        reads: The reads.
        writes: The writes.
    """

    is_microbatch: ClassVar[bool] = False
    # Turns a gradient into its local gradient, if the reduction waits for later microbatches.
    local_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None

    def __init__(
        self,
        graph: tf.Graph | None,
        reshard: ReshardPolicy | None = None,
        reduce_gradient: ReduceGradient | None = None,
        only_mesh: dtensor.Mesh | None = None,
        rounds_gathers: bool = False,
    ):
        self.record = StepRecord(graph=graph, reshard=reshard, only_mesh=only_mesh)
        self.reduce_gradient = reduce_gradient
        self.rounds_gathers = rounds_gathers
        self.batch = BatchShapes()
        self.blocks = BlockRecorder(graph, self.record.blocks)
        self.heads: dict[Hashable, Any] = {}
        self.reads = ReadLog(graph)
        self.writes = WriteLog(graph, follows_steps=not self.is_microbatch)

    @property
    def graph(self) -> tf.Graph | None:
        """The graph of the step; None in eager code. Branches and called functions have other graphs."""
        return self.record.graph

    def check_mesh(self, variable: OnMesh) -> None:
        """Raise `StrategyError` if a variable is on another mesh than the step."""
        mesh = self.record.only_mesh
        if mesh is not None and variable.mesh is not mesh and variable.mesh != mesh:
            raise StrategyError(
                f"A step uses variable '{variable.path}', which is on the mesh of another strategy. Run the step by "
                "that strategy, or compile the variable's model with the strategy of the step: "
                f"model.compile(..., strategy=strategy). The variable's mesh: {variable.mesh}. "
                f"Received: a step on mesh {mesh}"
            )

    def check_read(self, variable: tf.Variable) -> None:
        """Allow the read. `MicrobatchStep` raises if the variable is updated after the last microbatch."""

    def note_stored_read(self, storage: Writable, stored: tf.Tensor) -> tf.Tensor:
        """Record a read of a stored value, and return it."""
        if self.graph is not None and getattr(stored, "graph", None) is self.graph:
            self.record.reads.append(StoredRead(storage=storage, tensor=stored))
        return stored

    def note_gradient(self, storage: Writable, is_scattered: bool, gradient: tf.Tensor) -> None:
        """Record a gradient of a storage that is updated in shards."""
        if self.graph is not None and gradient.graph is self.graph:
            self.record.gradients.append(PendingGradient(storage=storage, tensor=gradient, is_scattered=is_scattered))

    def note_update(self, update: JointUpdate) -> None:
        """Record an update in the graph of the step with a gradient that is reduced together with others."""
        self.record.updates.append(update)

    def note_slice(self, stored: tf.Tensor, gradient: tf.Tensor | None) -> bool:
        """Record a full read that the current update will slice.

        Args:
            stored: The read.
            gradient: The gradient of the update, or None.

        Returns:
            False in eager code and inside branches, where nothing is recorded.
        """
        if self.graph is None or gradient is None or not gradient.graph is stored.graph is self.graph:
            return False
        self.record.sliced_reads.append(SlicedRead(stored=stored, gradient=gradient))
        return True

    def wait_on_host(
        self, stored: tf.Tensor, gradient: tf.Tensor | None, axes: Axes, mesh: dtensor.Mesh, host: dtensor.Mesh
    ) -> tf.Tensor:
        """Return a read on a host mesh that waits for the gradient of the current update.

        The devices send the host one number of each shard of the gradient for this. Otherwise the devices would hold
        every offloaded value from the beginning of the step. In a branch of a `tf.cond` they still do, because the
        gradient is unknown outside of the branch.

        Args:
            stored: The read.
            gradient: The gradient of the update, or None.
            axes: The layout of the gradient.
            mesh: The mesh of the step.
            host: Its host mesh.
        """
        if self.graph is None or gradient is None or gradient.graph is not self.graph:
            return stored
        used = tuple(axis for axis in axes if axis is not None)
        key, gathered = ("sent to the host", gradient.ref()), self.reads.gathered(self.graph)
        if key not in gathered:
            numbers = host_meshes.first_numbers(gradient, axes, mesh)
            gathered[key] = (host_meshes.copied(numbers, used, mesh, host), None)
        waiting, token = barriers.tie(stored, gathered[key][0])
        self.record.host_tokens[host, used].append(token)
        return waiting

    def tie(self, mesh: dtensor.Mesh, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return tied tensors of the step's graph (`Barrier.tie`). The caller must use every output."""
        return Barrier.on(mesh, self.record.tokens).tie(*tensors)

    def return_sums(self, sums: dict[Writable, tf.Tensor]) -> None:
        """Make the step return sums of gradients instead of updating variables.

        The backward pass waits for the sums as it does for updates. When the step has ended, the dict holds the tensors
        to return. The caller must also use `record.token`, except in a microbatch.

        Args:
            sums: The sums by storage.
        """
        self.record.results = sums

    def tensors_of(self, storage: Writable) -> list[tf.Tensor]:
        """Return the reads and the last write of a storage in the graph of the step."""
        recorded = self.writes.find_in_step(storage)
        new = [] if recorded is None else [recorded.base, *recorded.written.values()]
        return [
            *(read.tensor for read in self.record.reads if read.storage is storage),
            *(each for each in new if each is not None),
        ]

    def finish(self) -> dict[Writable, tf.Tensor]:
        """Write each storage once. Last in the step: a later read would be stale.

        Returns:
            The new stored values.
        """
        record = self.record
        record.writes = self.writes.take()
        record.values = {storage: storage.as_stored(each) for storage, each in record.writes.items()}
        record.updated = {storage: slot_reads.new_value(storage, each) for storage, each in record.writes.items()}
        for state in record.kinds.values():
            state.check()
        passes.run(passes.PASSES, record)
        return record.values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenUpdate:
    """An optimizer's update that is running.

    Attributes:
        packed: The storage that is updated as one tensor. Its members and the members of its slots stand for the
            buffer.
        gradient: The gradient, on the mesh of the step. Reads on the host wait for it.
        axes: The layout of the gradient.
        part: The part of a variable that is updated. The variable and its slots stand for the part.
    """

    packed: Writable | None = None
    gradient: tf.Tensor | None = None
    axes: Axes = ()
    part: PartialUpdate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepContext:
    """The state that reads and writes of variables depend on, in addition to the graph that is being built.

    Attributes:
        step: The open step; None outside of steps.
        update: The open update; None outside of updates.
        blocks: Records blocks of a graph that belongs to no step: the graph of a plan.
        local: The variables of a block that is traced with the local shapes of a device; None outside of such blocks.
        skips_frozen: True if a step takes no gradient of a weight that Keras does not train.
        reads_exactly: True if reads gather variables exactly, also variables that the step otherwise gathers in codes.
    """

    step: Step | None = None
    update: OpenUpdate | None = None
    blocks: BlockRecorder | None = None
    local: LocalVariables | None = None
    skips_frozen: bool = False
    reads_exactly: bool = False


class _Thread(threading.local):
    context = StepContext()


_thread = _Thread()


def context() -> StepContext:
    """Return the context of this thread."""
    return _thread.context


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Change attributes of the context of this thread, as long as the returned context is open."""
    before = _thread.context
    _thread.context = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        _thread.context = before


def current() -> Step | None:
    """Return the open step."""
    return context().step


def open_update() -> OpenUpdate | None:
    """Return the open update."""
    return context().update


def block_recorder() -> BlockRecorder | None:
    """Return the recorder of blocks of the open step, or of `recorded_blocks`."""
    step = current()
    return context().blocks if step is None else step.blocks


def is_local_trace() -> bool:
    """Return whether a block is being traced with the local shapes of a device."""
    return context().local is not None


def here() -> tf.Graph | None:
    """Return the graph that is being built; None in eager code."""
    return None if _private.is_eager() else tf.compat.v1.get_default_graph()


def rounds_gathers() -> bool:
    """Return whether reads gather variables in codes, where their layouts say so.

    The forward and backward pass of a traced step gather in codes. Eager steps read exactly. Optimizers also read
    exactly, in updates and outside of them (weight decay of Muon), because they write the variables that they read.
    """
    step, here_ = current(), context()
    if step is None or step.graph is None or not step.rounds_gathers or here_.reads_exactly:
        return False
    return here_.update is None and not _private.is_in_optimizer()


def exact_reads() -> contextlib.AbstractContextManager[None]:
    """Return a context in which reads gather variables exactly."""
    return changed(reads_exactly=True)


def is_outside() -> bool:
    """Return whether this is eager code outside of steps and updates: variables are read and set on the host."""
    return _private.is_eager() and current() is None and open_update() is None


def reading_scope() -> contextlib.AbstractContextManager[object]:
    """Return a context that adds reads to the graph of the step, also inside a branch.

    A read in the branch could follow a write that the compiler moved ahead of the branch.
    """
    step = current()
    return _within(None if step is None else step.graph)


def scope_of(tensor: tf.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that adds operations to the graph of a read, also inside a branch.

    The gradient would have to carry reads in the branch itself out of it, in Optionals that DTensor cannot expand.
    """
    return _within(getattr(tensor, "graph", None))


def _within(graph: tf.Graph | None) -> contextlib.AbstractContextManager[object]:
    if graph is None or graph is tf.compat.v1.get_default_graph():
        return contextlib.nullcontext()
    default: contextlib.AbstractContextManager[object] = graph.as_default()
    return default


@contextlib.contextmanager
def step_scope(
    reshard: ReshardPolicy | None = None,
    reduce_gradient: ReduceGradient | None = None,
    reads_only: bool = False,
    only_mesh: dtensor.Mesh | None = None,
    rounds_gathers: bool = False,
) -> Iterator[None]:
    """Open a step. Writes are recorded, and carried out when the outermost scope ends.

    Args:
        reshard: When a traced step gathers and frees sharded values; by default it gathers all of them at its start.
        reduce_gradient: Reduces a local gradient of a variable; by default DTensor does.
        reads_only: True if the scope only reads variables, around other steps.
        only_mesh: The mesh of all variables that the step may use; by default any mesh.
        rounds_gathers: True if a traced step gathers variables in codes, where their layouts say so.
    """
    if current() is not None:
        yield
        return
    step = Step(here(), reshard, reduce_gradient, only_mesh, rounds_gathers)
    try:
        with changed(step=step):
            yield
            written = step.finish()
            if step.graph is not None and not reads_only:
                traced_steps.note_step(step.graph, written)
    finally:
        compilations.wait()


@contextlib.contextmanager
def recorded_blocks(graph: tf.Graph) -> Iterator[list[Block]]:
    """Record the blocks that are added to a graph of a plan, which belongs to no step.

    Returns:
        The blocks. The list is filled while the context is open.
    """
    recorder = BlockRecorder(graph, [])
    with changed(blocks=recorder):
        yield recorder.blocks


@contextlib.contextmanager
def update_scope(
    packed: Writable | None = None,
    gradient: tf.Tensor | None = None,
    axes: Axes = (),
    part: PartialUpdate | None = None,
) -> Iterator[None]:
    """Open an optimizer's update: variables are read and written in the layout of their slots.

    Args:
        packed: The storage that is updated as one tensor.
        gradient: The gradient of the update.
        axes: The layout of the gradient.
        part: The part of the variable that is updated; None for all of it.
    """
    with changed(update=OpenUpdate(packed=packed, gradient=gradient, axes=axes, part=part)):
        yield
