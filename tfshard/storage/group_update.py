"""UpdateBatch: an optimizer's updates of a group's members, carried out as one update of the group's buffer."""

import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import joins_reduction
from tfshard.storage import optimizer_kinds, steps
from tfshard.storage.step_record import JointUpdate
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.storage.writes import Recorded

# Runs an update: called with the optimizer, the update function, the variable and the other arguments.
RunUpdate: TypeAlias = Callable[[keras.optimizers.Optimizer, Callable[..., Any], ShardedVariable, Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingUpdate:
    """A call of `extended.update`."""

    variable: ShardedVariable
    args: tuple[Any, ...]


class UpdateBatch:
    """The updates between an optimizer's entering and leaving of `merge_call`.

    Keras updates one variable after the other. The members of a group wait until all of them have a gradient, or until
    the batch ends. Then the update function runs once, with one member in the role of the buffer: its reads and writes
    of parameters and slots are reads and writes of the buffer. Masks leave out members without a gradient, and members
    that the function treats differently (weight decay).

    Args:
        run: Runs an update.
    """

    def __init__(self, run: RunUpdate) -> None:
        step = steps.current()
        assert step is not None, "Optimizers enter merge_call in steps only."
        self.graph = steps.here()
        self._step = step
        self._run_update = run
        self._since = 0 if self.graph is None else len(self.graph.get_operations())
        self._pending: dict[Storage, list[_PendingUpdate]] = {}
        self._noted: set[Hashable] = set()
        self._functions: dict[Storage, tuple[Callable[..., Any], keras.optimizers.Optimizer]] = {}

    def __enter__(self) -> "UpdateBatch":
        writes = self._step.writes
        self._outer, writes.updates = writes.updates, self
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        try:
            if exception_type is None:
                for storage in list(self._pending):
                    self._run(storage)
                self._step.writes.write_postponed()
        finally:
            self._step.writes.updates = self._outer

    def note(self, variable: ShardedVariable, tensor: tf.Tensor) -> None:
        """Record an update with a gradient that is reduced together with others."""
        if self.graph is None or self.graph is not self._step.graph:
            return  # The inputs of a branch exist when it begins.
        span = self._step.record.gradient_spans.get(tensor.ref())
        if span is not None:
            tensor = span.flat
            if tensor.ref() in self._noted:
                return
            self._noted.add(tensor.ref())
        is_sum = tensor.op.type in ("AddN", "AddV2")
        if joins_reduction(variable.layout, axis_sizes(variable.mesh), is_sum=is_sum):
            self._step.note_update(JointUpdate(storage=variable.storage, gradient=tensor, since=self._since))

    def add(
        self,
        variable: ShardedVariable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        """Take one update of a member. `fn` must be elementwise."""
        storage = variable.storage
        if storage in self._pending and self._functions[storage][0] is not fn:
            self._run(storage)
        self._functions[storage] = (fn, optimizer)
        self._pending.setdefault(storage, []).append(_PendingUpdate(variable=variable, args=args))
        if len(self._pending[storage]) == len(storage.format.members):
            self._run(storage)

    def _run(self, storage: Storage) -> None:
        updates = self._pending.pop(storage)
        fn, optimizer = self._functions.pop(storage)
        run_as_one(storage, fn, updates, optimizer, self._run_update)


def open_here() -> UpdateBatch | None:
    """Return the step's UpdateBatch, if it was opened in the graph that is being built."""
    step = steps.current()
    batch = None if step is None else step.writes.updates
    return batch if isinstance(batch, UpdateBatch) and batch.graph is steps.here() else None


def run_alone(
    variable: ShardedVariable,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    optimizer: keras.optimizers.Optimizer,
    run: RunUpdate,
) -> None:
    """Run the elementwise update of a variable that is stored alone in a flat form."""
    run_as_one(variable.storage, fn, [_PendingUpdate(variable=variable, args=args)], optimizer, run)


def run_as_one(
    storage: Storage,
    fn: Callable[..., Any],
    updates: list[_PendingUpdate],
    optimizer: keras.optimizers.Optimizer,
    run: RunUpdate,
) -> None:
    """Run `fn` once for each set of members that it treats alike."""
    everyone = frozenset(range(len(storage.format.members)))
    alike: dict[Hashable, list[_PendingUpdate]] = {}
    for update in updates:
        alike.setdefault(optimizer_kinds.update_key(optimizer, fn, update.variable), []).append(update)
    args = _pack_args(storage, updates)
    gradient = args[0] if args and _is_tensor(args[0]) else None
    family = [storage, *storage.slots.values()]
    before = {member: member.recorded() for member in family}
    results: dict[Storage, tf.Tensor] = {}
    for same in alike.values():
        with steps.update_scope(packed=storage, gradient=gradient, axes=storage.format.update):
            run(optimizer, fn, same[0].variable, args)
        members = frozenset(update.variable.member for update in same)
        if members == everyone:
            return
        results |= _masked(storage, members, before, results)
    step = steps.current()
    for written, value in results.items():
        assert step is not None
        step.writes.record_base(written, value)


def _masked(
    storage: Storage,
    members: frozenset[int],
    before: Mapping[Storage, Recorded | None],
    results: Mapping[Storage, tf.Tensor],
) -> dict[Storage, tf.Tensor]:
    """Return the buffers that were just written, with only `members` changed. The writes are undone."""
    step = steps.current()
    assert step is not None, "Partial updates happen in steps only."
    changed = {}
    for part, recorded in before.items():
        if part.recorded() is recorded:
            continue
        after = part.update_value()
        step.writes.forget(part, recorded)
        base = results.get(part)
        base = part.update_value() if base is None else base
        changed[part] = tf.where(storage.format.mask(members), after, base)
    return changed


def _pack_args(storage: Storage, updates: list[_PendingUpdate]) -> list[Any]:
    """Pack the gradients, and other arguments that differ from member to member. Other arguments stay unchanged."""
    packed = []
    for position, first in enumerate(updates[0].args):
        given = {update.variable.member: update.args[position] for update in updates}
        if not _is_tensor(first) or (
            position and (first.shape.rank == 0 or any(v is first for v in [*given.values()][1:]))
        ):
            packed.append(first)
            continue
        gradients = [given.get(i) for i in range(len(storage.format.members))]
        packed.append(pack_gradients(storage, gradients, first.dtype))
    return packed


def pack_gradients(storage: Storage, gradients: Sequence[tf.Tensor | None], dtype: tf.DType) -> tf.Tensor:
    """Pack the gradients of a group's members (`StorageFormat.pack_gradients`).

    Gradients that programs of a compiled block returned as one flat tensor stay one.
    """
    step, spans = steps.current(), {}
    for number, gradient in enumerate(gradients):
        # Keras also gives variables to updates, for moving averages.
        if step is None or not isinstance(gradient, tf.Tensor):
            continue
        span = step.record.gradient_spans.get(gradient.ref())
        if span is not None and span.storage is storage:
            given = gradients[number : number + len(span.parts)]
            if len(given) == len(span.parts) and all(map(operator.is_, given, span.parts)):
                spans[number] = span.flat, len(span.parts)
    return storage.format.pack_gradients(gradients, dtype, spans)


def _is_tensor(value: Any) -> bool:
    return bool(tf.is_tensor(value) and not isinstance(value, tf.Variable))
