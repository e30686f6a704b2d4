"""One piece of text to columns of codes: what a record means, checked field by field.

R records, n dense features, F categorical features. A *code* is what a value is before tables are known: the 64-bit
hash of its bytes (vocabulary, hash) or already its row (bins, integers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.data.schema import CategoricalFeature, Schema
from pibroch.data.text import Bytes, Positions, find_fields, hash_fields, parse_numbers, split_items
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW, log_bin_rows, transform_dense
from pibroch.errors import DataError

_SHOWN_BAD_RECORDS = 5
_Fields = tuple[Bytes, Positions, Positions]


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one feature: uint64 ``[R]``, or ``[V]`` with int64 ``lengths [R]`` where the feature is multi-hot."""

    values: NDArray[np.uint64]
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was left out, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """The good records of a piece, and what is known of the bad ones (the first few are kept)."""

    labels: NDArray[np.uint8]
    dense: tuple[NDArray[np.float32], ...]
    codes: tuple[Codes, ...]
    num_bad: int
    bad: tuple[BadRecord, ...]


class PieceParser:
    """Parses pieces of one source.

    Args:
        schema: the features wanted.
        columns: the columns of the source, in order.

    Raises:
        DataError: when the source lacks a column.
    """

    def __init__(self, schema: Schema, columns: tuple[str, ...]) -> None:
        used = schema.used_columns()
        if missing := [column for column in used if column not in columns]:
            raise DataError(
                f"the columns {', '.join(columns)[:160]}", f"a column `{missing[0]}`", "correct the schema or the file"
            )
        self._schema, self._columns = schema, columns
        self._place = {column: place for place, column in enumerate(used)}
        self._wanted = np.array([self._place.get(column, -1) for column in columns], np.int64)
        numeric = [feature.column for feature in schema.dense]
        numeric += [feature.column for feature in schema.categorical if feature.binning == "log"]
        self._numeric = tuple(dict.fromkeys([schema.label, *numeric]))

    def parse(self, text: bytes, first_line: int = 1) -> ParsedPiece:
        """Parse whole records; ``first_line`` is the number of the first line, for messages."""
        buffer = np.frombuffer(text, np.uint8).copy()
        capacity = text.count(b"\n") + 1
        bounds = np.zeros((capacity, len(self._place), 2), np.int64)
        records = np.empty((capacity, 4), np.int64)
        separator = ord(self._schema.separator)
        count = find_fields(buffer, separator, self._schema.quotes, self._wanted, bounds, records)
        bounds, records = bounds[:count], records[:count]
        numbers, checks = self._numbers(buffer, bounds, records)
        good = np.logical_and.reduce([passed for passed, _ in checks])
        bad = np.flatnonzero(~good)
        shown = tuple(
            BadRecord(first_line + int(records[i, 3]), next(why(i) for passed, why in checks if not passed[i]))
            for i in bad[:_SHOWN_BAD_RECORDS]
        )
        if len(bad):
            bounds, numbers = bounds[good], {column: values[good] for column, values in numbers.items()}
        schema = self._schema
        return ParsedPiece(
            numbers[schema.label].astype(np.uint8),
            tuple(transform_dense(numbers[feature.column], feature.transform) for feature in schema.dense),
            tuple(self._codes(feature, buffer, bounds, numbers) for feature in schema.categorical),
            len(bad),
            shown,
        )

    def _numbers(self, buffer: Bytes, bounds: Positions, records: Positions) -> tuple[
        dict[str, NDArray[np.float64]], list[tuple[NDArray[np.bool_], Callable[[int], str]]]
    ]:  # fmt: skip
        """The numeric columns, and for each check its result per record with the reason when it failed."""
        need = len(self._columns)
        checks: list[tuple[NDArray[np.bool_], Callable[[int], str]]] = [
            (records[:, 2] == need, lambda i: f"{records[i, 2]} columns instead of {need}")
        ]
        values: dict[str, NDArray[np.float64]] = {}

        def shown(i: int, column: str) -> str:
            start, end = bounds[i, self._place[column]]
            return f"`{buffer[start : min(end, start + 40)].tobytes().decode('utf-8', 'replace')}` as {column}"

        for column in self._numeric:
            place = self._place[column]
            values[column], good = parse_numbers(buffer, bounds[:, place, 0], bounds[:, place, 1])
            if column == self._schema.label:
                is_label = good & ((values[column] == 0) | (values[column] == 1))
                checks.append((is_label, lambda i, c=column: f"{shown(i, c)}, a label must be 0 or 1"))  # type: ignore[misc]
            else:
                checks.append((good, lambda i, c=column: f"{shown(i, c)}, a finite number is needed"))  # type: ignore[misc]
        return values, checks

    def _codes(
        self, feature: CategoricalFeature, buffer: Bytes, bounds: Positions, numbers: dict[str, NDArray[np.float64]]
    ) -> Codes:
        if feature.binning == "log":
            return Codes(log_bin_rows(numbers[feature.column]).astype(np.uint64))
        place = self._place[feature.column]
        return field_codes(feature, (buffer, bounds[:, place, 0], bounds[:, place, 1]))


def field_codes(feature: CategoricalFeature, fields: _Fields) -> Codes:
    """Codes of raw fields ``(text, starts [R], ends [R])``; the one path for preparation and serving."""
    text, starts, ends = fields
    lengths = None
    if feature.multi_hot:
        lengths, starts, ends = split_items(text, starts, ends, ord(feature.delimiter))
    if feature.characters is not None:
        first, last = feature.characters
        starts, ends = np.minimum(starts + first, ends), np.minimum(starts + last, ends)
    if feature.encoding == "integer":
        return Codes(_integer_rows(feature, text, starts, ends), lengths)
    return Codes(hash_fields(text, starts, ends), lengths)


def _integer_rows(feature: CategoricalFeature, text: Bytes, starts: Positions, ends: Positions) -> NDArray[np.uint64]:
    values, good = parse_numbers(text, starts, ends)
    inside = good & (values >= 0) & (values < (feature.num_buckets or 0)) & (values == np.floor(values))
    rows = np.where(inside, FIRST_ROW + np.where(inside, values, 0), UNKNOWN_ROW)
    return np.where(np.isnan(values), MISSING_ROW, rows).astype(np.uint64)
