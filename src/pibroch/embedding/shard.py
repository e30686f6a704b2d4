"""A shard that keeps its row records in this process's memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.initializers import stream_key
from pibroch.embedding.optimizers import SparseOptimizer
from pibroch.embedding.row_space import RowSpace

ROWS_PER_FILL = 1 << 18

Records = NDArray[np.float32]


class MemoryShard:
    """The records of all rows of a row space, float32 ``[num_rows, record_width]``: weights first, then optimizer state."""

    def __init__(self, row_space: RowSpace, optimizer: SparseOptimizer, seed: int) -> None:
        self.row_space = row_space
        self.fields = optimizer.state_fields(row_space.dim)
        self.records: Records = np.empty((row_space.num_rows, optimizer.record_width(row_space.dim)), np.float32)
        for table in row_space.tables:
            initializer, key = table.resolved_initializer(), stream_key(seed, table.name)
            first = row_space.first_row[table.name]
            for start in range(0, table.num_rows, ROWS_PER_FILL):  # bounds what an initializer may allocate
                stop = min(start + ROWS_PER_FILL, table.num_rows)
                initializer.fill(self.records[first + start : first + stop, : table.dim], start, key)
        dim, first = row_space.dim, row_space.dim + sum(optimizer.moments(row_space.dim).values())
        self.records[:, dim:first] = optimizer.initial_state()
        if optimizer.average is not None:
            self.records[:, first : first + dim] = self.records[:, :dim]
            self.records[:, first + dim] = 0

    def column(self, field: str) -> int:
        """First column of a state field in a record."""
        before = list(self.fields).index(field)
        return self.row_space.dim + sum(list(self.fields.values())[:before])

    def weights(self, table: str) -> Records:
        """View of a table's weights, ``[rows, D]``; writing to it changes the table."""
        return self.records[self.row_space.rows_of(table), : self.row_space.dim]

    def state(self, table: str) -> dict[str, Records]:
        """Views of a table's optimizer state by field, each ``[rows, floats]``."""
        rows = self.records[self.row_space.rows_of(table)]
        return {name: rows[:, self.column(name) : self.column(name) + width] for name, width in self.fields.items()}
