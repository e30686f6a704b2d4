"""Tables whose rows are alike laid end to end (OPER's all-in-one table).

A row id is global in the row space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pibroch.embedding.row_index import ReaderIndices, RowIndex
from pibroch.embedding.table import Table, check_tables
from pibroch.errors import ConfigError


class RowSpace:
    """Row ids of a list of tables: row r of table t is ``first_row[t.name] + r``.

    Args:
        tables: of one dim and dtype, and either all of them pooled or none.
        indices: of these tables (and perhaps others) by name, where they are shared with another
            space; fresh ones when absent.

    Attributes:
        tables: in the order of their rows.
        dim, dtype: of all of them.
        is_pooled: whether a lookup gives a vector for each bag; otherwise for each id.
        first_row: by table name.
        indices: by table name, from its ids to its rows.
        num_rows: capacity of all tables together.
        features: of each of the F readers, a pair of a table and a feature that reads it, the
            feature; in the order of the tables. One that reads several tables is there several
            times.
        index_of_readers: from a batch's ids to rows, for these F readers.
        first_row_of_feature: int64 ``[F]``.
        num_rows_of_feature: int64 ``[F]``, capacity of each one's table.
        mean_of_feature: bool ``[F]``, whether bags are averaged.
        averages: whether some feature's bags are.
        shares_tables: whether some table is read by several features.
    """

    def __init__(
        self, tables: Sequence[Table], indices: Mapping[str, RowIndex] | None = None
    ) -> None:
        check_tables(tables)
        kinds = sorted({(table.dim, table.pooling == "none", table.dtype) for table in tables})
        if len(kinds) > 1:
            raise ConfigError(
                f"one row space of tables of dim {[dim for dim, *_ in kinds]}",
                "one dim and dtype, all pooled or none",
                "let embedding.group_tables put tables together",
            )
        self.tables = tuple(tables)
        self.dim = kinds[0][0]
        self.is_pooled = not kinds[0][1]
        self.dtype = kinds[0][2]
        bounds = np.cumsum([0, *(table.num_rows for table in tables)])
        self.first_row = {
            table.name: int(first) for table, first in zip(tables, bounds, strict=False)
        }
        self.num_rows = int(bounds[-1])
        self.indices = {
            table.name: table.rows.index(table.num_rows) if indices is None else indices[table.name]
            for table in tables
        }
        readers = [(feature, table) for table in tables for feature in table.features]
        self.features = tuple(feature for feature, _ in readers)
        self.index_of_readers = ReaderIndices(
            self.features, [self.indices[table.name] for _, table in readers]
        )
        self.first_row_of_feature = np.array(
            [self.first_row[table.name] for _, table in readers], np.int64
        )
        self.num_rows_of_feature = np.array([table.num_rows for _, table in readers], np.int64)
        self.mean_of_feature = np.array([table.pooling == "mean" for _, table in readers], np.bool_)
        self.averages = bool(self.mean_of_feature.any())
        self.shares_tables = len(readers) > len(tables)

    def rows_of(self, table: str) -> slice:
        """The row ids of a table."""
        index = [t.name for t in self.tables].index(table)
        first = self.first_row[table]
        return slice(first, first + self.tables[index].num_rows)
