"""Lines of text in a request, read by the parser of preparation, into the same fields."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.text import RECORD_ITEMS, Positions, find_fields
from pibroch.data.quotes import find_swallowed
from pibroch.data.schema import Schema
from pibroch.data.sources import BYTE_ORDER_MARK, split_record
from pibroch.errors import DataError


def fields_of_lines(
    body: bytes, schema: Schema, columns: Sequence[str], max_rows: int
) -> dict[str, list[object]]:
    """The bytes of some columns, B values each.

    Args:
        body: lines as preparation reads them, with a header unless the schema names the columns;
            all columns that training alone reads may be left out.
        schema: says how lines are written.
        columns: wanted.
        max_rows: more lines are refused before they are read.

    Raises:
        DataError: for lines that preparation would not read, or too many of them.
    """
    text = body.removeprefix(BYTE_ORDER_MARK)
    names = schema.columns
    if names is None:
        end = text.find(b"\n") + 1 or len(text)
        names = tuple(split_record(text[:end], schema.separator, schema.quotes))
        text = text[end:]
    places = {name: place for place, name in enumerate(names)}
    is_unique = len(places) == len(names)
    if wrong := [c for c in columns if c not in places or not (is_unique or names.count(c) == 1)]:
        raise DataError(
            f"a header with {names.count(wrong[0])} columns `{wrong[0][:80]}`",
            f"{schema.separator.join(columns)[:400]} as the first line",
        )
    buffer = np.frombuffer(text, np.uint8).copy()
    capacity = min(text.count(b"\n"), max_rows) + 1
    bounds = np.empty((capacity, len(names), 2), np.int64)
    records = np.empty((capacity, RECORD_ITEMS), np.int64)
    every = np.arange(len(names))
    count = find_fields(buffer, ord(schema.separator), schema.quotes, every, bounds, records)
    if count > max_rows:
        raise DataError(f"more than {max_rows} rows", f"1 to {max_rows} in a request")
    bounds = bounds[:count]
    records = records[:count]
    has_label = records[:, 2] == len(names)
    wanted = np.array([places[column] for column in columns], np.int64)
    if schema.quotes and ((records[:, 4] > 1) | (records[:, 5] != 0)).any():
        _refuse_swallowed(text, schema, records, names, has_label)
    all_labelled = has_label.all()
    if not all_labelled or len(names) == 1:
        _refuse_lengths(text, schema, records, names, has_label)
    labels = [places[column] for column in schema.training_columns if column in places]
    if all_labelled or not labels:
        bounds = bounds[:, wanted]
    else:
        shorter = wanted - np.sum(wanted > np.array(labels)[:, None], 0)
        of_records = np.where(has_label[:, None], wanted, shorter)
        bounds = bounds[np.arange(count)[:, None], of_records]
    unquoted = buffer.tobytes()
    (starts, ends) = bounds.T.tolist()
    return {
        column: [unquoted[start:end] for start, end in zip(*fields, strict=True)]
        for column, *fields in zip(columns, starts, ends, strict=True)
    }


def _refuse_swallowed(
    text: bytes,
    schema: Schema,
    records: Positions,
    names: tuple[str, ...],
    has_label: NDArray[np.bool_],
) -> None:
    """Refuse records of which preparation would say that quotes are not closed."""
    without = tuple(name for name in names if name not in schema.training_columns)
    for header, chosen in ((names, np.arange(len(records))), (without, np.flatnonzero(~has_label))):
        numeric = [header.index(c) for c in schema.numeric_columns() if c in header]
        swallowed = find_swallowed(
            text,
            records[chosen],
            ord(schema.separator),
            len(header),
            numeric,
            schema.has_plain_label and schema.label in header,
        )
        if swallowed.records.any():
            wrong = int(np.flatnonzero(swallowed.records)[0])
            raise DataError(f"row {chosen[wrong]} that cannot be read", swallowed.why(wrong))


def _refuse_lengths(
    text: bytes,
    schema: Schema,
    records: Positions,
    names: tuple[str, ...],
    has_label: NDArray[np.bool_],
) -> None:
    """Refuse records of other numbers of columns, and blank lines that may be missing values."""
    num_labels = len(set(schema.training_columns) & set(names))
    num_columns = len(names) - num_labels
    if (wrong := ~has_label & (records[:, 2] != num_columns)).any():
        row = int(np.flatnonzero(wrong)[0])
        need = f"{len(names)}, or one less without the label"
        if num_labels > 1:
            need = f"{len(names)}, or {num_columns} without {', '.join(schema.training_columns)}"
        raise DataError(f"{records[row, 2]} fields in row {row}", need)
    num_lines = text.count(b"\n") + (not text.endswith(b"\n"))
    if num_columns == 1 and text and records[:, 4].sum() != num_lines:
        do = "send null in JSON for missing"
        raise DataError("a blank line, which has no value", "a value in each line", do)
