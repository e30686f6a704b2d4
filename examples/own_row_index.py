"""A row index of one's own: ids share the rows of a small table. See docs/extending/row-index.md.

python examples/own_row_index.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field

import pibroch as pb
from pibroch.config.row_index import RowIndexConfig
from pibroch.embedding import IndexKind, RowIndex
from pibroch.kernels.arrays import Ints


class SharedIndex(RowIndex):
    """Ids whose remainders are alike have one row."""

    @property
    def last_id(self) -> int:
        """No id is too large."""
        return (1 << 63) - 1

    def rows_of(self, ids: Ints) -> Ints:
        """The remainders; a negative number is no id, and no row."""
        return np.where(ids < 0, ids, ids % self.capacity)

    def ids_of(self, rows: Ints) -> Ints:
        """The first id of each."""
        return rows


class SharedConfig(RowIndexConfig):
    """``[embedding.rows]`` of a recipe."""

    capacity: int = Field(ge=1)

    def num_rows(self, num_ids: int | None) -> int:
        """However many ids the column has."""
        return self.capacity

    def options(self) -> dict[str, Any]:
        """The table itself knows its capacity."""
        return {}


@dataclass(frozen=True)
class Shared(IndexKind):
    """Ids share rows by their remainder."""

    name = "shared"
    section = SharedConfig

    def index(self, capacity: int) -> RowIndex:
        """A fresh one for a table of so many rows."""
        return SharedIndex(capacity)


def main() -> None:
    """Ids far beyond the table's four rows."""
    embeddings = pb.Embeddings([pb.Table("user", 4, 8, rows=Shared())], pb.SGD(lr=0.1))
    ids = torch.tensor([[3, 7, 1 << 40]])
    batch = pb.JaggedBatch.from_one_hot(torch.zeros(3, 0), ["user"], ids, torch.zeros(3))
    three, seven, large = embeddings(batch)[:, 0]
    print(f"3 and 7 share a row: {three.equal(seven)}; 3 and 2**40: {three.equal(large)}")


if __name__ == "__main__":
    main()
