"""All tables of one record width laid end to end (OPER's all-in-one table): a row id is global in the row space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pibroch.embedding.table import Table, check_tables


class RowSpace:
    """Row ids of a list of tables: row r of table t is ``first_row[t.name] + r``.

    Attributes:
        tables: in the order of their rows.
        first_row: by table name.
        num_rows: of all tables together.
        features: names in the order of the tables, F in all.
        first_row_of_feature: int64 ``[F]``.
        num_rows_of_feature: int64 ``[F]``.
        mean_of_feature: bool ``[F]``, whether bags are averaged.
        shares_tables: whether some table is read by several features.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        check_tables(tables)
        self.tables = tuple(tables)
        self.dim = tables[0].dim
        bounds = np.cumsum([0, *(table.num_rows for table in tables)])
        self.first_row = {table.name: int(first) for table, first in zip(tables, bounds, strict=False)}
        self.num_rows = int(bounds[-1])
        readers = [(feature, table) for table in tables for feature in table.features]
        self.features = tuple(feature for feature, _ in readers)
        self.first_row_of_feature = np.array([self.first_row[table.name] for _, table in readers], np.int64)
        self.num_rows_of_feature = np.array([table.num_rows for _, table in readers], np.int64)
        self.mean_of_feature = np.array([table.pooling == "mean" for _, table in readers], np.bool_)
        self.shares_tables = len(readers) > len(tables)

    def rows_of(self, table: str) -> slice:
        """The row ids of a table."""
        index = [t.name for t in self.tables].index(table)
        first = self.first_row[table]
        return slice(first, first + self.tables[index].num_rows)
