"""JSON lines as delimited text, so that a value has the same code as in a CSV file.

Each line is an object that has all columns that the schema reads; what is null is missing. A column
that is not there makes a record bad: else a column that got another name would be missing from then
on, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pibroch.data.layout import ITEM_END, Layout
from pibroch.data.schema import Schema
from pibroch.data.streams.text import Lines
from pibroch.data.values import NO_TEXT, is_list, text_of

_SEPARATOR = ","
NO_RECORD = b"x\n"
"""A record of one column, which is always one too few."""
_Object = dict[str, object]


class RecordText:
    """Records of named values as delimited text.

    Attributes:
        columns: of the text.
        layout: of the text.

    Args:
        schema: says which columns are read, and which hold several values.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        used = schema.log_columns()
        # one column alone has no separator, by which a blank line would be known
        self.columns = used if len(used) > 1 else (*used, "")
        several = {each.column: each.delimiter for each in schema.categorical if each.multi_hot}
        single = [each.column for each in schema.categorical if not each.multi_hot]
        single += [*schema.numeric_columns(), *schema.label_columns]
        self._delimiters = {
            column: delimiter.encode()
            for column, delimiter in several.items()
            if column not in single
        }
        self.layout = Layout(_SEPARATOR, True, "row", frozenset(self._delimiters))

    def of(self, record: Mapping[str, object]) -> bytes:
        """A line of text, with its newline.

        Raises:
            ValueError: says what is wrong with the record.
        """
        return _SEPARATOR.encode().join(self._field(record, name) for name in self.columns) + b"\n"

    def _field(self, record: Mapping[str, object], name: str) -> bytes:
        if not name:
            return b""
        if name not in record:
            raise ValueError(f"no `{name}`")
        value = record[name]
        if name in self._delimiters:
            return _quoted(b"".join(self._items(value, name)))
        return _quoted(self._text(value, name))

    def _items(self, value: object, name: str) -> list[bytes]:
        if is_list(value):
            items = [self._text(item, name) for item in value]  # type: ignore[attr-defined]
        else:
            text = self._text(value, name)
            is_missing = not text or text in self._schema.null_texts
            items = [] if is_missing else text.split(self._delimiters[name])
        end = ITEM_END.encode()
        if any(end in item for item in items):
            raise ValueError(f"an item of `{name}` with the character U+001F")
        return [item + end for item in items]

    def _text(self, value: object, name: str) -> bytes:
        try:
            return text_of(value, self._schema.text_rules)
        except NO_TEXT as error:
            raise ValueError(f"{error} as `{name}`") from error


class JsonLines:
    """Converts lines; see :data:`pibroch.data.streams.text.Convert`.

    Args:
        schema: of the records.
        most_bytes: of a line.
    """

    def __init__(self, schema: Schema, most_bytes: int) -> None:
        self.texts = RecordText(schema)
        self._most_bytes = most_bytes
        self._decoder = msgspec.json.Decoder(_Object)

    def __call__(self, lines: bytes, first_line: int) -> Lines:
        """Delimited text, a record a line; bad lines have one column."""
        bad: dict[int, str] = {}
        out = []
        for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first_line):
            try:
                out.append(self._record(line))
            except ValueError as error:
                bad[number] = str(error)
                out.append(NO_RECORD)
        return Lines(b"".join(out), bad)

    def _record(self, line: bytes) -> bytes:
        if len(line) > self._most_bytes:
            raise ValueError(f"a record of {len(line):,} bytes, more than {self._most_bytes:,}")
        try:
            record = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no object in JSON: {error}") from error
        return self.texts.of(record)


def _quoted(text: bytes) -> bytes:
    if any(letter in text for letter in (b",", b'"', b"\n", b"\r")):
        return b'"' + text.replace(b'"', b'""') + b'"'
    return text
