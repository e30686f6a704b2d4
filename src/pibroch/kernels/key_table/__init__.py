"""Rows by any int64 key, with when and how often each was seen. C rows, V keys."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints
from pibroch.kernels.key_table import numba
from pibroch.kernels.key_table.numba import (
    MOST_COUNT,
    MOST_ROWS,
    MOST_STEP,
    KeyTable,
    count_distances,
    insert,
    rebuild,
    remove,
)

__all__ = [
    "MOST_COUNT",
    "MOST_ROWS",
    "MOST_STEP",
    "KeyTable",
    "admit_tables",
    "copy_of",
    "count_distances",
    "empty_table",
    "find",
    "insert",
    "least",
    "older_than",
    "place_of",
    "rebuild",
    "remove",
    "touch",
    "touch_tables",
]

KEYS_PER_THREAD = 4096  # below which a further thread is not worth waking
SAMPLE = 1 << 14  # rows by whose scores it is guessed where the least ones end
LEAST = np.iinfo(np.int64).min
GREATEST = np.iinfo(np.int64).max
_NONE = np.empty(0, np.int64)
_NONE_32 = np.empty(0, np.int32)
_NO_SLOTS = np.empty(0, np.uint64)


def empty_table(num_rows: int) -> KeyTable:
    """A table of so many rows, all free; some 32 bytes each."""
    assert 0 < num_rows <= MOST_ROWS, num_rows
    table = KeyTable(
        np.zeros(int(num_rows / numba.ROWS_PER_SLOT) + 2, np.uint64),
        np.zeros((num_rows, 2), np.int64),
        np.full(-(-num_rows // 64), -1, np.int64),
        np.array([0, 0, secrets.randbits(63)], np.int64),
    )
    if num_rows % 64:
        table.free[-1] = (1 << num_rows % 64) - 1
    return table


def copy_of(table: KeyTable) -> KeyTable:
    """Another one like it."""
    return KeyTable(
        table.slots.copy(), table.entries.copy(), table.free.copy(), table.counts.copy()
    )


def find(table: KeyTable, keys: Ints) -> Ints:
    """The row of each key, -1 for one that is absent, int64 ``[V]`` both."""
    rows = np.empty(len(keys), np.int64)
    parallel.run(
        numba.visit, len(keys), table, keys, _NONE_32, 0, 0, rows, _NONE_32, grain=KEYS_PER_THREAD
    )
    return rows


def touch(
    table: KeyTable, keys: Ints, counts: NDArray[np.int32] | None, step: int, half_life: int = 0
) -> tuple[Ints, NDArray[np.int32]]:
    """Find keys, and note for those that are there that they were seen in this step.

    Args:
        table: is written to.
        keys: int64 ``[V]``, may repeat.
        counts: ``[V]``, how often each was seen; once when absent.
        step: from 1 on.
        half_life: counts are halved at each multiple of so many steps; 0 for never.

    Returns:
        Their rows int64 ``[V]``, -1 for those that are absent, and the positions of the latter.
    """
    rows = np.empty(len(keys), np.int64)
    misses = np.empty(len(keys), np.int32)
    each = _NONE_32 if counts is None else counts
    num = numba.visit(table, keys, each, step, half_life, rows, misses, 0, len(keys))
    return rows, misses[:num]


def place_of(table: KeyTable, totals: Ints, first_row: int) -> Ints:
    """Where a table lies, for :func:`touch_tables` and :func:`admit_tables`, int64 ``[8]``.

    Args:
        table: it.
        totals: int64, at least 4: steps, keys in them, of these those that were there, and how
            many were given rows.
        first_row: the number of the table's first row.
    """
    slots, entries, free, counts = table
    ends = (slots.ctypes.data, len(slots), entries.ctypes.data, len(entries))
    more = (free.ctypes.data, counts.ctypes.data)
    return np.array([*ends, totals.ctypes.data, first_row, *more], np.int64)


def touch_tables(
    places: Ints,
    keys: Ints,
    counts: NDArray[np.int32] | None,
    bounds: Ints,
    half_lives: Ints,
    known_rows: Ints | None = None,
) -> tuple[Ints, NDArray[np.int32], Ints]:
    """As :func:`touch` of several tables, each with keys of its own; tables are shared by threads.

    A step begins in each of them, and their totals grow.

    Args:
        places: ``[T, 8]``, of tables that the caller holds, see :func:`place_of`.
        keys: ``[V]``, of one table after the other.
        counts: ``[V]``; once each when absent.
        bounds: ``[T + 1]``, of each table's keys.
        half_lives: ``[T]``.
        known_rows: ``[V]``, what tables that were like these have returned, and then given to those
            that were absent: no key is searched.

    Returns:
        Rows ``[V]``, room for positions of absent keys ``[V]`` in which those of a table begin
        where its keys do and count from there, and how many there are by table ``[T]``.
    """
    rows = np.empty(len(keys), np.int64) if known_rows is None else known_rows
    misses = np.empty(len(keys), np.int32)
    num_misses = np.empty(len(places), np.int64)
    num_parts = max(1, min(parallel.num_threads(), len(keys) // KEYS_PER_THREAD))
    wanted = [len(keys) * part // num_parts for part in range(1, num_parts)]
    cuts = [0, *np.searchsorted(bounds, wanted).tolist(), len(places)]
    parallel.run_ranges(
        numba.visit_tables, cuts, places, keys, _NONE_32 if counts is None else counts, bounds,
        half_lives, rows, known_rows is not None, misses, num_misses, _NO_SLOTS,
    )  # fmt: skip
    return rows, misses, num_misses


def admit_tables(
    places: Ints,
    keys: Ints,
    counts: NDArray[np.int32] | None,
    bounds: Ints,
    wanted: NDArray[np.bool_],
    rows: Ints,
    misses: NDArray[np.int32],
    num_misses: Ints,
) -> list[tuple[Ints, Ints] | None]:
    """Give absent keys rows, as :func:`insert` of several tables; tables are shared by threads.

    Args:
        places: as for :func:`touch_tables`, with its other arguments and what it returned.
        keys: ``[V]``.
        counts: ``[V]``; once each when absent.
        bounds: ``[T + 1]``.
        wanted: ``[T]``, which tables are meant.
        rows: ``[V]``, receives those of absent keys.
        misses: ``[V]``.
        num_misses: ``[T]``.

    Returns:
        By table the distinct keys that were absent, rising, and their rows; ``None`` where nothing
        was done: for tables that are not meant, those that may have fewer free rows, and where no
        key is absent.
    """
    ends = np.cumsum(num_misses)
    total = int(ends[-1])
    if not total:
        return [None] * len(places)
    fresh_keys = np.empty(total, np.int64)
    fresh_rows = np.empty(total, np.int64)
    num_fresh = np.empty(len(places), np.int64)
    begins = ends - num_misses
    num_parts = max(1, min(parallel.num_threads(), total // KEYS_PER_THREAD))
    marks = [total * part // num_parts for part in range(1, num_parts)]
    cuts = [0, *np.searchsorted(begins, marks).tolist(), len(places)]
    parallel.run_ranges(
        numba.admit_tables, cuts, places, keys, _NONE_32 if counts is None else counts, bounds,
        wanted, rows, misses, num_misses, begins, fresh_keys, fresh_rows, num_fresh, _NO_SLOTS,
    )  # fmt: skip
    return [
        (fresh_keys[begin : begin + num], fresh_rows[begin : begin + num]) if num >= 0 else None
        for begin, num in zip(begins.tolist(), num_fresh.tolist(), strict=True)
    ]


def older_than(table: KeyTable, bound: int, step: int) -> Ints:
    """The rows in use whose keys were seen before step ``bound`` last, rising; O(C).

    ``step`` is the one that is now, not before ``bound``.
    """
    room = np.empty(len(table.entries), np.int32)
    found, *_ = numba.scan(table.entries, _NONE, False, 0, step, bound, LEAST, room, _NONE_32)
    return room[:found].astype(np.int64)


def least(
    table: KeyTable,
    num: int,
    step: int,
    *,
    by_count: bool = False,
    half_life: int = 0,
    given: Ints = _NONE,
) -> Ints:
    """The ``num`` rows with the least scores, equal ones by rising key; O(C).

    Rows are rising. Those seen in this step are left out, so there may be fewer.

    A sample says between which scores the last one will lie, so one pass over the entries collects
    those below, and the few between are looked at again. Where the sample was wrong, all are.

    Args:
        table: is read.
        num: of rows.
        step: that is now.
        by_count: scores are decayed counts, equal ones by last step; else last steps.
        half_life: see :func:`touch`.
        given: other scores by row ``[C]``.
    """
    entries = table.entries
    settings = by_count, half_life, step
    below = np.empty(num, np.int32)
    within = np.empty(len(entries), np.int32)
    bounds = _bounds(table, num, given, *settings)
    num_below, num_within, _ = numba.scan(entries, given, *settings, *bounds, below, within)
    if not num_below <= num <= num_below + num_within:
        everything = (LEAST, GREATEST)
        num_below, num_within, _ = numba.scan(entries, given, *settings, *everything, below, within)
    some = within[:num_within].astype(np.int64)
    wanted = num - num_below
    if wanted < num_within:
        some = some[_smallest(_scores(entries, some, given, *settings), entries[some, 0], wanted)]
    rows = np.concatenate([below[:num_below], some])
    rows.sort(kind="stable")  # by merging two runs
    return rows


def _scores(
    entries: Ints, rows: Ints, given: Ints, by_count: bool, half_life: int, step: int
) -> Ints:
    """Of some rows in use, int64 ``[R]`` both."""
    if len(given):
        return given[rows]
    scores = np.empty(len(rows), np.int64)
    numba.scores_of(entries, rows, by_count, half_life, step, scores)
    return scores


def _bounds(
    table: KeyTable, num: int, given: Ints, by_count: bool, half_life: int, step: int
) -> tuple[int, int]:
    """Two scores between which that of the ``num``-th lies, almost surely where C is large."""
    entries = table.entries
    rows = np.arange(0, len(entries), max(1, len(entries) // SAMPLE))
    seen = entries[rows, 1]
    rows = rows[(seen != 0) & (seen >> 32 != step)]
    if len(entries) < 4 * SAMPLE or not len(rows):
        return LEAST, GREATEST
    scores = np.sort(_scores(entries, rows, given, by_count, half_life, step))
    share = min(1.0, num / int(table.counts[0]))
    place = share * len(scores)
    margin = 4 * (place * (1 - share)) ** 0.5 + 8
    first = int(place - margin)
    last = int(place + margin)
    return (
        int(scores[first]) if first >= 0 else LEAST,
        int(scores[last]) if last < len(scores) else GREATEST,
    )


def _smallest(scores: Ints, keys: Ints, num: int) -> NDArray[np.bool_]:
    """Which are the ``num`` smallest by (score, key), as a mask; ``num`` is less than all."""
    if num == 0:
        return np.zeros(len(scores), np.bool_)
    last = np.partition(scores, num - 1)[num - 1]
    chosen: NDArray[np.bool_] = scores < last
    tied = np.flatnonzero(scores == last)
    more = num - int(np.count_nonzero(chosen))
    last_key = np.partition(keys[tied], more - 1)[more - 1]
    chosen[tied] = keys[tied] <= last_key
    return chosen
