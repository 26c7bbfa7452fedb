"""TableKind: variables that are stored sharded by rows, and that a step reads and updates by rows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.contrib.embedding_tables import embedding_lookups, embedding_updates, table_traffic
from tfshard.contrib.embedding_tables.table_options import LAZY, EmbeddingTables
from tfshard.contrib.embedding_tables.table_reads import TableReads
from tfshard.contrib.embedding_tables.table_rows import TableRows
from tfshard.errors import StrategyError
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_kind import PartialKind
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Collective
from tfshard.storage.step_record import StepRecord
from tfshard.storage.variables import ShardedVariable


@dataclasses.dataclass(frozen=True)
class TableKind(PartialKind):
    """The kind of variable that `EmbeddingTables` chooses.

    Attributes:
        tables: The user's option.
    """

    option_name: ClassVar[str] = "tables"
    noun: ClassVar[str] = "embedding tables"

    tables: EmbeddingTables

    @property
    def _is_lazy(self) -> bool:
        return self.tables.sparse == LAZY

    def __str__(self) -> str:
        return repr(self.tables)

    @classmethod
    def from_option(cls, given: Any) -> "TableKind":
        return cls(EmbeddingTables.of(given))

    @property
    def for_layouts(self) -> "TableKind":
        return TableKind(dataclasses.replace(self.tables, patterns=".*"))

    def matches_path(self, path: str) -> bool:
        return self.tables.matches_path(path)

    def check_used(self, paths: Sequence[str]) -> None:
        self.check_patterns(self.tables.patterns, paths)

    def check_variable(
        self, spec: VariableSpec, rule: tuple[str, Sequence[str | None]] | None, axes: MeshAxes, slot_dtype: str | None
    ) -> None:
        if len(spec.shape) != 2 or spec.dtype != "float32":
            raise StrategyError(
                "An embedding table must be a float32 matrix with a row for each id. Correct the patterns of "
                f"tables=. Received: '{spec.path}' of shape={spec.shape}, dtype={spec.dtype}"
            )
        self.check_batch_axis("Embedding tables", f"table '{spec.path}'", axes)
        if slot_dtype is not None:
            raise StrategyError(
                "Slots of embedding tables are stored in float32. Name the tables before other patterns: "
                f"slot_dtype={{{'|'.join(self.tables.patterns)!r}: 'float32', ...}}. "
                f"Received: slot_dtype='{slot_dtype}' for table '{spec.path}'"
            )
        if rule is not None and any(rule[1]):
            raise StrategyError(
                f"'{spec.path}' is an embedding table, whose rows the batch axis shards, but the layout map has "
                "another layout for it. Remove the table from the layout map or from tables=. "
                f"Received: axes={rule[1]} for pattern '{rule[0]}', tables={self.tables}"
            )

    def stored_shape(self, shape: tuple[int, ...], axes: MeshAxes) -> tuple[int, ...]:
        return (-(-shape[0] // axes.data_size) * axes.data_size, *shape[1:])

    def format(self, layout: VariableLayout, mesh: dtensor.Mesh) -> TableRows:
        return TableRows(layout, mesh)

    def begin_step(self, record: StepRecord) -> TableReads:
        return TableReads(record)

    def install(self, variable: keras.Variable) -> None:
        embedding_lookups.install(variable)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
        table = _private.backend_variable(variable)
        assert isinstance(table, ShardedVariable)
        if table.trainable:
            for part in _private.optimizer_chain(optimizer):
                embedding_updates.check(part, table, is_lazy=self._is_lazy)

    def update(
        self,
        variable: ShardedVariable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> Any:
        return embedding_updates.update(variable, fn, args, optimizer, is_lazy=self._is_lazy)

    def assign(self, variable: ShardedVariable, value: Any) -> None:
        del value
        raise StrategyError(
            f"Embedding table '{variable.path}' is assigned in a step, by something other than an optimizer's update "
            "of its rows. Assign it outside of the step, or take it out of tables=."
        )

    def collectives(
        self,
        model: ModelOrSpecs,
        planned: Sequence[VariableLayout],
        mesh_shape: Mapping[str, int],
        *,
        optimizer: Any,
        inputs: Any,
    ) -> list[Collective]:
        return table_traffic.collectives(
            model, planned, mesh_shape, optimizer=optimizer, inputs=inputs, is_lazy=self._is_lazy
        )

    def check_verifiable(self) -> None:
        if self._is_lazy:
            raise StrategyError(
                "verify compares with Keras on one device, which does not update tables lazily. Verify the model with "
                f"sparse='keras'. Received: tables={self.tables}"
            )
