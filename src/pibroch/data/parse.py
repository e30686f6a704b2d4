"""One piece of text to columns of codes: what a record means, checked field by field.

R records, n dense features, F categorical features. A *code* is what a value is before tables are
known: the 64-bit hash of its bytes (vocabulary, hash, raw) or already its row (bins, integers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.text import (
    RECORD_ITEMS,
    Bytes,
    Positions,
    cut_characters,
    find_fields,
    hash_fields,
    hash_integers,
    numbers_of_integers,
    parse_numbers,
    split_items,
)
from pibroch.data.layout import ITEM_END, Layout, hint_for_header, hint_for_record, shown
from pibroch.data.quotes import find_swallowed
from pibroch.data.schema import CategoricalFeature, DenseFeature, Events, Schema
from pibroch.data.targets import (
    checked_labels,
    checked_weights,
    clicks_of,
    named_labels,
    stored_labels,
)
from pibroch.data.transform import (
    FIRST_ROW,
    LARGEST,
    MISSING_ROW,
    UNKNOWN_ROW,
    bin_rows,
    standardised,
    transform_dense,
)
from pibroch.data.values import TEXT_RULES
from pibroch.errors import DataError
from pibroch.kernels.arrays import Array

_SHOWN_BAD_RECORDS = 5
_MOST_TIME = 2.0**62
_DOUBTED_RECORDS = 1024
_OUR_DAYS = 3e11, 4e12  # from 1979 to 2096, in milliseconds
_MS_PER_UNIT = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
Fields = tuple[Bytes, Positions, Positions]


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one feature: uint64 ``[R]``, or ``[V]`` with int64 ``lengths [R]`` if multi-hot."""

    values: NDArray[np.uint64]
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """The values of a column that is passed through, one behind the other.

    Attributes:
        text: their bytes, uint8.
        lengths: int64 ``[R]``.
    """

    text: Bytes
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Integers:
    """Columns of whole numbers that need not become text.

    Attributes:
        columns: their names, C of them.
        values: int64 ``[R, C]``.
        is_missing: bool ``[R, C]``; values there are 0.
    """

    columns: tuple[str, ...]
    values: NDArray[np.int64]
    is_missing: NDArray[np.bool_]

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of a column values ``[R]``, and which are missing ``[R]``."""
        place = self.columns.index(name)
        return self.values[:, place], self.is_missing[:, place]

    def chosen(self, records: NDArray[np.bool_]) -> Integers:
        """Of some records."""
        if not self.columns:
            return self
        return Integers(self.columns, self.values[records], self.is_missing[records])


NO_INTEGERS = Integers((), np.empty((0, 0), np.int64), np.empty((0, 0), np.bool_))


@dataclass(frozen=True, slots=True)
class _Cells:
    """The values of records: fields of a text ``[R, W, 2]``, and integers beside it."""

    buffer: Bytes
    bounds: Positions
    integers: Integers

    def __len__(self) -> int:
        return len(self.bounds)

    def chosen(self, records: NDArray[np.bool_]) -> _Cells:
        return _Cells(self.buffer, self.bounds[records], self.integers.chosen(records))


@dataclass(frozen=True, slots=True)
class LoggedEvents:
    """What a sequence is built from.

    Attributes:
        users: codes, uint64 ``[R]``.
        items: codes, uint64 ``[R]``.
        labels: uint8 ``[R]``, whether the first one is above 0.
        times: float64 ``[R]``; ``None`` where the records' order is their time.
    """

    users: NDArray[np.uint64]
    items: NDArray[np.uint64]
    labels: NDArray[np.uint8]
    times: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was left out, where it begins, why, and its text."""

    line: int
    reason: str
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """The good records of a piece, the number of bad ones and the first few of these.

    ``num_bad`` counts records that a quote without an end has swallowed as well. Labels are those
    of :func:`pibroch.data.targets.stored_labels`. ``events`` are those that sequences are made of,
    by the feature's place in the schema; ``codes`` then lack these. Weights are float32 ``[R]``,
    groups codes ``[R]``, event times int64 ``[R]`` in milliseconds since 1970. ``lines`` are where
    records begin, int64 ``[R]``; ``kept`` are columns that are passed through. ``doubts`` say what
    is probably not meant so.
    """

    labels: Array
    dense: tuple[NDArray[np.float32], ...]
    codes: tuple[Codes, ...]
    num_bad: int
    bad: tuple[BadRecord, ...]
    lines: NDArray[np.int64]
    events: Mapping[int, LoggedEvents] = field(default_factory=dict)
    sample_weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint64] | None = None
    event_times: NDArray[np.int64] | None = None
    kept: tuple[Texts, ...] = ()
    doubts: tuple[str, ...] = ()

    def with_bad(self, records: Sequence[BadRecord]) -> ParsedPiece:
        """With further bad records, which were left out before."""
        if not records:
            return self
        bad = sorted((*self.bad, *records), key=lambda record: record.line)
        return replace(
            self, num_bad=self.num_bad + len(records), bad=tuple(bad[:_SHOWN_BAD_RECORDS])
        )


class PieceParser:
    """Parses pieces of one source.

    Args:
        schema: the features wanted.
        columns: the columns of the source's text, in order.
        layout: of the source's text; by default as the schema says.
        has_labels: whether labels are read; else all are 0.
        integers: columns beside the text, of those that :func:`may_be_integers`.
        kept: columns that are passed through as they are.

    Raises:
        DataError: when the source lacks a column, or has two of that name.
    """

    def __init__(
        self,
        schema: Schema,
        columns: tuple[str, ...],
        layout: Layout | None = None,
        has_labels: bool = True,
        integers: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> None:
        self._layout = layout or Layout(schema.separator, schema.quotes)
        used = [column for column in schema.log_columns(has_labels) if column not in integers]
        used += [column for column in dict.fromkeys(kept) if column not in used]
        got = f"the columns {shown(', '.join(columns), 160)}"
        if missing := [column for column in used if column not in columns]:
            do = hint_for_header(columns, self._layout.separator, used)
            if do is None:
                do = "correct the schema or the file"
                is_label = set(missing) <= set(schema.training_columns)
                do += ", or pass --unlabelled with --vocabularies" if is_label else ""
            raise DataError(got, f"a column `{missing[0]}`", do)
        if twice := [column for column in used if columns.count(column) > 1]:
            raise DataError(
                got, f"one column `{twice[0]}`, not {columns.count(twice[0])}", "rename the others"
            )
        self._schema = schema
        self._columns = columns
        self._kept = kept
        self._place = {column: place for place, column in enumerate(used)}
        self._wanted = np.array([self._place.get(column, -1) for column in columns], np.int64)
        built = [feature.events for feature in schema.categorical if feature.events is not None]
        self._times = {time for events in built for time in events.columns(numeric=True)}
        self._numeric = tuple(
            dict.fromkeys([*schema.numeric_columns(has_labels), *sorted(self._times)])
        )
        self._has_labels = has_labels
        if schema.time is not None and has_labels:
            self._times.add(schema.time)
        if len(columns) == 1 and not integers:
            raise DataError(
                f"{got} alone, where a blank line may be a missing value or none",
                "two columns",
                "add one that is not read, or write Parquet",
            )

    def parse(
        self,
        text: bytes,
        first_line: int = 1,
        most_bad: int = _SHOWN_BAD_RECORDS,
        integers: Integers = NO_INTEGERS,
        doubts: bool = False,
    ) -> ParsedPiece:
        """Parse whole records; messages count lines, or rows, from ``first_line``.

        At most ``most_bad`` bad records are described, by their text. With ``doubts`` the first
        records are looked at for what is probably not meant so.
        """
        buffer = np.frombuffer(text, np.uint8).copy()
        capacity = text.count(b"\n") + 1
        bounds = np.zeros((capacity, len(self._place), 2), np.int64)
        records = np.empty((capacity, RECORD_ITEMS), np.int64)
        separator = ord(self._layout.separator)
        is_text = self._layout.unit == "line"
        count = find_fields(buffer, separator, self._layout.quotes, self._wanted, bounds, records)
        if not self._columns:  # integers alone
            count = len(integers.values)
            bounds = np.zeros((count, 0, 2), np.int64)
            records = np.zeros((count, RECORD_ITEMS), np.int64)
        cells = _Cells(buffer, bounds[:count], integers)
        records = records[:count]
        kept_bounds = bounds[:count, [self._place[column] for column in self._kept]]
        self._empty_nulls(cells)
        numbers, checks = self._numbers(cells, records)
        num_inside = np.ones(count, np.int64)
        if is_text and self._layout.quotes:
            numeric = [self._columns.index(column) for column in self._numeric]
            swallowed = find_swallowed(
                text,
                records,
                separator,
                len(self._columns),
                numeric,
                self._has_labels and self._schema.has_plain_label,
            )
            checks.insert(0, (~swallowed.records, swallowed.why))
            num_inside = swallowed.num_inside
        good = np.logical_and.reduce([passed for passed, _ in checks])
        bad = np.flatnonzero(~good)
        described = tuple(
            BadRecord(
                first_line + int(records[i, 3] if is_text else i),
                next(why(i) for passed, why in checks if not passed[i]),
                text[records[i, 0] : records[i, 1]],
            )
            for i in bad[:most_bad]
        )
        if len(bad):
            cells = cells.chosen(good)
            numbers = {column: values[good] for column, values in numbers.items()}
            kept_bounds = kept_bounds[good]
        lines = records[:, 3] if is_text else np.arange(count)
        schema = self._schema
        by_label = [
            numbers[column] if self._has_labels else np.zeros(len(cells))
            for column in schema.label_columns
        ]
        labels = stored_labels(by_label, schema.is_binary)
        return ParsedPiece(
            labels,
            tuple(_transformed(feature, numbers[feature.column]) for feature in schema.dense),
            tuple(self._codes(feature, cells, numbers) for feature in schema.categorical),
            int(num_inside[bad].sum()),
            described,
            first_line + lines[good],
            {
                place: self._events(feature, feature.events, cells, numbers, labels)
                for place, feature in enumerate(schema.categorical)
                if feature.events is not None
            },
            self._weights(numbers, len(cells)),
            self._groups(cells),
            self._event_times(numbers, len(cells)),
            tuple(_texts(buffer, of_column) for of_column in np.moveaxis(kept_bounds, 1, 0)),
            tuple(self._doubts(cells, numbers)) if doubts else (),
        )

    def _doubts(self, cells: _Cells, numbers: dict[str, NDArray[np.float64]]) -> Iterator[str]:
        """What is probably not meant so, a sentence each with what to do about it."""
        schema = self._schema
        some = cells.chosen(np.arange(len(cells)) < _DOUBTED_RECORDS)
        by_unit = {feature.column: "s" for feature in schema.categorical if feature.is_of_time}
        if schema.time is not None and self._has_labels:
            by_unit[schema.time] = schema.time_unit
        for column, unit in by_unit.items():
            if other := other_unit(numbers[column][:_DOUBTED_RECORDS], unit):
                do = f'write time_unit = "{other}"' if column == schema.time else "write seconds"
                yield f"`{column}` is read in {unit}, but seems to be in {other}: {do}"
        for feature in schema.categorical:
            is_text = feature.column in self._place and feature.binning is None
            if not is_text or feature.events is not None or feature.column in self._layout.lists:
                continue
            text, starts, ends = self._fields(some, feature.column)
            there = np.flatnonzero(ends - starts >= 2)
            is_list = (text[starts[there]] == ord("[")) & (text[ends[there] - 1] == ord("]"))
            if len(there) and 2 * is_list.sum() >= len(there):
                value = self._shown_field(some, there[is_list][0], feature.column)
                yield (
                    f"`{feature.name}`: `{shown(value)}` is a list written as text, which counts as"
                    f" {'items' if feature.multi_hot else 'one category'} with its brackets: write"
                    f" items between `{feature.delimiter}`, or Parquet's lists, and `multi_hot ="
                    " true`"
                )

    def _empty_nulls(self, cells: _Cells) -> None:
        for column, place in self._place.items() if self._schema.nulls else ():
            if column not in self._schema.label_columns:
                fields = self._fields(cells, column)
                cells.bounds[:, place, 1] = without_nulls(fields, self._schema.null_texts)[2]

    def _weights(
        self, numbers: dict[str, NDArray[np.float64]], num_records: int
    ) -> NDArray[np.float32] | None:
        column = self._schema.weight
        if column is None:
            return None
        weights = numbers[column] if self._has_labels else np.ones(num_records)
        return weights.astype(np.float32)

    def _groups(self, cells: _Cells) -> NDArray[np.uint64] | None:
        column = self._schema.group
        if column is None:
            return None
        if not self._has_labels:
            return np.zeros(len(cells), np.uint64)
        return self._hashes(cells, column)

    def _event_times(
        self, numbers: dict[str, NDArray[np.float64]], num_records: int
    ) -> NDArray[np.int64] | None:
        column = self._schema.time
        if column is None:
            return None
        if not self._has_labels:
            return np.zeros(num_records, np.int64)
        return milliseconds(numbers[column], self._schema.time_unit)

    def _fields(self, cells: _Cells, column: str) -> Fields:
        place = self._place[column]
        return cells.buffer, cells.bounds[:, place, 0], cells.bounds[:, place, 1]

    def _hashes(self, cells: _Cells, column: str) -> NDArray[np.uint64]:
        if column in cells.integers.columns:
            hashes: NDArray[np.uint64] = hash_integers(*cells.integers.column(column))
        else:
            hashes = hash_fields(*self._fields(cells, column))
        return hashes

    def _read_numbers(
        self, cells: _Cells, column: str
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Numbers ``[R]``, and whether each is one or missing ``[R]``."""
        if column not in cells.integers.columns:
            return parse_numbers(*self._fields(cells, column))
        values = numbers_of_integers(*cells.integers.column(column))
        return values, np.ones(len(values), np.bool_)

    def _numbers(
        self, cells: _Cells, records: Positions
    ) -> tuple[
        dict[str, NDArray[np.float64]], list[tuple[NDArray[np.bool_], Callable[[int], str]]]
    ]:
        """The numeric columns, and of each check its results by record and what failed."""
        need = len(self._columns)
        checks: list[tuple[NDArray[np.bool_], Callable[[int], str]]] = [
            (records[:, 2] == need, lambda i: f"{records[i, 2]} columns instead of {need}{hint(i)}")
        ]
        values: dict[str, NDArray[np.float64]] = {}

        def value(i: int, column: str) -> str:
            field = self._shown_field(cells, i, column)
            return f"`{shown(field)}` as {column}"

        def problem(column: str, need: str, i: int) -> str:
            return f"{value(i, column)}, {need}"

        def hint(i: int) -> str:
            record = cells.buffer[records[i, 0] : records[i, 1]].tobytes()
            return hint_for_record(record.decode("utf-8", "replace"), self._layout.separator, need)

        targets = self._schema.targets if self._has_labels else {}
        for column in dict.fromkeys([*targets, *self._numeric]):
            if column in targets and targets[column].values:
                numbers, good, what = named_labels(targets[column], self._fields(cells, column))
            else:
                numbers, good = self._read_numbers(cells, column)
                good, what = self._checked(column, numbers, good)
            values[column] = numbers
            checks.append((good, partial(problem, column, what)))
        return values, checks

    def _checked(
        self, column: str, numbers: NDArray[np.float64], good: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], str]:
        """Which numbers of a column are good, and what they should be."""
        if self._has_labels and column in self._schema.targets:
            return checked_labels(self._schema.targets[column], numbers, good)
        if self._has_labels and column == self._schema.weight:
            return checked_weights(numbers, good)
        if column in self._times:
            good = good & ~np.isnan(numbers)
        if column == self._schema.time:
            good = good & (np.abs(numbers) < _MOST_TIME)
        for feature in self._schema.dense:
            if feature.column == column and feature.transform == "identity":
                is_too_large = np.abs(numbers - feature.mean) > LARGEST * feature.std
                good = good & ~is_too_large  # which missing ones, NaN, are not
                return good, f"a finite number is needed, of at most {LARGEST:.2g}"
        return good, "a finite number is needed"

    def _shown_field(self, cells: _Cells, record: int, column: str) -> str:
        """The beginning of a value, for a message."""
        if column in cells.integers.columns:
            values, is_missing = cells.integers.column(column)
            return "" if is_missing[record] else str(values[record])
        text, starts, ends = self._fields(cells, column)
        start = starts[record]
        return text[start : min(ends[record], start + 80)].tobytes().decode("utf-8", "replace")

    def _codes(
        self,
        feature: CategoricalFeature,
        cells: _Cells,
        numbers: dict[str, NDArray[np.float64]],
    ) -> Codes:
        if feature.events is not None:
            return Codes(np.empty(0, np.uint64))
        if feature.binning is not None:
            return Codes(bin_rows(numbers[feature.column], feature.binning).astype(np.uint64))
        if feature.column in cells.integers.columns:
            if feature.encoding == "integer":
                values = numbers_of_integers(*cells.integers.column(feature.column))
                return Codes(_integer_rows(feature, values, np.ones(len(values), np.bool_)))
            return Codes(self._hashes(cells, feature.column))
        is_list = feature.column in self._layout.lists
        fields = self._fields(cells, feature.column)
        schema = self._schema
        return field_codes(feature, fields, is_list, schema.text_rules, schema.null_texts)

    def _events(
        self,
        feature: CategoricalFeature,
        events: Events,
        cells: _Cells,
        numbers: dict[str, NDArray[np.float64]],
        labels: Array,
    ) -> LoggedEvents:
        return LoggedEvents(
            self._hashes(cells, events.user),
            item_codes(feature, self._fields(cells, events.item), self._schema.text_rules),
            clicks_of(labels),
            None if events.time is None else numbers[events.time],
        )


def _texts(buffer: Bytes, bounds: Positions) -> Texts:
    """A column's values by their bounds ``[R, 2]``."""
    starts, ends = bounds.T
    lengths = ends - starts
    shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return Texts(buffer[np.arange(len(shift)) + shift], lengths)


def may_be_integers(schema: Schema, column: str) -> bool:
    """Whether a column's whole numbers mean the same as such as by their texts.

    Not where the text itself is looked at: by its characters, items, and names of labels or of
    missing values.
    """
    by_text = any(
        feature.column == column and (feature.multi_hot or feature.characters is not None)
        for feature in schema.categorical
    )
    by_text = by_text or any(feature.events is not None for feature in schema.categorical)
    target = schema.targets.get(column)
    return not (by_text or schema.nulls or (target is not None and target.values))


def other_unit(times: NDArray[np.float64], unit: str) -> str | None:
    """In which other unit since 1970 some times would be of our days, where in this they are not.

    >>> other_unit(np.array([1.7e12]), "s"), other_unit(np.array([1.7e9]), "s")
    ('ms', None)
    """
    times = times[np.isfinite(times)]
    if not len(times):
        return None
    middle = float(np.median(times))
    fits = [each for each, ms in _MS_PER_UNIT.items() if _OUR_DAYS[0] < middle * ms < _OUR_DAYS[1]]
    return None if unit in fits or not fits else fits[0]


def milliseconds(times: NDArray[np.float64], unit: str) -> NDArray[np.int64]:
    """Times since 1970 in milliseconds, rounded down.

    >>> milliseconds(np.array([1.5, -0.0005]), "s").tolist()
    [1500, -1]
    """
    most = float(1 << 62)
    in_ms = np.clip(np.floor(times * _MS_PER_UNIT[unit]), -most, most)
    return in_ms.astype(np.int64)


def _transformed(feature: DenseFeature, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    values = transform_dense(numbers, feature.transform)
    if not feature.is_standardised:
        return values
    return standardised(values, feature.mean, feature.std)


def field_codes(
    feature: CategoricalFeature,
    fields: Fields,
    is_list: bool = False,
    text_rules: int = TEXT_RULES,
    nulls: Sequence[bytes] = (),
) -> Codes:
    """Codes of raw fields ``(text, starts [R], ends [R])``.

    Args:
        feature: what the schema says of them.
        fields: split into items where the feature is multi-hot; its ``max_length`` is kept to.
        is_list: each item ends with ``ITEM_END``, whatever the feature's delimiter is.
        text_rules: the schema's.
        nulls: the schema's texts of missing items.
    """
    if not feature.multi_hot:
        return Codes(item_codes(feature, fields, text_rules))
    lengths, starts, ends = split_items(
        *fields, ord(ITEM_END if is_list else feature.delimiter), is_list
    )
    if feature.max_length is not None and (lengths > feature.max_length).any():
        is_last = last_items(lengths, feature.max_length)
        starts = starts[is_last]
        ends = ends[is_last]
        lengths = np.minimum(lengths, feature.max_length)
    items = without_nulls((fields[0], starts, ends), nulls)
    return Codes(item_codes(feature, items, text_rules), lengths)


def without_nulls(fields: Fields, nulls: Sequence[bytes]) -> Fields:
    """The fields, empty where they are one of some texts.

    >>> text = np.frombuffer(b"NAN-", np.uint8)
    >>> without_nulls((text, np.array([0, 1, 3]), np.array([2, 3, 4])), [b"NA", b"-"])[2].tolist()
    [0, 3, 3]
    """
    text, starts, ends = fields
    for null in nulls:
        places = np.flatnonzero(ends - starts == len(null))
        letters = text[starts[places, None] + np.arange(len(null))]
        is_null = (letters == np.frombuffer(null, np.uint8)).all(1)
        ends = ends.copy()
        ends[places[is_null]] = starts[places[is_null]]
    return text, starts, ends


def last_items(lengths: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Which items are among the last ones of their bags, bool ``[V]``.

    >>> last_items(np.array([3, 0, 1]), 2).tolist()
    [False, True, True, True]
    """
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) >= np.repeat(ends - count, lengths)


def item_codes(
    feature: CategoricalFeature, items: Fields, text_rules: int = TEXT_RULES
) -> NDArray[np.uint64]:
    """Codes of single values; the one path for preparation and serving."""
    text, starts, ends = items
    if feature.characters is not None:
        first, last = feature.characters
        if text_rules > 1:
            starts, ends = cut_characters(text, starts, ends, first, last)
        else:  # bytes
            starts, ends = np.minimum(starts + first, ends), np.minimum(starts + last, ends)
    if feature.encoding == "integer":
        return _integer_rows(feature, *parse_numbers(text, starts, ends))
    return hash_fields(text, starts, ends)


def _integer_rows(
    feature: CategoricalFeature, values: NDArray[np.float64], good: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    inside = (
        good & (values >= 0) & (values < (feature.num_buckets or 0)) & (values == np.floor(values))
    )
    rows = np.where(inside, FIRST_ROW + np.where(inside, values, 0), UNKNOWN_ROW)
    return np.where(np.isnan(values), MISSING_ROW, rows).astype(np.uint64)
