"""A row index with a state: ids have rows at random."""

from dataclasses import dataclass

import numpy as np

from pibroch.config.row_index import RowIndexConfig
from pibroch.embedding.row_index import IndexKind, RowIndex


class ShuffledIndex(RowIndex):
    """Each one made is another, so that one without another's state has other rows."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.row_of = np.random.default_rng().permutation(capacity)

    def rows_of(self, ids):
        is_known = (ids >= 0) & (ids < self.capacity)
        return np.where(is_known, self.row_of[np.where(is_known, ids, 0)], -1)

    def ids_of(self, rows):
        return np.argsort(self.row_of)[rows]

    def state(self):
        return {"row_of": self.row_of}

    def load_state(self, state):
        self.row_of = state["row_of"].copy()


class ShuffledConfig(RowIndexConfig):
    note: str = ""


@dataclass(frozen=True)
class Shuffled(IndexKind):
    name = "shuffled"
    section = ShuffledConfig
    note: str = ""

    def index(self, capacity):
        return ShuffledIndex(capacity)
