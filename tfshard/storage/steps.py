"""Steps: what a step function has written so far, to be carried out at its end.

# Note: why writes are deferred

DTensor's all-reduce combiner ends in a topological sort by operands only. A resource read has no operand, so
it can move ahead of the write it should follow: Adam, RMSprop and Adagrad, which write a slot and read it
again, train silently wrong (tests/storage/test_stale_read.py reproduces it). Turning the combiner off cures it and
costs a collective for each gradient. Instead, a step is made a pure function of what it reads:

- inside a step a write only records the new value, and a later read sees the recorded value;
- at the end of the step each storage that was written is assigned once, in its storage layout.

Branches of a `tf.cond` give out what they write, and parts of a step (microbatches) hand it on, so that it is recorded.
What a `tf.function` writes that the step calls cannot be: its value belongs to the function. It is assigned there,
where it is the last thing that happens to the storage, and touching the variable after the call in the same step is an
error rather than a stale read. A write in the body of any other `tf.while_loop` is an error.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import host_meshes, merges, transfer
from tfshard.errors import StrategyError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import ReshardPolicy
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import recomputing, traced_steps, turns, update_order
from tfshard.storage.writes import Recorded, Writable

# What reads have gathered, by what was read; with what it was made of, so that ids in keys stay their own.
Gathered: TypeAlias = dict[Hashable, tuple[tf.Tensor, tf.Tensor | None]]


# Adds up a gradient of a variable over the devices in another way than DTensor; or gives None, of one that it cannot.
AddUp: TypeAlias = Callable[[tf.Tensor, Any], tf.Tensor | None]

# A branch of a tf.cond.
Branch: TypeAlias = Callable[[], Any]


class Updates(Protocol):
    """Updates of variables that belong together: an `UpdateBatch`, as far as a step knows it.

    Attributes:
        graph: The graph in which they were opened; None in eager code.
    """

    graph: tf.Graph | None


class RowUpdate(Protocol):
    """Rows of an embedding table that a step updates: a `Touched`, as far as a step knows it."""

    def value(self, storage: Any) -> tf.Tensor:
        """What the rows of the table or of a slot have."""

    def record(self, storage: Any, value: tf.Tensor) -> None:
        """Takes note of new rows."""

    def known(self) -> tf.Tensor:
        """Zero, a float32 on the mesh, once the new rows are known."""

    def write(self, reads: Sequence[tf.Tensor]) -> None:
        """Writes them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A part of the batch that a step takes.

    Attributes:
        number: A scalar, from 0.
        count: How many there are.
        rows: How many rows each has, over all devices.
        is_of_each_device: Whether it has some of the rows that each device has of the batch. Else the rows of a
            microbatch follow each other in the batch.
    """

    number: tf.Tensor
    count: int
    rows: int
    is_of_each_device: bool = True

    def blocks(self, devices: int) -> np.ndarray:
        """`(devices, count)`: which of as many equal blocks of the batch a device has of a microbatch."""
        shape = (devices, self.count) if self.is_of_each_device else (self.count, devices)
        blocks: np.ndarray = np.arange(devices * self.count).reshape(shape)
        return blocks if self.is_of_each_device else blocks.T


class Step:
    """One run of a step function, traced or eager."""

    def __init__(
        self,
        graph: tf.Graph | None,
        reshard: ReshardPolicy | None = None,
        add_up: AddUp | None = None,
    ):
        self.graph = graph
        self._reshard = reshard
        # None if DTensor adds up all.
        self.add_up = add_up
        # The UpdateBatch that is open.
        self.updates: Updates | None = None
        # What was gathered, by the graph in which it is known; None for eager code.
        self._gathered: dict[tf.Graph | None, Gathered] = {}
        # Parts of the step's own graph that are to be computed again in the backward pass.
        self.blocks: list[recomputing.Block] = []
        self._in_block = False
        # What was read in the step's own graph, as it is stored.
        self._stored: list[tuple[Writable, tf.Tensor]] = []
        # Gradients of what is updated in shards, as they wait for the update, and whether they are shards then.
        self._gradients: list[tuple[Writable, tf.Tensor, bool]] = []
        # Updates with gradients that are reduced as one.
        self._updates: list[update_order.Update] = []
        # What updates read and cut, each with the gradient that they work on.
        self._cut: list[tuple[tf.Tensor, tf.Tensor]] = []
        # What a gradient is taken with respect to, by variable: the tensor or handle of its last read, also after
        # another value was recorded. With the variable, so that its id stays its own.
        self._last_read: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self._recorded: dict[tf.Graph | None, dict[Writable, Recorded]] = {graph: {}}
        # What earlier steps of the same function wrote, and this one has read.
        self._earlier: dict[Writable, Recorded] = {}
        # Storages in the order in which the step's own graph wrote them first.
        self._to_flush: dict[Writable, None] = {}
        # Those written in a function by the open UpdateBatch, which writes them when it ends.
        self._postponed: dict[Writable, None] = {}
        # Graph and storage to the number of operations the graph had when a function called in it wrote the storage.
        self._written_below: dict[tuple[tf.Graph | None, Writable], int] = {}
        # What is written in branches that give it out, by the branch's graph.
        self._branches: dict[tf.Graph, dict[Writable, None]] = {}
        # What makes of a gradient what each device has of it; None if gradients are reduced as they come.
        self.own_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None
        # Whether it is a part of another step.
        self.is_part = False
        # Which part of the batch it takes, if it is one.
        self.microbatch: Microbatch | None = None
        # How many rows the tensors have that the step takes, and the sizes of their other dims.
        self.rows: frozenset[int] = frozenset()
        self.other_dims: frozenset[int] = frozenset()
        # Numbers of parts, and of what is made together, that have to be used for something.
        self._tokens: list[tf.Tensor] = []
        # Numbers on host meshes that have to be used for something, by mesh and layout.
        self._host_tokens: dict[tuple[dtensor.Mesh, Axes], list[tf.Tensor]] = collections.defaultdict(list)
        # What is given out instead of written, by what the backward pass waits for.
        self._given: dict[Writable, tf.Tensor] = {}
        # A number that has to be used for something, of a step that writes nothing.
        self.token: tf.Tensor | None = None
        # Of a part: the ids of variables that are updated once the last part has ended.
        self._updated_later: set[int] = set()
        # What lookups have read of each embedding table, and the rows of it that are updated.
        self._rows_read: dict[Writable, list[tf.Tensor]] = collections.defaultdict(list)
        self.row_updates: dict[Writable, RowUpdate] = {}
        # What stands for all of an embedding table, by its path: nothing may be computed from it.
        self._stand_ins: dict[str, tf.Tensor] = {}
        # What the gradient of an embedding table is taken with respect to.
        self._anchors: dict[Writable, tf.Tensor] = {}

    def gathered(self, graph: tf.Graph | None) -> Gathered:
        """What reads have gathered in a graph of this step, or in eager code (None): kept until the step ends."""
        return self._gathered.setdefault(graph, {})

    @contextlib.contextmanager
    def block(self, name: str, keeps: frozenset[str]) -> Iterator[None]:
        """While this is open, what is added to the step's own graph is a block that is computed again.

        A block in a block is part of it. What is added to other graphs, such as bodies of loops, is not changed.

        Args:
            name: Of the block. If that before has the same name, this goes on with it.
            keeps: Types of operations whose results stay.
        """
        graph: tf.Graph = self.graph
        if _private.is_eager() or graph is not tf.compat.v1.get_default_graph() or self._in_block:
            yield
            return
        self._in_block = True
        begin = len(graph.get_operations())
        try:
            yield
        finally:
            self._in_block = False
        if self.blocks and self.blocks[-1].name == name:
            begin = self.blocks.pop().begin
        end = len(graph.get_operations())
        self.blocks.append(recomputing.Block(name=name, begin=begin, end=end, keeps=keeps))

    def note_batch(self, batch: Any) -> None:
        """Remembers the shapes of what the step takes."""
        shapes = [leaf.shape.as_list() for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
        self.rows = frozenset(shape[0] for shape in shapes if shape[0] is not None)
        self.other_dims = frozenset(size for shape in shapes for size in shape[1:] if size is not None)

    def shapes_read(self) -> set[tuple[int, ...]]:
        """The shapes of the trained variables that the step has read."""
        return {tuple(variable.shape) for variable, _ in self._last_read.values()}

    def note_stored(self, storage: Writable, stored: tf.Tensor) -> tf.Tensor:
        """Remembers a stored value that was just read."""
        if self.graph is not None and getattr(stored, "graph", None) is self.graph:
            self._stored.append((storage, stored))
        return stored

    def note_gradient(self, storage: Writable, is_scattered: bool, gradient: tf.Tensor) -> None:
        """Remembers a gradient, as it waits for the update, of what is updated in shards."""
        if self.graph is not None and gradient.graph is self.graph:
            self._gradients.append((storage, gradient, is_scattered))

    def note_update(self, update: update_order.Update) -> None:
        """Remembers an update in the step's own graph, with a gradient that is reduced together with others."""
        self._updates.append(update)

    def note_cut(self, stored: tf.Tensor) -> bool:
        """Remembers what was read whole, of which the open update works on a part.

        Returns:
            Whether it does: not in eager code, nor in a branch.
        """
        after = _state.after
        if self.graph is None or after is None or not after.tensor.graph is stored.graph is self.graph:
            return False
        self._cut.append((stored, after.tensor))
        return True

    def tied_on_host(self, stored: tf.Tensor, mesh: dtensor.Mesh, host: dtensor.Mesh) -> tf.Tensor:
        """What was read on a host mesh, when there is what the open update works on: numbers of that are sent there.

        Without them, all that rests on the host would be on the devices from the begin of the step. It is, if the
        update is in a branch of a `tf.cond`: what it works on is not known where the branch is not taken.

        Args:
            stored: What was read.
            mesh: The mesh of the step.
            host: Its host mesh.
        """
        after = _state.after
        if self.graph is None or after is None or after.tensor.graph is not self.graph:
            return stored
        axes = tuple(axis for axis in after.axes if axis is not None)
        key, gathered = ("sent to the host", after.tensor.ref()), self.gathered(self.graph)
        if key not in gathered:
            numbers = host_meshes.first_numbers(after.tensor, after.axes, mesh)
            gathered[key] = (host_meshes.copied(numbers, axes, mesh, host), None)
        tied, token = tf.raw_ops.IdentityN(input=[stored, gathered[key][0]])
        self._host_tokens[host, axes].append(token)
        return tied

    def together(self, mesh: dtensor.Mesh, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same tensors, of which none is there before the others are: by an IdentityN as `_small_copies_last`
        has it. In the step's own graph."""
        # Not by `value()`, which tells a custom gradient that it uses a variable.
        read = tf.raw_ops.ReadVariableOp(resource=_token(mesh).handle, dtype=tf.float32)
        made: list[tf.Tensor] = tf.raw_ops.IdentityN(input=[read, *tensors])
        self._tokens.append(made[0])
        return made[1:]

    def part(self, graph: tf.Graph, carried: Mapping[Writable, tf.Tensor]) -> "Step":
        """A part of this step, in a graph of its own: it reads there, and gives out what it writes.

        Args:
            graph: Of the part.
            carried: What the part before has handed on.
        """
        part = Step(graph, self._reshard, self.add_up)
        part.is_part = True
        part._recorded[graph] = {storage: Recorded(base=value, written={}) for storage, value in carried.items()}
        return part

    def close_part(self, sums: dict[Writable, tf.Tensor]) -> tuple[dict[Writable, tf.Tensor], tf.Tensor]:
        """Ends a part.

        Args:
            sums: What the gradients of each storage are added to: the backward pass waits for it, as it does for
                updates. Changed to what has to be given out instead.

        Returns:
            What was written, as it is handed on, and a number that has to be used for something
            (`end_parts`).
        """
        written = {storage: storage.handed_on(self._recorded[self.graph][storage]) for storage in self._to_flush}
        tokens = self._arrange(sums)
        return written, tf.add_n([tf.zeros(()), *tokens, *self._tokens])

    def give_out(self, sums: dict[Writable, tf.Tensor]) -> None:
        """Has the backward pass wait for these sums of gradients, by storage, as it does for updates: they are results
        of the step, which has no update. What has to be given out instead is in the same dict when the step has ended,
        and so does `token`, if there is one."""
        self._given = sums

    def end_parts(self, token: tf.Tensor) -> None:
        """Takes what `close_part` gave."""
        self._tokens.append(token)

    @property
    def written(self) -> list[Writable]:
        """What the step's own graph wrote."""
        return list(self._to_flush)

    def reads_of(self, storage: Writable) -> list[tf.Tensor]:
        """What was read of a storage in the step's own graph, and what was written to it."""
        recorded = self._recorded[self.graph].get(storage)
        new = [] if recorded is None else [recorded.base, *recorded.written.values()]
        return [
            *(tensor for each, tensor in self._stored if each is storage),
            *(each for each in new if each is not None),
        ]

    def note_rows_read(self, storage: Writable, rows: tf.Tensor) -> None:
        """Remembers rows that were read of an embedding table: a write of it waits for them."""
        self._rows_read[storage].append(rows)

    def stand_in(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
        """What stands for all of an embedding table, of which only the shape may be asked for."""
        if path not in self._stand_ins:
            with self._own_graph():
                self._stand_ins[path] = tf.fill(shape, tf.constant(0, dtype))
        return self._stand_ins[path]

    def anchor(self, storage: Writable) -> tf.Tensor:
        """What the gradient of an embedding table is taken with respect to: a number that each lookup takes."""
        if storage not in self._anchors:
            with self._own_graph():
                self._anchors[storage] = tf.zeros(())
        return self._anchors[storage]

    @contextlib.contextmanager
    def _own_graph(self) -> Iterator[None]:
        graph: tf.Graph = self.graph
        with _private.stop_recording(), graph.as_default(), tf.control_dependencies(None):
            yield

    def _check_stand_ins(self) -> None:
        """Raises `StrategyError` if something was computed from all of an embedding table."""
        for path, tensor in self._stand_ins.items():
            users = list(tensor.consumers())
            while users:
                user = users.pop()
                if user.type not in ("Cast", "Identity"):
                    raise StrategyError(
                        f"Embedding table '{path}' is used as a whole in a step, by operation '{user.name}' of type "
                        f"{user.type}, and is never gathered. It can be looked up with keras.layers.Embedding, "
                        "keras.ops.take or tf.gather along its rows. A table that is also a matrix elsewhere (tied "
                        "weights), or that has a constraint or a regularizer, cannot be one of tables=: take it out."
                    )
                users += user.outputs[0].consumers()

    def update_later(self, variables: Iterable[tf.Variable]) -> None:
        """These are updated when the last part has ended: a part must not read them any more."""
        self._updated_later.update(id(variable) for variable in variables)

    def check_read(self, variable: tf.Variable) -> None:
        """Raises `StrategyError` if a variable is read that is updated once the last part has ended."""
        if id(variable) in self._updated_later:
            raise StrategyError(
                f"Variable '{variable.path}' is read after its optimizer's update, in a step that is done in "
                "microbatches: they update it when the last of them has ended. Read it before the update or in a step "
                "of its own, return the variable itself, or set strategy.microbatches = 1."
            )

    def note_read(self, variable: tf.Variable, read: tf.Tensor) -> None:
        """Remembers the tensor or handle that a trained variable was read from."""
        self._last_read[id(variable)] = variable, read

    def last_read(self, variable: tf.Variable) -> tf.Tensor | None:
        """What `note_read` was told of a variable, unless it belongs to a branch that is not being built; else None."""
        _, read = self._last_read.get(id(variable), (None, None))
        graph = getattr(read, "graph", None)  # The handle of a buffer, and eager tensors, have none.
        return read if graph is None or graph in self._graphs() else None

    def find(self, storage: Writable) -> Recorded | None:
        """What is recorded for `storage` as seen from the graph being built."""
        for graph in self._graphs():
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
        """Return what earlier steps of the same function have written to a storage, as if this step had."""
        value = None if self.is_part else traced_steps.written_before(self.graph, storage)
        if value is None:
            return None
        if storage not in self._earlier:
            with self._own_graph():
                self._earlier[storage] = Recorded(base=storage.from_rest(value), written={})
        return self._earlier[storage]

    def record_base(self, storage: Writable, value: tf.Tensor) -> None:
        """Takes note of a new value of the whole buffer."""
        self.record(storage, Recorded(base=value, written={}))

    def record_member(self, storage: Writable, member: int, value: tf.Tensor) -> None:
        """Takes note of a new value of one member."""
        before = self.find(storage)
        base, written = (None, {}) if before is None else (before.base, before.written)
        self.record(storage, Recorded(base=base, written={**written, member: value}))

    def record(self, storage: Writable, recorded: Recorded) -> None:
        """Takes note of a write; the storage itself is written by `flush`, or now inside a function."""
        graphs = self._graphs()
        graph = graphs[0]
        self.find(storage)  # Raises when a function wrote it that was called.
        if graph is self.graph:
            self._recorded[graph][storage] = recorded
            self._to_flush[storage] = None
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
        if storage in self._to_flush:
            # Written before the branch's own write, so that the branch has the last word.
            del self._to_flush[storage]
            assert self.graph is not None, "Eager code has no branches."
            with self.graph.as_default(), tf.control_dependencies(None):
                storage.write(self._recorded[self.graph][storage])
        self._recorded.setdefault(graph, {})[storage] = recorded
        for outer in graphs[1:]:
            assert outer is not None, "The step's own graph is the outermost."
            self._written_below.setdefault((outer, storage), len(outer.get_operations()))
        if self.updates is not None and self.updates.graph is graph and storage.is_group:
            self._postponed[storage] = None
        else:
            storage.write(recorded)

    def both_branches(self, branches: tuple[Branch, Branch], cond: Callable[[Branch, Branch], Any]) -> Any:
        """A `tf.cond` whose branches give out what they write, so that it is recorded behind it.

        A branch is traced once more before that, to learn what it writes.

        Args:
            branches: What is called where the condition is true, and where it is false.
            cond: Makes a `tf.cond` of two branches.
        """
        written: dict[Writable, None] = {}
        for branch in branches:
            with _private.func_graph("branch").as_default(), self._branch() as writes:
                branch()
            written |= writes
        if not written:
            return cond(*branches)

        def giving(branch: Branch) -> tuple[Any, list[tf.Tensor]]:
            with self._branch():
                return branch(), [storage.handed_on(self.find(storage)) for storage in written]

        outputs, values = cond(*(functools.partial(giving, branch) for branch in branches))
        for storage, value in zip(written, values, strict=True):
            self.record(storage, Recorded(base=value, written={}))
        return outputs

    @contextlib.contextmanager
    def _branch(self) -> Iterator[dict[Writable, None]]:
        """While this is open, the graph that is being built is a branch; gives what is written in it."""
        graph = tf.compat.v1.get_default_graph()
        self._branches[graph] = {}
        try:
            yield self._branches[graph]
        finally:
            del self._branches[graph]

    def forget(self, storage: Writable, before: Recorded | None) -> None:
        """Takes the last write back: `before` is what `find` gave before it."""
        graph = self._graphs()[0]
        if before is not None:
            self._recorded[graph][storage] = before
            return
        del self._recorded[graph][storage]
        self._to_flush.pop(storage, None)
        self._postponed.pop(storage, None)

    def write_postponed(self) -> None:
        """Writes what the open UpdateBatch wrote in a function. In the function."""
        for storage in self._postponed:
            recorded = self.find(storage)
            assert recorded is not None
            storage.write(recorded)
        self._postponed.clear()

    def flush(self) -> dict[Writable, tf.Tensor]:
        """Writes each storage once. Last in the step: a read after this would be stale.

        Returns:
            What was written.
        """
        recorded = {storage: self._recorded[self.graph][storage] for storage in self._to_flush}
        values = {storage: storage.at_rest(each) for storage, each in recorded.items()}
        self._to_flush.clear()
        self._check_stand_ins()
        waited = values | self._given
        tokens = self._arrange(waited) + self._tokens
        self._given.update((storage, waited[storage]) for storage in self._given)
        values = {storage: waited[storage] for storage in values}
        made = {storage: update_order.new_value(storage, each) for storage, each in recorded.items()}
        tokens += self._order_updates(made, values)
        if not values and tokens:
            self.token = tf.add_n(tokens)
        known = [update.known() for update in self.row_updates.values()]
        users = {
            storage: update_order.taking_over(storage, made[storage], value)
            for storage, value in values.items()
            if not _is_small_copy(storage, value)
        }
        read = {storage for storage, own in users.items() if own}
        values = _small_copies_last(values, read, tokens, known)
        for storage, value in values.items():
            storage.write_at_rest(self._behind_earlier(storage, value), users.get(storage, ()))
        for (host, axes), used in self._host_tokens.items():
            _token(host, axes).assign(tf.add_n(used), read_value=False)
        for written, update in self.row_updates.items():
            update.write(self._rows_read[written])
        return values

    def _behind_earlier(self, storage: Writable, value: tf.Tensor) -> tf.Tensor:
        """Return a value that is written after what an earlier step of the same function wrote to the storage.

        DTensor orders the two writes by their operands only. So the earlier value is written once more, and both wait
        for each other's values.
        """
        earlier = traced_steps.written_before(self.graph, storage)
        if earlier is None:
            return value
        read = tf.raw_ops.ReadVariableOp(resource=_token(storage.mesh).handle, dtype=tf.float32)
        token, earlier, value = tf.raw_ops.IdentityN(input=[read, earlier, value])
        _token(storage.mesh).assign(token, read_value=False)
        storage.write_at_rest(earlier)
        return value

    def _order_updates(
        self, made: dict[Writable, tf.Tensor | None], values: dict[Writable, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Lets updates wait for each other. Changes both: what updates have made, and what is to be written."""
        for stored, gradient in self._cut:
            update_order.cut_when_used(stored, gradient)
        if not self._updates or not merges.happen(self._updates[0].storage.mesh):
            return []
        mesh = self._updates[0].storage.mesh
        updated = {update.storage for update in self._updates}
        others = [
            value
            for storage, value in values.items()
            if storage not in updated and storage.mesh is mesh and _is_small_copy(storage, value)
        ]
        replaced, tokens = update_order.one_after_the_other(self._updates, made, others, _token(mesh).value)
        for tensors in (made, values):
            for storage, each in tensors.items():
                if each is not None:
                    tensors[storage] = replaced.get(each.ref(), each)
        return tokens

    def _arrange(self, values: dict[Writable, tf.Tensor]) -> list[tf.Tensor]:
        """Lets gathers wait for their turn, and the backward pass for updates."""
        storages = [*values, *(storage for storage, _ in self._stored)]
        if self.graph is None or self._reshard is None or not storages:
            return []
        mesh = storages[0].mesh
        merges.choose(mesh, self.graph)
        read_token = _token(mesh).value
        read = {tensor.ref() for _, tensor in self._stored}
        again = recomputing.recompute(self.graph, self.blocks, read_token, read)
        stored = {
            storage: turns.Stored(
                key=id(storage),
                bytes=storage.format.gathered_elements * tensor.dtype.size,
                itemsize=tensor.dtype.size,
                is_gathered=storage.format.is_gathered,
                keeps=self._reshard.keeps(storage.paths),
            )
            for storage, tensor in self._stored
        }
        last = {storage: tensor for storage, tensor, _ in self._gradients}  # Two tapes give a variable two gradients.
        gradients = {
            (storage, tensor.ref()): turns.Gradient(
                key=id(storage),
                tensor=tensor,
                is_scattered=is_scattered,
                updated=values.get(storage) if last[storage] is tensor else None,
            )
            for storage, tensor, is_scattered in self._gradients
        }
        if not gradients and not any(each.is_gathered for each in stored.values()):
            return again.tokens
        reads = [(stored[storage], tensor) for storage, tensor in self._stored]
        tokens = turns.arrange(again.operations, reads, gradients.values(), self._reshard, read_token)
        values |= {storage: each.updated for (storage, _), each in gradients.items() if each.updated is not None}
        return again.tokens + tokens

    def _graphs(self) -> list[tf.Graph | None]:
        """The graphs from the one being built out to the step's own."""
        if self.graph is None:
            return [None]
        graph = tf.compat.v1.get_default_graph()
        graphs = [graph]
        while graph is not None and graph is not self.graph:
            graph = _private.outer_graph(graph)
            graphs.append(graph)
        return graphs

    def _is_called(self, graph: tf.Graph | None, storage: Writable) -> bool:
        """Whether a function that wrote `storage` has become an operation of `graph`."""
        since = self._written_below.get((graph, storage))
        if graph is None or since is None:
            return False
        return any(op.type in _CALLS for op in graph.get_operations()[since:])


def _small_copies_last(
    values: dict[Writable, tf.Tensor], used: Collection[Writable], tokens: list[tf.Tensor], known: list[tf.Tensor]
) -> dict[Writable, tf.Tensor]:
    """The same values, of which those of counters, seeds, statistics and metrics exist when the others do.

    They depend on little. In a step that fails on one device, others would have counted it by then, and this one not:
    devices that should hold the same would not. So they wait for each other, and for the first of the others: that
    is of the first layer, whose gradient comes last.

    An IdentityN waits for all of its inputs. DTensor drops an input whose output is not used, and TensorFlow's
    dependency optimizer takes an IdentityN away unless its first input is the read of a variable
    (`DependencyOptimizer::SafeToRemoveIdentity`): hence the token, a number that nobody looks at.

    Args:
        values: What is to be stored.
        used: What the step takes from where it is stored, once it is: that cannot wait.
        tokens: Numbers that have to be used for something.
        known: Numbers that are there when the new rows of embedding tables are, for which small copies wait, too.
    """
    small = [storage for storage, value in values.items() if _is_small_copy(storage, value)]
    if _private.is_eager() or not values:
        return values  # In eager code a failure ends the step before the first write.
    waiting = small + [storage for storage in values if storage not in small and storage not in used][:1]
    token = _token(next(iter(values)).mesh)
    tied = tf.raw_ops.IdentityN(input=[token.value(), *(values[storage] for storage in waiting), *known])
    last = len(waiting) + 1
    token.assign(tf.add_n([tied[0], *tokens, *tied[last:]]), read_value=False)
    return values | dict(zip(waiting, tied[1:last], strict=True))


_tokens: dict[tuple[str, Axes], dtensor.DVariable] = {}


def _token(mesh: dtensor.Mesh, axes: Axes = ()) -> dtensor.DVariable:
    """A variable that nobody looks at: with a number for each shard over `axes`."""
    key = mesh.to_string(), axes
    if key not in _tokens:
        shape = [axis_sizes(mesh)[axis] for axis in axes if axis is not None]
        with tf.init_scope():
            _tokens[key] = dtensor.DVariable(transfer.host_to_mesh(np.zeros(shape, np.float32), axes, mesh))
    return _tokens[key]


_SMALL_BYTES = 1 << 20


def _is_small_copy(storage: Writable, value: tf.Tensor) -> bool:
    return not any(storage.format.storage) and bool(value.shape.num_elements() * value.dtype.size < _SMALL_BYTES)


_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdatedWith:
    """What an update works on.

    Attributes:
        tensor: The gradient, on the mesh of the step.
        axes: Its layout.
    """

    tensor: tf.Tensor
    axes: Axes


class _State(threading.local):
    step: Step | None = None
    # Of which only the blocks are noted.
    noting: Step | None = None
    # An optimizer's update is running; `packed` is the storage that is updated as one tensor, if one is. What is read
    # on the host waits for `after`.
    updating: bool = False
    packed: Writable | None = None
    after: UpdatedWith | None = None
    # The rows of an embedding table that are updated.
    touched: RowUpdate | None = None


_state = _State()


def state() -> _State:
    """This thread's step and update."""
    return _state


def current() -> Step | None:
    """The open step."""
    return _state.step


def here() -> tf.Graph | None:
    """The graph that is being built; None in eager code."""
    return None if _private.is_eager() else tf.compat.v1.get_default_graph()


def is_updating() -> bool:
    """Whether an optimizer's update is running."""
    return _state.updating


def is_outside() -> bool:
    """Whether this is eager code outside of a step and of an update: variables are read and set on the host."""
    return _private.is_eager() and _state.step is None and not _state.updating


def reading_scope() -> contextlib.AbstractContextManager[object]:
    """Reads belong to the step's own graph, also those made in a branch: there, they could follow a write that the
    compiler moved ahead of the branch."""
    return _within(None if _state.step is None else _state.step.graph)


def scope_of(tensor: tf.Tensor) -> contextlib.AbstractContextManager[object]:
    """The graph of a tensor that was read, while a branch may be being built: reads made in the branch itself would
    have to be carried out of it for the gradient, in Optionals that DTensor cannot expand."""
    return _within(getattr(tensor, "graph", None))


def _within(graph: tf.Graph | None) -> contextlib.AbstractContextManager[object]:
    if graph is None or graph is tf.compat.v1.get_default_graph():
        return contextlib.nullcontext()
    default: contextlib.AbstractContextManager[object] = graph.as_default()
    return default


@contextlib.contextmanager
def step_scope(
    reshard: ReshardPolicy | None = None, add_up: AddUp | None = None, reads_only: bool = False
) -> Iterator[None]:
    """Opens a step: writes are recorded, and carried out when the outermost scope ends.

    Args:
        reshard: How the step gathers what is stored sharded, if it is traced; by default all at its start.
        add_up: Takes a gradient, as a layer gives it, and its variable.
        reads_only: Whether it only reads variables, around other steps.
    """
    if _state.step is not None:
        yield
        return
    _state.step = Step(None if _private.is_eager() else tf.compat.v1.get_default_graph(), reshard, add_up)
    try:
        yield
        written = _state.step.flush()
        if _state.step.graph is not None and not reads_only:
            traced_steps.note_step(_state.step.graph, written)
    finally:
        _state.step = None


@contextlib.contextmanager
def part_scope(
    graph: tf.Graph,
    carried: Mapping[Writable, tf.Tensor] | None = None,
    own_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Iterator[Step]:
    """In this context the open step is a part of the one before, in a graph of its own (`Step.part`).

    Args:
        graph: Its graph.
        carried: What the part before has written.
        own_gradient: Makes of a gradient what each device has of it, if they are reduced when all parts have ended.
    """
    outer = _state.step
    assert outer is not None, "Parts are made in steps."
    _state.step = outer.part(graph, carried or {})
    _state.step.own_gradient = own_gradient
    try:
        yield _state.step
    finally:
        _state.step = outer


@contextlib.contextmanager
def noting_blocks(graph: tf.Graph) -> Iterator[list[recomputing.Block]]:
    """While this is open, blocks are noted that are added to a graph which is no step's: of a plan.

    Returns:
        Those that were, also later.
    """
    before, _state.noting = _state.noting, Step(graph)
    try:
        yield _state.noting.blocks
    finally:
        _state.noting = before


def noting() -> Step | None:
    """What notes blocks: the open step, or that of `noting_blocks`."""
    return _state.step or _state.noting


@contextlib.contextmanager
def update_scope(
    packed: Writable | None = None, after: UpdatedWith | None = None, touched: RowUpdate | None = None
) -> Iterator[None]:
    """Opens an optimizer's update: variables are read and written in the layout of their slots.

    Args:
        packed: The storage that is updated as one tensor. Its members, and those of its slots, stand for the buffer.
        after: What it works on.
        touched: The rows that are updated, if it is of an embedding table. The table and its slots stand for them.
    """
    before = _state.updating, _state.packed, _state.after, _state.touched
    _state.updating, _state.packed, _state.after, _state.touched = True, packed, after, touched
    try:
        yield
    finally:
        _state.updating, _state.packed, _state.after, _state.touched = before
