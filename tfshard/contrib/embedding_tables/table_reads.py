"""TableReads: the embedding tables of a step. The step reads and updates rows only, and never the full table."""

import collections

import tensorflow as tf

from tfshard import _private
from tfshard.contrib.embedding_tables.sparse_rows import SparseRows
from tfshard.errors import StrategyError
from tfshard.storage.graph_edits import adding_to
from tfshard.storage.step_record import KindState, StepRecord
from tfshard.storage.steps import Step
from tfshard.storage.variables import ShardedVariable
from tfshard.storage.writes import Writable


class TableReads(KindState):
    """The placeholders, row reads and row updates of the embedding tables of one step.

    Args:
        record: The record of the step.

    Attributes:
        rows_read: The rows that lookups read of each table.
        updates: The new rows of each table that the step updates.
    """

    def __init__(self, record: StepRecord):
        self._record = record
        # The placeholder of each full table, by path. Nothing may be computed from it.
        self._placeholders: dict[str, tf.Tensor] = {}
        # The tensor that the gradient of each table is taken with respect to.
        self._sources: dict[Writable, tf.Tensor] = {}
        self.rows_read: dict[Writable, list[tf.Tensor]] = collections.defaultdict(list)
        self.updates: dict[Writable, SparseRows] = {}

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Return a tensor in place of a full table. The step may use its shape only."""
        check_compiled(variable)
        if variable.path not in self._placeholders:
            with adding_to(self._record.graph):
                self._placeholders[variable.path] = tf.fill(variable.layout.spec.shape, tf.constant(0, variable.dtype))
        return self._placeholders[variable.path]

    def gradient_source(self, variable: ShardedVariable) -> tf.Tensor:
        """Return the number that each lookup takes. The gradient of the table is taken with respect to it."""
        if variable.storage not in self._sources:
            with adding_to(self._record.graph):
                self._sources[variable.storage] = tf.zeros(())
        return self._sources[variable.storage]

    def known(self) -> list[tf.Tensor]:
        return [update.known() for update in self.updates.values()]

    def write(self) -> None:
        """Write the new rows. The write of a table waits for the reads of its rows."""
        for storage, update in self.updates.items():
            update.write(self.rows_read[storage])

    def check(self) -> None:
        """Raise `StrategyError` if the step computes anything from a full table."""
        for path, tensor in self._placeholders.items():
            users = list(tensor.consumers())
            while users:
                user = users.pop()
                if user.type not in ("Cast", "Identity"):
                    if not any(path in storage.paths for storage in self.rows_read):
                        raise StrategyError(
                            f"'{path}' is not looked up with keras.layers.Embedding: correct the patterns of tables=. "
                            f"'{path}' is used in full in a step, by operation '{user.name}' of type {user.type}."
                        )
                    raise StrategyError(
                        f"Embedding table '{path}' is used in full in a step, by operation '{user.name}' of type "
                        f"{user.type}. No step gathers a table. Look up its rows with keras.layers.Embedding, "
                        "keras.ops.take or tf.gather. If the table is also a matrix elsewhere (tied weights), or "
                        "has a constraint or a regularizer, take it out of tables=."
                    )
                users += user.outputs[0].consumers()


def reads_of(table: ShardedVariable, step: Step) -> TableReads:
    """Return the reads of a step that looks up or updates a table."""
    assert table.layout.partial_kind is not None
    found = step.record.state_of(table.layout.partial_kind)
    assert isinstance(found, TableReads)
    return found


def check_compiled(table: ShardedVariable) -> None:
    """Raise `StrategyError` if a table is used in an eager step."""
    if _private.is_eager():
        raise StrategyError(
            f"Embedding table '{table.path}' is used in an eager step, which would gather the table. Compile the "
            "model without run_eagerly=True, give strategy.run a tf.function, or take the table out of tables=."
        )
