"""Step: records reads and writes while a step function is traced, and finishes the step by passes (passes.py)."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Protocol, TypeAlias

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import host_meshes
from tfshard.errors import StrategyError
from tfshard.layouts.config import ReshardPolicy
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import barrier as barriers
from tfshard.storage import passes, slot_reads
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import graphs_out_to
from tfshard.storage.microbatch import BatchShapes
from tfshard.storage.recomputing import BlockRecorder
from tfshard.storage.step_record import JointUpdate, PendingGradient, SlicedRead, StepRecord, StoredRead
from tfshard.storage.table_reads import TableReads
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


class Step:
    """The trace of a step function, or an eager run of it.

    The step collects data in its record, and looks up earlier reads and writes. `finish` runs the passes.

    Args:
        graph: The graph of the step; None in eager code.
        reshard: When to gather and free sharded values; None leaves both to DTensor.
        reduce_gradient: Reduces local gradients of variables; None leaves reductions to DTensor.
        only_mesh: The mesh of all variables that the step may use; None allows any mesh.

    Attributes:
        record: The data for the passes.
        reduce_gradient: As in the arguments.
        batch: The shapes of the step's batch, and its microbatch.
        blocks: Records blocks of the forward pass.
        reads: The reads.
        writes: The writes.
        tables: The reads of embedding tables.
    """

    is_microbatch: ClassVar[bool] = False
    # Makes a local gradient of a gradient, if its reduction waits for later microbatches.
    local_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None

    def __init__(
        self,
        graph: tf.Graph | None,
        reshard: ReshardPolicy | None = None,
        reduce_gradient: ReduceGradient | None = None,
        only_mesh: dtensor.Mesh | None = None,
    ):
        self.record = StepRecord(graph=graph, reshard=reshard, only_mesh=only_mesh)
        self.reduce_gradient = reduce_gradient
        self.batch = BatchShapes()
        self.blocks = BlockRecorder(graph, self.record.blocks)
        self.reads = ReadLog(graph)
        self.writes = WriteLog(graph, follows_steps=not self.is_microbatch)
        self.tables = TableReads(self.record)

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
        """Does nothing. `MicrobatchStep` raises if the variable is updated after the last microbatch."""

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
        to return. `record.token` is a number to use, except in a microbatch.

        Args:
            sums: The sums by storage.
        """
        self.record.results = sums

    def tensors_of(self, storage: Writable) -> list[tf.Tensor]:
        """Return the reads and the last write of a storage in the graph of the step."""
        recorded = self.writes.own(storage)
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
        self.tables.check()
        passes.run(passes.PASSES, record)
        return record.values
