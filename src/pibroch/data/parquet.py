"""Parquet files as pieces of text, so that a value has the same code as in a CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import polars as pl
from polars.datatypes import DataType, DataTypeClass

from pibroch.data.layout import ITEM_END, Layout
from pibroch.data.schema import Schema
from pibroch.data.sources import Place, TextPiece, existing
from pibroch.errors import DataError

SEPARATOR = ","
_ROWS = 65_536
_CHECK = "has item end: "  # before the name of a list column
_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)


class ParquetSource:
    """The columns of a Parquet file that a schema uses; it may have no rows, as parts of Spark do.

    A list becomes its items, each followed by ``ITEM_END``: whatever an item holds, it stays one.

    Args:
        path: the file.
        schema: the features wanted.
        has_labels: whether labels are read; else they are 0.
        kept: further columns.

    Attributes:
        columns: that are read, in the order of their text.
        integers: those of them whose values are int64 in :meth:`frames`.
        layout: of the text.

    Raises:
        DataError: when the file is missing or no Parquet, lacks a column, or holds in one what a
            feature cannot read.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        has_labels: bool = True,
        kept: tuple[str, ...] = (),
    ) -> None:
        self.path = existing(path)
        try:
            self._frame = pl.scan_parquet(path, glob=False)
            types = self._frame.collect_schema()
            self._num_rows = int(self._frame.select(pl.len()).collect().item())
        except _ERRORS as error:
            raise _no_parquet(path, error) from error
        used = tuple(dict.fromkeys([*schema.log_columns(has_labels), *kept]))
        self._kept = kept
        is_whole = set(used) <= set(types)
        kinds = {column: types[column] for column in used} if is_whole else {}
        self.columns = tuple(kinds) if is_whole else tuple(types)  # the parser says what lacks
        self._lists = [
            column for column, kind in kinds.items() if isinstance(kind, pl.List | pl.Array)
        ]
        self._binary = [column for column, kind in kinds.items() if _inner(kind) == pl.Binary]
        self.layout = Layout(SEPARATOR, True, "row", frozenset(self._lists))
        self._expressions = [self._as_text(column, kind, schema) for column, kind in kinds.items()]
        self.integers = tuple(
            column
            for column, kind in kinds.items()
            if _fits_int64(kind, is_time=column == schema.time)
        )
        if not is_whole:
            self._expressions = [pl.all()]
        elif not has_labels and schema.label_columns[0] not in kept:
            self.columns = (schema.label_columns[0], *self.columns)
            self._expressions.append(pl.lit("0").alias(schema.label_columns[0]))
        self._expressions += [
            _has_item_end(column, kinds[column]).alias(_CHECK + column) for column in self._lists
        ]

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """See :class:`Source`; consecutive rows with about ``piece_bytes`` of text are a piece.

        Raises:
            DataError: when the file is damaged, or an item of a list holds ``ITEM_END``.
        """
        for frame in self.frames(start.offset, min(_ROWS, max(1, piece_bytes // 256))):
            end = Place(start.offset + frame.height, start.line + frame.height)
            yield TextPiece(text_of_rows(frame), start, end, end.offset / self._num_rows)
            start = end

    def frames(self, row: int, num_rows: int) -> Iterator[pl.DataFrame]:
        """The columns from a row on, so many rows at a time.

        A value is what :func:`text_of_rows` writes as its text, or an integer.

        Raises:
            DataError: as :meth:`pieces`.
        """
        while row < self._num_rows:
            need = min(num_rows, self._num_rows - row)
            try:
                batch = self._frame.slice(row, need).select(self._expressions).collect()
            except _ERRORS as error:
                where = f" in rows {row + 1:,} to {row + need:,}"
                if self._binary and "utf8" in str(error):
                    raise DataError(
                        f"bytes that are no text in {', '.join(self._binary)} of"
                        f" {self.path}{where}",
                        "UTF-8 in columns of bytes",
                        "write them as text, in hexadecimal for instance",
                    ) from error
                raise _no_parquet(self.path, error, where) from error
            if batch.height != need:
                raise DataError(
                    f"{batch.height:,} rows from row {row + 1:,} on of {self.path}",
                    f"{need:,}, as it says of itself",
                    "copy or write the file again",
                )
            self._check_items(batch, row)
            yield batch.select(self.columns)
            row += need

    def _check_items(self, batch: pl.DataFrame, first_row: int) -> None:
        for column in self._lists:
            if len(bad_rows := batch[_CHECK + column].arg_true()):
                raise DataError(
                    f"an item of `{column}` in row {first_row + bad_rows[0] + 1:,} of {self.path}"
                    " with the character U+001F",
                    "items without it: it separates them here",
                    "remove it from the items",
                )

    def _as_text(self, name: str, kind: DataType, schema: Schema) -> pl.Expr:
        column = pl.col(name)
        inner = _inner(kind)
        is_list = inner is not kind
        if inner.is_nested() or inner in (pl.Object, pl.Duration):
            raise DataError(
                f"column `{name}` of {self.path}, which holds {kind}",
                "numbers, text or times, or lists of these",
                "write single fields into columns of their own, or flatten the lists",
            )
        as_string = partial(_as_string, kind=inner, text_rules=schema.text_rules)
        readers = [feature for feature in schema.categorical if feature.column == name]
        wrong = [feature.name for feature in readers if not feature.multi_hot]
        wrong += [feature.name for feature in schema.dense if feature.column == name]
        wrong += ["the label"] if name in schema.label_columns else []
        about = (schema.weight, schema.group, schema.time)
        wrong += ["weight, group or time"] if name in about else []
        wrong += ["--keep"] if name in self._kept else []
        if is_list and wrong:
            raise DataError(
                f"column `{name}` of {self.path}, which holds lists, for {wrong[0]}",
                "one value a row, or a categorical feature with `multi_hot = true`",
                "correct the schema or the file",
            )
        if is_list:
            return (
                _items(name, kind, as_string)
                .list.eval(pl.concat_str([pl.element(), pl.lit(ITEM_END)]))
                .list.join("")
            )
        if name == schema.time and isinstance(kind, pl.Datetime | pl.Date):
            return column.dt.epoch(schema.time_unit)
        is_written_so = kind.is_integer() or (
            schema.text_rules == 1 and kind not in (pl.Boolean, pl.Binary)
        )
        return column if is_written_so else as_string(column).alias(name)


def text_of_rows(frame: pl.DataFrame) -> bytes:
    """Rows of :meth:`ParquetSource.frames` as delimited text."""
    return frame.write_csv(separator=SEPARATOR, include_header=False).encode()


def _fits_int64(kind: DataType, is_time: bool) -> bool:
    if is_time and isinstance(kind, pl.Datetime | pl.Date):
        return True  # a count since 1970
    return kind.is_integer() and kind not in (pl.UInt64, pl.Int128)


def _inner(kind: DataType) -> DataType | DataTypeClass:
    """The type of a column's values, which are items where it holds lists."""
    return kind.inner if isinstance(kind, pl.List | pl.Array) else kind


def _items(name: str, kind: DataType, as_string: Callable[[pl.Expr], pl.Expr]) -> pl.Expr:
    """A column of lists of strings.

    An item that is null is the empty string, which stands for a missing value.
    """
    items = pl.col(name).arr.to_list() if isinstance(kind, pl.Array) else pl.col(name)
    return items.list.eval(as_string(pl.element()).fill_null(""))


def _has_item_end(name: str, kind: DataType) -> pl.Expr:
    items = _items(name, kind, lambda item: item.cast(pl.String))
    return items.list.eval(pl.element().str.contains(ITEM_END, literal=True)).list.any()


def _as_string(column: pl.Expr, kind: DataType | DataTypeClass, text_rules: int) -> pl.Expr:
    """What :func:`pibroch.data.values.text_of` gives for each value; nulls stay."""
    if kind == pl.Boolean:
        return column.cast(pl.Int8).cast(pl.String)
    if text_rules == 1:
        return column.cast(pl.String)
    if kind.is_float():
        text = column.cast(pl.Float64).fill_nan(None).cast(pl.String).str.strip_suffix(".0")
        return pl.when(text == "-0").then(pl.lit("0")).otherwise(text)
    if kind.is_decimal():
        return column.cast(pl.String).str.replace(r"(\.[0-9]*?)0+$", "$1").str.strip_suffix(".")
    if kind == pl.Datetime:
        assert isinstance(kind, pl.Datetime)
        zoned = kind.time_zone is not None
        moment = column.dt.convert_time_zone("UTC") if zoned else column
        text = _without_zeros(moment.dt.to_string("%Y-%m-%dT%H:%M:%S%.9f"))
        return pl.concat_str([text, pl.lit("+00:00")]) if zoned else text
    if kind == pl.Time:
        return _without_zeros(column.dt.to_string("%H:%M:%S%.9f"))
    return column.cast(pl.String)


def _without_zeros(text: pl.Expr) -> pl.Expr:
    """Times with six decimal places or none instead of nine, where that is exact, as in Python."""
    return text.str.strip_suffix("000").str.strip_suffix(".000000")


def _no_parquet(path: Path, error: BaseException, where: str = "") -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        f"{path}{where}: {reason}",
        "a sound Parquet file",
        "check the file and the format given to `data prepare`",
    )
