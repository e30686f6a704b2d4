"""A row index that learns while a run trains, and the exchange that tells it the ids of each batch.

Ids have rows in the order in which training first saw them, up to the table's capacity; all others
share row 0. It counts, too, how often training read each row: nothing of its state can be lost, or
told twice, without a trace.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from pibroch.config.exchange import ExchangeSection, ExchangeSpec
from pibroch.config.row_index import RowIndexConfig
from pibroch.embedding.row_index import IndexKind, RowIndex

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from own_exchange import AskFirst

NONE = -1


class RememberedIndex(RowIndex):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.id_of_row = np.full(capacity, NONE)
        self.reads_of_row = np.zeros(capacity, np.int64)

    def rows_of(self, ids):
        row_of = {id_: row for row, id_ in enumerate(self.id_of_row.tolist()) if id_ != NONE}
        return np.array([row_of.get(id_, 0) for id_ in ids.tolist()], np.int64)

    def ids_of(self, rows):
        return self.id_of_row[rows]

    def remember(self, ids):
        """The ids of a global batch, in its order."""
        distinct, first = np.unique(ids, return_index=True)
        new = distinct[np.argsort(first)]
        new = new[~np.isin(new, self.id_of_row)]
        free = np.flatnonzero(self.id_of_row[1:] == NONE)[: len(new)] + 1
        self.id_of_row[free] = new[: len(free)]
        self.reads_of_row += np.bincount(self.rows_of(ids), minlength=self.capacity)

    def state(self):
        return {"id_of_row": self.id_of_row, "reads_of_row": self.reads_of_row}

    def load_state(self, state):
        self.id_of_row = state["id_of_row"].copy()
        self.reads_of_row = state["reads_of_row"].copy()


class RememberedConfig(RowIndexConfig):
    capacity: int = Field(ge=1)

    def num_rows(self, num_ids):
        return self.capacity

    def options(self):
        return {}


@dataclass(frozen=True)
class Remembered(IndexKind):
    name = "remembered"
    section = RememberedConfig

    def index(self, capacity):
        return RememberedIndex(capacity)


class AskAndRemember(AskFirst):
    """Before rows of a batch to be trained on are asked for, all ranks tell all ids."""

    def lookup(self, batch, trains, averaged_at=None):
        for group in self._groups if trains else ():
            for table in group.space.tables:
                index = group.space.indices[table.name]
                if isinstance(index, RememberedIndex):
                    own = batch.pick(table.features).values.tolist()
                    ids = [id_ for each in self._channel.gather(own) for id_ in each]
                    index.remember(np.array(ids, np.int64))
        return super().lookup(batch, trains, averaged_at)


class AskAndRememberSection(ExchangeSection):
    """Nothing to choose."""


SPEC = ExchangeSpec("ask_and_remember", "", AskAndRememberSection, AskAndRemember)
