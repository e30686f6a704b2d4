"""Files of libsvm and libffm: a label, and of each sample the indices that are not zero.

A line is turned into one of text with the columns that a schema names, so that what follows is the
same as for other text:

- ``label`` is what a line begins with, ``qid`` the number behind ``qid:``;
- ``7`` is of libsvm the index 7, of libffm the field 7; ``100-199`` all from 100 to 199, and
  ``indices`` all there are. Where the schema wants a number it is the value there, and 0 where
  there is none; where it wants a category it is the indices there, whose values are to be 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pibroch.data.layout import ITEM_END, Layout, shown
from pibroch.data.parse import BadRecord
from pibroch.data.schema import Schema
from pibroch.data.sources import Place, TextPiece, TextSource
from pibroch.errors import ConfigError

Kind = Literal["number", "item", "items"]
_SEPARATOR = "\t"
_ALL = "indices"
_MOST_DIGITS = 18  # of an index, which fits 64 bits
_RANGE = re.compile(rf"(\d{{1,{_MOST_DIGITS}}})(?:-(\d{{1,{_MOST_DIGITS}}}))?")
_MOST_CACHED_KEYS = 1 << 16
_ITEM_END = ITEM_END.encode()


class _Malformed(Exception):
    """Why a line is left out."""


class SparseTextSource:
    """Lines of libsvm, ``LABEL [qid:N] INDEX:VALUE...``, or of libffm, ``FIELD:INDEX:VALUE``.

    What follows ``#`` is a comment. A line that cannot be read counts as malformed.

    Args:
        path: the file, plain, gzip or zstd.
        schema: the columns wanted.
        has_fields: whether it is libffm.
        has_labels: whether labels are read; lines may then lack them.

    Attributes:
        path: of the file.
        columns: of the text.
        layout: of the text.

    Raises:
        ConfigError: for columns that such a file has not.
        DataError: when the file is missing, a folder, empty, damaged, or no text.
    """

    def __init__(
        self, path: Path, schema: Schema, has_fields: bool, has_labels: bool = True
    ) -> None:
        self.path = path
        self._text = TextSource(path, _SEPARATOR, False, ())
        self._need = "FIELD:INDEX:VALUE" if has_fields else "INDEX:VALUE"
        self._num_parts = 3 if has_fields else 2
        self._has_labels = has_labels
        used = [column for column in schema.log_columns(has_labels) if column != "label"]
        self.columns = ("label", *used)
        self._qid = self.columns.index("qid") if "qid" in used else None
        self._ranges: list[tuple[int, float, int, Kind]] = []
        for place, column in enumerate(used, 1):
            if column != "qid":
                self._ranges.append((*_range_of(column, self._need), place, _kind(schema, column)))
        self._readers: dict[bytes, tuple[tuple[int, Kind], ...]] = {}
        lists = [self.columns[place] for _, _, place, kind in self._ranges if kind == "items"]
        self._numbers = [place for _, _, place, kind in self._ranges if kind == "number"]
        self.layout = Layout(_SEPARATOR, False, lists=frozenset(lists))

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """See :class:`pibroch.data.sources.RawSource`.

        Raises:
            DataError: when the file is damaged, or a line is longer than four pieces.
        """
        for piece in self._text.pieces(start, piece_bytes):
            lines: list[bytes] = []
            bad: list[BadRecord] = []
            for number, line in enumerate(piece.text.split(b"\n"), piece.start.line + 1):
                try:
                    lines.append(self._converted(line))
                except _Malformed as error:
                    lines.append(b"")
                    bad.append(BadRecord(number, str(error), line))
            text = b"\n".join(lines)
            yield TextPiece(text, piece.start, piece.end, piece.fraction, tuple(bad))

    def _converted(self, line: bytes) -> bytes:
        """A line with the columns in their order; blank where there is nothing.

        Raises:
            _Malformed: says why.
        """
        tokens = line.partition(b"#")[0].split()
        if not tokens:
            return b""
        fields = [b""] * len(self.columns)
        items: dict[tuple[int, Kind], list[bytes]] = {}
        if b":" not in tokens[0]:
            fields[0] = tokens[0]
            del tokens[0]
        elif self._has_labels:
            raise _Malformed(f"{_named(tokens[0])} first, a label is needed")
        for token in tokens:
            parts = token.split(b":")
            if parts[0] == b"qid" and len(parts) == 2 and parts[1].isdigit():
                if self._qid is not None:
                    fields[self._qid] = parts[1]
                continue
            self._check(parts, token)
            value = parts[-1]
            number = 1.0 if value == b"1" else _number(value, token)
            for place, kind in self._readers.get(parts[0]) or self._readers_of(parts[0]):
                if kind == "number" and not fields[place]:
                    fields[place] = value
                elif kind == "number":
                    raise _Malformed(f"{_named(token)}, which has a second value for a number")
                elif number:
                    _add(items.setdefault((place, kind), []), parts[-2], number, kind, token)
        for (place, kind), of_column in items.items():
            fields[place] = of_column[0] if kind == "item" else _ITEM_END.join([*of_column, b""])
        for place in self._numbers:
            fields[place] = fields[place] or b"0"
        return _SEPARATOR.encode().join(fields)

    def _check(self, parts: list[bytes], token: bytes) -> None:
        if len(parts) != self._num_parts or not (parts[0].isdigit() and parts[-2].isdigit()):
            raise _Malformed(f"{_named(token)}, {self._need} is needed")
        if max(len(parts[0]), len(parts[-2])) > _MOST_DIGITS:
            raise _Malformed(f"{_named(token)}, {_MOST_DIGITS} digits are allowed")

    def _readers_of(self, key: bytes) -> tuple[tuple[int, Kind], ...]:
        """Places of the columns that read an index, or a field, and as what."""
        number = int(key)
        readers = tuple(
            (place, kind) for first, last, place, kind in self._ranges if first <= number <= last
        )
        if len(self._readers) >= _MOST_CACHED_KEYS:
            self._readers.clear()
        self._readers[key] = readers
        return readers


def _range_of(column: str, need: str) -> tuple[int, float]:
    """The first and the last index, or field, of a column."""
    if column == _ALL:
        return 0, math.inf
    match = _RANGE.fullmatch(column)
    if match is None:
        raise ConfigError(
            f"a column `{column}` of lines of {need}",
            f"`label`, `qid`, `{_ALL}`, a number, or a range such as `100-199`",
            "correct `label` or `column` in the schema",
        )
    first, last = match.groups()
    return int(first), int(last or first)


def _kind(schema: Schema, column: str) -> Kind:
    """What a column is read as.

    Raises:
        ConfigError: for one that is read as a number and as a category.
    """
    times = [
        time for f in schema.categorical if f.events is not None for time in f.events.columns(True)
    ]
    readers = [f for f in schema.categorical if f.column == column and f.binning is None]
    if column not in (*schema.numeric_columns(), *times):
        is_list = bool(readers) and all(feature.multi_hot for feature in readers)
        return "items" if is_list else "item"
    if readers:
        raise ConfigError(
            f"a column `{column}` that is a number and, for `{readers[0].name}`, a category",
            "one of them, as a line has either a value or an index",
            "correct the schema",
        )
    return "number"


def _number(value: bytes, token: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or b"_" in value:
        raise _Malformed(f"{_named(token)}, a finite number is needed as its value")
    return number


def _add(items: list[bytes], index: bytes, value: float, kind: Kind, token: bytes) -> None:
    """Add an index, as it stands in the text, to those of a column."""
    if value != 1:
        raise _Malformed(f"{_named(token)} for a category, the value 1 is needed")
    if items and kind == "item":
        need = "one or multi_hot = true is needed"
        raise _Malformed(f"{_named(token)}, a second index in a column of one, {need}")
    items.append(index.lstrip(b"0") or b"0")


def _named(token: bytes) -> str:
    return f"`{shown(token[:80].decode('utf-8', 'replace'))}`"
