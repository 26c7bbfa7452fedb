"""The record of a step: data that the recorder collects while the step is traced, and that passes change afterwards."""

import abc
import collections
import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.layouts.config import ReshardPolicy
from tfshard.layouts.variable_kind import PartialKind
from tfshard.layouts.variable_layout import Axes
from tfshard.storage.graph_edits import OpInput
from tfshard.storage.writes import Recorded, Writable


class PartialUpdate(Protocol):
    """An optimizer's update of a part of a variable. The variable and its slots stand for that part."""

    def value(self, storage: Any) -> tf.Tensor:
        """Return the part of the variable's storage, or of the storage of a slot."""

    def record(self, storage: Any, value: tf.Tensor) -> None:
        """Record the new value of the part."""

    def dense(self, storage: Any, sparse: tf.IndexedSlices) -> tf.Tensor:
        """Convert slices of the part to a tensor of the part's shape. Slices with equal indices are summed."""


class KindState(abc.ABC):
    """The reads and writes of all variables of one kind in one step (`PartialKind.begin_step` makes it)."""

    @abc.abstractmethod
    def read(self, variable: Any) -> tf.Tensor:
        """Return a tensor for a read of the full variable."""

    @abc.abstractmethod
    def gradient_source(self, variable: Any) -> tf.Tensor:
        """Return the tensor that a gradient is taken with respect to, if the step recorded no read of the variable."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `StrategyError` if the finished step uses a variable in a way that its kind cannot carry out."""

    @abc.abstractmethod
    def known(self) -> list[tf.Tensor]:
        """Return zeros, float32 on the mesh, that exist once the new values do. Small values wait for them."""

    @abc.abstractmethod
    def write(self) -> None:
        """Write the new values. Last in the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the forward pass that the backward pass computes again.

    Attributes:
        name: The name of the block.
        begin: The number of its first operation, in the order in which operations were added to the graph.
        end: The number behind its last operation.
        keeps: Types of operations. Their results stay in memory.
    """

    name: str
    begin: int
    end: int
    keeps: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredRead:
    """A read of a stored value, in its storage layout."""

    storage: Writable
    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PendingGradient:
    """A gradient that waits for a sharded update.

    Attributes:
        storage: The storage that is updated.
        tensor: The gradient.
        is_scattered: True if the gradient is sharded while it waits.
    """

    storage: Writable
    tensor: tf.Tensor
    is_scattered: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GradientSpan:
    """A flat gradient of members of a group that follow each other.

    Attributes:
        storage: The group.
        flat: The gradient.
        parts: The gradient of each member, cut out of `flat`.
    """

    storage: Writable
    flat: tf.Tensor
    parts: list[tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JointUpdate:
    """An update with a gradient that DTensor reduces together with others.

    Attributes:
        storage: The storage that is updated; a group has one update for each member or span.
        gradient: The gradient as the optimizer received it.
        since: How many operations the graph had when the optimizer began.
    """

    storage: Writable
    gradient: tf.Tensor
    since: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlicedRead:
    """A replicated read that an update slices.

    Attributes:
        stored: The read.
        gradient: The gradient of the update, in the shape of the slice.
    """

    stored: tf.Tensor
    gradient: tf.Tensor


@dataclasses.dataclass(kw_only=True, eq=False)
class StepRecord:
    """The data of one step, in the graph of the step. `Step` fills the record, and the passes change it.

    Attributes:
        graph: The graph of the step; None in eager code.
        reshard: When to gather and free sharded values; None leaves both to DTensor.
        only_mesh: The mesh of all variables that the step may use; None allows any mesh.
        reads: Reads of stored values, in order.
        gradients: Gradients that wait for a sharded update.
        updates: Updates with gradients that are reduced together, in order.
        sliced_reads: Replicated reads that updates slice.
        blocks: Blocks to compute again. They do not overlap.
        kinds: The state of each kind of variable that the step uses (`state_of`).
        tokens: Tokens that went through barriers (barrier.py).
        host_tokens: Tokens on host meshes, by mesh and layout.
        results: Sums of gradients that the step returns and does not write, by storage. Passes order them like values.
        writes: The recorded write of each storage, in the order of first writes.
        updated: The new buffer of each written storage, in the update layout; None for partial writes.
        values: The new buffer of each written storage, as it will be stored.
        operations: The operations of the graph, in the order in which they should run; None before
            `recompute_blocks` adds copies.
        gradient_spans: For each gradient of a member of a group, by reference, the span that it was cut from.
        unused: Operations whose results the step does not use. They are no uses of stored values.
        takers: For each storage, the inputs of operations that take the new value from the storage once it is written.
        token: The sum of the tokens, for the caller to use, if the step writes nothing.
    """

    graph: tf.Graph | None
    reshard: ReshardPolicy | None = None
    only_mesh: dtensor.Mesh | None = None
    reads: list[StoredRead] = dataclasses.field(default_factory=list)
    gradients: list[PendingGradient] = dataclasses.field(default_factory=list)
    updates: list[JointUpdate] = dataclasses.field(default_factory=list)
    sliced_reads: list[SlicedRead] = dataclasses.field(default_factory=list)
    blocks: list[Block] = dataclasses.field(default_factory=list)
    kinds: dict[PartialKind, KindState] = dataclasses.field(default_factory=dict)
    tokens: list[tf.Tensor] = dataclasses.field(default_factory=list)
    host_tokens: dict[tuple[dtensor.Mesh, Axes], list[tf.Tensor]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    results: dict[Writable, tf.Tensor] = dataclasses.field(default_factory=dict)
    writes: dict[Writable, Recorded] = dataclasses.field(default_factory=dict)
    updated: dict[Writable, tf.Tensor | None] = dataclasses.field(default_factory=dict)
    values: dict[Writable, tf.Tensor] = dataclasses.field(default_factory=dict)
    operations: list[tf.Operation] | None = None
    gradient_spans: dict[Hashable, GradientSpan] = dataclasses.field(default_factory=dict)
    unused: set[tf.Operation] = dataclasses.field(default_factory=set)
    takers: dict[Writable, list[OpInput]] = dataclasses.field(default_factory=dict)
    token: tf.Tensor | None = None

    @property
    def mesh(self) -> dtensor.Mesh | None:
        """The mesh of the step. None if the step reads and writes no variable."""
        storages = (*self.values, *self.results, *(read.storage for read in self.reads))
        return storages[0].mesh if storages else None

    @property
    def traced(self) -> tf.Graph | None:
        """The graph, if passes may change where its gathers and reductions run."""
        return self.graph if self.reshard is not None and self.mesh is not None else None

    def state_of(self, kind: PartialKind) -> KindState:
        """Return the state of a kind of variable. The first call begins it."""
        if kind not in self.kinds:
            self.kinds[kind] = kind.begin_step(self)
        return self.kinds[kind]
