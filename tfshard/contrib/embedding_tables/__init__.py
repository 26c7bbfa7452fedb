"""Embedding tables that are stored sharded by rows, and that a step reads and updates by rows.

table_options      `EmbeddingTables`: the option of users
table_kind         `TableKind`: the kind of variable that the option chooses
table_rows         how devices store a table
table_reads        the reads and the updates of tables in a step
embedding_lookups  lookups: devices ask each other for rows
embedding_updates  updates of the rows that were looked up
sparse_optimizers  how Keras's optimizers update by a sparse gradient
sparse_rows        the rows that a device updates in a step
exchanges          variable-length lists between devices
table_traffic      the largest traffic of tables in a step
"""

from tfshard.contrib.embedding_tables.table_kind import TableKind
from tfshard.contrib.embedding_tables.table_options import EmbeddingTables
from tfshard.layouts import variable_kind

variable_kind.register(TableKind)

__all__ = ["EmbeddingTables"]
