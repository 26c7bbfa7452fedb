"""The reads of embedding tables in a step: rows only, and never the full table."""

import tensorflow as tf

from tfshard.errors import StrategyError
from tfshard.storage.graph_edits import adding_to
from tfshard.storage.step_record import RowUpdate, StepRecord
from tfshard.storage.writes import Writable


class TableReads:
    """The placeholders and row reads of the embedding tables of one step.

    Args:
        record: The record of the step.
    """

    def __init__(self, record: StepRecord):
        self._record = record
        # The placeholder of each full table, by path. Nothing may be computed from it.
        self._placeholders: dict[str, tf.Tensor] = {}
        # The tensor that the gradient of each table is taken with respect to.
        self._sources: dict[Writable, tf.Tensor] = {}

    @property
    def updates(self) -> dict[Writable, RowUpdate]:
        """The new rows of each table that the step updates."""
        return self._record.row_updates

    def note_rows(self, storage: Writable, rows: tf.Tensor) -> None:
        """Record rows that were read of a table: the write of the table waits for them."""
        self._record.rows_read[storage].append(rows)

    def placeholder(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
        """Return a tensor in place of a full table. The step may use its shape only."""
        if path not in self._placeholders:
            with adding_to(self._record.graph):
                self._placeholders[path] = tf.fill(shape, tf.constant(0, dtype))
        return self._placeholders[path]

    def source(self, storage: Writable) -> tf.Tensor:
        """Return the number that each lookup takes. The gradient of the table is taken with respect to it."""
        if storage not in self._sources:
            with adding_to(self._record.graph):
                self._sources[storage] = tf.zeros(())
        return self._sources[storage]

    def check(self) -> None:
        """Raise `StrategyError` if the step computes anything from a full table."""
        for path, tensor in self._placeholders.items():
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
