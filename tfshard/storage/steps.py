"""The context of this thread: the open step and the open update, and the scopes that open them.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts.config import ReshardPolicy
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import traced_steps
from tfshard.storage.microbatch_step import MicrobatchStep
from tfshard.storage.recomputing import BlockRecorder
from tfshard.storage.step_record import Block, RowUpdate
from tfshard.storage.step_recorder import ReduceGradient, Step
from tfshard.storage.writes import Writable


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenUpdate:
    """An optimizer's update that is running.

    Attributes:
        packed: The storage that is updated as one tensor. Its members and the members of its slots stand for the
            buffer.
        gradient: The gradient, on the mesh of the step. Reads on the host wait for it.
        axes: The layout of the gradient.
        rows: The rows of an embedding table that are updated. The table and its slots stand for them.
    """

    packed: Writable | None = None
    gradient: tf.Tensor | None = None
    axes: Axes = ()
    rows: RowUpdate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepContext:
    """The state that reads and writes of variables depend on, in addition to the graph that is being built.

    Attributes:
        step: The open step; None outside of steps.
        update: The open update; None outside of updates.
        blocks: Records blocks of a graph that belongs to no step: the graph of a plan.
    """

    step: Step | None = None
    update: OpenUpdate | None = None
    blocks: BlockRecorder | None = None


class _Thread(threading.local):
    context = StepContext()


_thread = _Thread()


def context() -> StepContext:
    """Return the context of this thread."""
    return _thread.context


@contextlib.contextmanager
def _changed(**changes: Any) -> Iterator[None]:
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


def here() -> tf.Graph | None:
    """Return the graph that is being built; None in eager code."""
    return None if _private.is_eager() else tf.compat.v1.get_default_graph()


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
) -> Iterator[None]:
    """Open a step. Writes are recorded, and carried out when the outermost scope ends.

    Args:
        reshard: When a traced step gathers and frees sharded values; by default it gathers all of them at its start.
        reduce_gradient: Reduces a local gradient of a variable; by default DTensor does.
        reads_only: True if the scope only reads variables, around other steps.
        only_mesh: The mesh of all variables that the step may use; by default any mesh.
    """
    if current() is not None:
        yield
        return
    step = Step(here(), reshard, reduce_gradient, only_mesh)
    with _changed(step=step):
        yield
        written = step.finish()
        if step.graph is not None and not reads_only:
            traced_steps.note_step(step.graph, written)


@contextlib.contextmanager
def microbatch_scope(
    graph: tf.Graph,
    carried: Mapping[Writable, tf.Tensor] | None = None,
    local_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Iterator[MicrobatchStep]:
    """Open the step of a microbatch, in a separate graph.

    Args:
        graph: The graph.
        carried: The values that the microbatch before has passed on.
        local_gradient: Makes a local gradient of a gradient, if the reduction waits for the last microbatch.
    """
    outer = current()
    assert outer is not None, "Microbatches belong to a step."
    step = MicrobatchStep(outer, graph, carried or {}, local_gradient)
    with _changed(step=step):
        yield step


@contextlib.contextmanager
def recorded_blocks(graph: tf.Graph) -> Iterator[list[Block]]:
    """Record the blocks that are added to a graph of a plan, which belongs to no step.

    Returns:
        The blocks. The list is filled while the context is open.
    """
    recorder = BlockRecorder(graph, [])
    with _changed(blocks=recorder):
        yield recorder.blocks


@contextlib.contextmanager
def update_scope(
    packed: Writable | None = None,
    gradient: tf.Tensor | None = None,
    axes: Axes = (),
    rows: RowUpdate | None = None,
) -> Iterator[None]:
    """Open an optimizer's update: variables are read and written in the layout of their slots.

    Args:
        packed: The storage that is updated as one tensor.
        gradient: The gradient of the update.
        axes: The layout of the gradient.
        rows: The rows that are updated, if the variable is an embedding table.
    """
    with _changed(update=OpenUpdate(packed=packed, gradient=gradient, axes=axes, rows=rows)):
        yield
