"""The write log of a step: writes are recorded, and a later read sees the recorded value."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError
from tfshard.storage import traced_steps
from tfshard.storage.graph_edits import adding_to, graphs_out_to
from tfshard.storage.writes import Recorded, Writable

# A branch of a tf.cond.
Branch: TypeAlias = Callable[[], Any]

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class Updates(Protocol):
    """Updates of variables that belong together: an `UpdateBatch`, as far as a step knows it.

    Attributes:
        graph: The graph in which the batch was opened; None in eager code.
    """

    graph: tf.Graph | None


class WriteLog:
    """The writes of one step, in its graph, in branches and in functions that it calls.

    A write in a branch of a `tf.cond` is an output of the branch, and then recorded in the graph around it. The value
    that a called `tf.function` writes belongs to the function, so the function assigns it at once.

    Args:
        graph: The graph of the step; None in eager code.
        follows_steps: True if reads see the writes of earlier steps of the same function.

    Attributes:
        updates: The open UpdateBatch.
    """

    def __init__(self, graph: tf.Graph | None, *, follows_steps: bool = True):
        self.updates: Updates | None = None
        self._graph = graph
        self._follows_steps = follows_steps
        # The last write of each storage, by graph.
        self._recorded: dict[tf.Graph | None, dict[Writable, Recorded]] = {graph: {}}
        # Storages in the order in which the graph of the step first wrote them.
        self._written: dict[Writable, None] = {}
        # Storages that the open UpdateBatch wrote in a function. The batch assigns them when it ends.
        self._postponed: dict[Writable, None] = {}
        # How many operations a graph had when a function called in it wrote the storage.
        self._written_below: dict[tuple[tf.Graph | None, Writable], int] = {}
        # The storages that each branch writes, by the branch's graph.
        self._branches: dict[tf.Graph, dict[Writable, None]] = {}
        # Values of earlier steps of the same function that this step has read.
        self._earlier: dict[Writable, Recorded] = {}

    @property
    def storages(self) -> list[Writable]:
        """The storages that the graph of the step wrote."""
        return list(self._written)

    def take(self) -> dict[Writable, Recorded]:
        """Return the writes of the step's graph, and remove them from the order."""
        found = {storage: self._recorded[self._graph][storage] for storage in self._written}
        self._written.clear()
        return found

    def is_recorded_in(self, graph: tf.Graph | None) -> bool:
        """Return whether writes in a graph are recorded: in the graph of the step, and in branches. Eager code and
        called functions assign."""
        return graph is not None and (graph is self._graph or graph in self._branches)

    def begin_with(self, storage: Writable, value: tf.Tensor) -> None:
        """Take a value that the microbatch before has passed on. It is no write of this step."""
        self._recorded[self._graph][storage] = Recorded(base=value, written={})

    def find_in_step(self, storage: Writable) -> Recorded | None:
        """Return the last write in the graph of the step."""
        return self._recorded[self._graph].get(storage)

    def find(self, storage: Writable) -> Recorded | None:
        """Return the last write of a storage, as the graph that is being built sees it."""
        for graph in graphs_out_to(self._graph):
            if self._is_called(graph, storage):
                raise StrategyError(
                    f"Variable '{storage.name}' was written inside a tf.function and is used again after it in the "
                    "same step, where its value is not known. Use it inside of the function or in the next step, or "
                    "make it a plain Python function."
                )
            found = self._recorded.get(graph, {}).get(storage)
            if found is not None:
                return found
        return self._written_before(storage)

    def _written_before(self, storage: Writable) -> Recorded | None:
        """Return the value that earlier steps of the same function wrote, as if this step had recorded it."""
        value = traced_steps.written_before(self._graph, storage) if self._follows_steps else None
        if value is None:
            return None
        if storage not in self._earlier:
            with adding_to(self._graph):
                self._earlier[storage] = Recorded(base=storage.from_stored(value), written={})
        return self._earlier[storage]

    def record_base(self, storage: Writable, value: tf.Tensor) -> None:
        """Record a new value of the full buffer."""
        self.record(storage, Recorded(base=value, written={}))

    def record_member(self, storage: Writable, member: int, value: tf.Tensor) -> None:
        """Record a new value of one member."""
        before = self.find(storage)
        base, written = (None, {}) if before is None else (before.base, before.written)
        self.record(storage, Recorded(base=base, written={**written, member: value}))

    def record(self, storage: Writable, recorded: Recorded) -> None:
        """Record a write. The end of the step assigns the storage, or this call does in a function."""
        graphs = graphs_out_to(self._graph)
        graph = graphs[0]
        self.find(storage)  # Raises if a function that was called wrote the storage.
        if graph is self._graph:
            self._recorded[graph][storage] = recorded
            self._written[storage] = None
            return
        if graph in self._branches:
            self._recorded.setdefault(graph, {})[storage] = recorded
            self._branches[graph][storage] = None
            return
        if any(_private.graph_is_loop(g) for g in graphs[:-1]):
            raise StrategyError(
                f"Variable '{storage.name}' is written in the body of a tf.while_loop, which a sharded step cannot "
                "do. Unroll the loop in Python, or carry the value as a loop variable and assign it after the loop."
            )
        if storage in self._written:
            # The storage is assigned before the function writes it. The write of the function comes last.
            del self._written[storage]
            assert self._graph is not None, "Eager code has no branches."
            with self._graph.as_default(), tf.control_dependencies(None):
                storage.write(self._recorded[self._graph][storage])
        self._recorded.setdefault(graph, {})[storage] = recorded
        for outer in graphs[1:]:
            assert outer is not None, "The step's graph is the outermost."
            self._written_below.setdefault((outer, storage), len(outer.get_operations()))
        if self.updates is not None and self.updates.graph is graph and storage.is_group:
            self._postponed[storage] = None
        else:
            storage.write(recorded)

    def forget(self, storage: Writable, before: Recorded | None) -> None:
        """Take the last write back.

        Args:
            storage: The storage.
            before: The result of `find` before the write.
        """
        graph = graphs_out_to(self._graph)[0]
        if before is not None:
            self._recorded[graph][storage] = before
            return
        del self._recorded[graph][storage]
        self._written.pop(storage, None)
        self._postponed.pop(storage, None)

    def write_postponed(self) -> None:
        """Assign the storages that the open UpdateBatch wrote in a function. In that function."""
        for storage in self._postponed:
            recorded = self.find(storage)
            assert recorded is not None
            storage.write(recorded)
        self._postponed.clear()

    def both_branches(self, branches: tuple[Branch, Branch], cond: Callable[[Branch, Branch], Any]) -> Any:
        """Call a `tf.cond` with branches that return their writes, and record the writes behind it.

        Each branch is traced once more before that, to learn its writes.

        Args:
            branches: The functions for a true and for a false condition.
            cond: Makes a `tf.cond` of two branches.
        """
        written: dict[Writable, None] = {}
        for branch in branches:
            with _private.func_graph("branch").as_default(), self._branch() as writes:
                branch()
            written |= writes
        if not written:
            return cond(*branches)

        def with_writes(branch: Branch) -> tuple[Any, list[tf.Tensor]]:
            with self._branch():
                return branch(), [storage.handed_on(self.find(storage)) for storage in written]

        outputs, values = cond(*(functools.partial(with_writes, branch) for branch in branches))
        for storage, value in zip(written, values, strict=True):
            self.record(storage, Recorded(base=value, written={}))
        return outputs

    @contextlib.contextmanager
    def _branch(self) -> Iterator[dict[Writable, None]]:
        """Treat the graph that is being built as a branch, and yield the storages that it writes."""
        graph = tf.compat.v1.get_default_graph()
        self._branches[graph] = {}
        try:
            yield self._branches[graph]
        finally:
            del self._branches[graph]

    def _is_called(self, graph: tf.Graph | None, storage: Writable) -> bool:
        """Return whether a function that wrote the storage has become an operation of the graph."""
        since = self._written_below.get((graph, storage))
        if graph is None or since is None:
            return False
        return any(op.type in _CALLS for op in graph.get_operations()[since:])
