"""Quotes that are not closed: what stands inside them are records that were to be read, not text.

A newline inside a quoted field is right in CSV, so that nothing but what stands on the lines tells
a text from records that a missing quote has swallowed. A record of several lines is taken for the
latter when its quote never closes, when text follows the closing quote (it opens another field),
when a line in its middle is by itself a record, with as many columns, 0 or 1 as its label and
numbers where they are needed, or when all its lines are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.text import (
    NOT_CLOSED,
    RECORD_ITEMS,
    TEXT_AFTER_QUOTE,
    Positions,
    find_fields,
    parse_numbers,
)


@dataclass(frozen=True, slots=True)
class Swallowed:
    """What quotes that are not closed have done to R records.

    Attributes:
        records: whether it happened to the record, bool ``[R]``.
        num_inside: of each record, its lines that are records by themselves and at least 1, int64
            ``[R]``.
        why: the reason, for a record to which it happened.
    """

    records: NDArray[np.bool_]
    num_inside: NDArray[np.int64]
    why: Callable[[int], str]


def find_swallowed(
    text: bytes,
    records: Positions,
    separator: int,
    num_columns: int,
    numeric: Sequence[int],
    has_label: bool = True,
) -> Swallowed:
    """Look at the lines of each record that has several.

    Args:
        text: as it was read, quotes and all.
        records: from :func:`find_fields`, ``[R, 6]``.
        separator: byte between columns.
        num_columns: of a good record.
        numeric: places of the label and the numbers among the columns, the label's first.
        has_label: whether the first of them is the label.
    """
    is_swallowed = records[:, 5] != 0
    num_inside = np.ones(len(records), np.int64)
    several = np.flatnonzero(records[:, 4] > 1)
    if len(several):
        is_record, owner = _lines(
            text, records[several], separator, num_columns, numeric, has_label
        )
        num_records = np.bincount(owner, is_record, len(several)).astype(np.int64)
        num_lines = np.bincount(owner, minlength=len(several))
        first = np.cumsum(num_lines) - num_lines
        at_ends = is_record[first].astype(np.int64) + is_record[first + num_lines - 1]
        is_swallowed[several] |= (num_records > at_ends) | (num_records == num_lines)
        num_inside[several] = np.maximum(num_records, 1)

    def why(i: int) -> str:
        if records[i, 5] == NOT_CLOSED:
            end = "and is never closed"
        elif records[i, 5] == TEXT_AFTER_QUOTE:
            end = "and text follows where it is closed"
        else:
            end = f"and {num_inside[i]} of them are records by themselves"
        lines = f"a quote opens in this record, {records[i, 4]} lines stand in it {end}"
        return f"{lines}: close it, or set `quotes = false` in the schema where quotes mean nothing"

    return Swallowed(is_swallowed, num_inside, why)


def _lines(
    text: bytes,
    records: Positions,
    separator: int,
    num_columns: int,
    numeric: Sequence[int],
    has_label: bool,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Of each line of some records, whether it is a record itself, and whose line it is.

    Quotes count as ordinary bytes.
    """
    raw = [text[first:end] for first, end in records[:, :2].tolist()]
    buffer = np.frombuffer(b"\n".join(raw), np.uint8)
    capacity = int(records[:, 4].sum())
    bounds = np.zeros((capacity, len(numeric), 2), np.int64)
    lines = np.empty((capacity, RECORD_ITEMS), np.int64)
    wanted = np.full(num_columns, -1, np.int64)
    wanted[list(numeric)] = np.arange(len(numeric))
    count = find_fields(buffer.copy(), separator, False, wanted, bounds, lines)
    bounds = bounds[:count]
    lines = lines[:count]
    is_record = lines[:, 2] == num_columns
    for place in range(len(numeric)):
        values, good = parse_numbers(buffer, bounds[:, place, 0], bounds[:, place, 1])
        is_label = has_label and place == 0
        is_record &= good & (((values == 0) | (values == 1)) if is_label else True)
    begins = np.cumsum([0] + [len(record) + 1 for record in raw[:-1]])
    return is_record, np.searchsorted(begins, lines[:, 0], side="right") - 1
