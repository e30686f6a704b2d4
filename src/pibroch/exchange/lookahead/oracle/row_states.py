"""What the oracle knows of rows: of all while they are few, else of those in the window alone.

A row is in the window from the step that touches it first until nobody in the window touches it
again; before and after it is at home, and there is nothing to know. So a table of addresses numbers
the rows that are in the window, state lies at these numbers, and touches carry them: addresses are
looked up once a touch, when it is entered.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np

from pibroch.exchange.lookahead.oracle.kernels import address_table as table_kernels
from pibroch.exchange.lookahead.oracle.kernels.address_table import PLACES_PER_ADDRESS
from pibroch.exchange.lookahead.oracle.kernels.window import HOME, Places, Ranks
from pibroch.kernels.arrays import RowIds

MOST_ROWS_IN_FULL = 1 << 23
"""Rows whose state is kept in full, in 75 MB.

Without look-ups a step is planned in a tenth to a quarter less time.
"""
_FIRST_PLACES = 1 << 16


class StateArrays(TypedDict):
    """State by number, see :class:`~pibroch.exchange.lookahead.oracle.kernels.window.Window`."""

    newest: Places
    holder: Ranks
    slot: Places


class RowStates:
    """State of rows, each at a number.

    Args:
        num_rows: of all tables.
        is_full: whether state is kept of all rows, each at its address.
        row_type: of addresses.
        rank_type: of ranks.
    """

    def __init__(
        self,
        num_rows: int,
        is_full: bool,
        row_type: np.dtype[Any],
        rank_type: np.dtype[Any] = np.dtype(np.int8),
    ) -> None:
        self.is_full = is_full
        num_places = PLACES_PER_ADDRESS if is_full else _FIRST_PLACES
        self._table = table_kernels.empty_table(num_places, row_type)
        size = num_rows if is_full else num_places // PLACES_PER_ADDRESS
        self._newest = np.zeros(size, np.int32)
        self._holder = np.full(size, HOME, rank_type)
        self._slot = np.empty(size, np.int32)

    def arrays(self) -> StateArrays:
        """The arrays of all states; entering more rows may replace them by larger ones."""
        return StateArrays(newest=self._newest, holder=self._holder, slot=self._slot)

    def enter(self, rows: RowIds) -> RowIds:
        """The numbers of rows that come into the window, or are there; duplicates are allowed."""
        if self.is_full:
            return rows
        self._make_room(len(rows))
        numbers = np.empty(len(rows), np.int32)
        table_kernels.find_or_add(self._table, rows, numbers)
        return numbers

    def leave(self, row_of_touch: RowIds, touches: Places) -> None:
        """Remove the rows of some touches, which are at home and in nobody's window any more."""
        if not self.is_full:
            table_kernels.remove(self._table, row_of_touch[touches])

    def clear(self) -> None:
        """Mark all rows as at home and in nobody's window."""
        self._table.pairs[:] = 0
        self._table.counts[:3] = 0  # the multiplier stays

    def _make_room(self, num_more: int) -> None:
        """Grow until there are places for ``num_more`` rows."""
        table = self._table
        num_needed = PLACES_PER_ADDRESS * (int(table.counts[0]) + num_more)
        if num_needed <= len(table.pairs):
            return
        num_places = 1 << (num_needed - 1).bit_length()
        self._table = table_kernels.empty_table(num_places, table.pairs.dtype)
        table_kernels.copy_into(table, self._table)
        more = num_places // PLACES_PER_ADDRESS - len(self._newest)
        self._newest = np.concatenate([self._newest, np.zeros(more, np.int32)])
        self._holder = np.concatenate([self._holder, np.full(more, HOME, self._holder.dtype)])
        self._slot = np.concatenate([self._slot, np.empty(more, np.int32)])
