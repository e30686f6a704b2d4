"""Raw rows in a request's body: JSON rows or columns, or lines of the log's own text."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import msgspec

from pibroch.data.schema import Schema
from pibroch.serve.settings import Refusal

RawColumns = dict[str, list[object]]
_TEXTS = ("text/csv", "text/tab-separated-values", "text/plain")
_SINGLE = frozenset({str, int, float, bool, type(None)})


def parse_raw(body: bytes, content_type: str, schema: Schema, columns: Sequence[str]) -> RawColumns:
    """The needed columns of a body, B values each.

    Args:
        body: as it came.
        content_type: JSON where it is empty.
        schema: of the model's data, which says how lines are written.
        columns: that the model reads.

    Raises:
        Refusal: for a body that is not such rows.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _TEXTS:
        return _of_lines(body, schema, columns)
    if kind not in (
        "",
        "application/json",
        "application/x-www-form-urlencoded",
    ):  # the last is what curl says of --data
        raise Refusal(
            415, f"got {kind[:80]}; need application/json, or lines as {', '.join(_TEXTS)}"
        )
    return _of_json(body, columns)


def _of_json(body: bytes, columns: Sequence[str]) -> RawColumns:
    need = 'need {"rows": [{column: value, ...}, ...]}, {"columns": {column: [values]}}, or a list of rows'
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Refusal(400, f"got a body that is no JSON: {error}; {need}") from error
    if isinstance(content, dict) and len(content) == 1:
        if isinstance(content.get("rows"), list):
            return _of_rows(content["rows"], columns)
        if isinstance(content.get("columns"), dict):
            return _of_columns(content["columns"], columns)
    if isinstance(content, list):
        return _of_rows(content, columns)
    raise Refusal(400, f"got JSON of another form; {need}")


def _of_rows(rows: list[object], columns: Sequence[str]) -> RawColumns:
    found: RawColumns = {column: [] for column in columns}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise Refusal(
                400,
                f"got {type(row).__name__} as row {number}; need an object with a value for each column",
            )
        for column, values in found.items():
            if column not in row:
                raise Refusal(
                    400,
                    f"got row {number} without `{column[:80]}`; need all columns, null where missing",
                )
            values.append(_checked(row[column], column, number))
    return found


def _of_columns(given: Mapping[str, object], columns: Sequence[str]) -> RawColumns:
    found: RawColumns = {}
    for column in columns:
        values = given.get(column)
        if not isinstance(values, list):
            raise Refusal(
                400, f"got no list of values for column `{column[:80]}`; need one for each column"
            )
        found[column] = [_checked(value, column, number) for number, value in enumerate(values)]
    if len({len(values) for values in found.values()}) > 1:
        raise Refusal(
            400,
            "got columns of different lengths; need one value a row in each, null where missing",
        )
    return found


def _checked(value: object, column: str, number: int) -> object:
    if type(value) in _SINGLE:
        return value
    if not isinstance(value, list) or not all(type(item) in _SINGLE for item in value):
        raise Refusal(
            400, f"got an object or nested list as `{column[:80]}` of row {number}; need text, a number, a list of such or null"
        )  # fmt: skip
    return value


def _of_lines(body: bytes, schema: Schema, columns: Sequence[str]) -> RawColumns:
    """Lines as preparation reads them; the label's column may be left out.

    Text passes as Latin-1 and back, so that each value keeps the bytes that preparation would have seen.
    """
    text = io.StringIO(body.removeprefix(b"\xef\xbb\xbf").decode("latin-1"), newline="")
    try:
        if schema.quotes:
            lines = list(csv.reader(text, delimiter=schema.separator, strict=True))
        else:
            lines = list(
                csv.reader(text, delimiter=schema.separator, quoting=csv.QUOTE_NONE, strict=True)
            )
    except csv.Error as error:
        raise Refusal(
            400, f"got lines that cannot be read: {error}; need them as in the training data"
        ) from error
    lines = [line for line in lines if line or len(columns) == 1]
    names = list(schema.columns or (lines.pop(0) if lines else ()))
    if schema.columns is None:
        names = [name.encode("latin-1").decode("utf-8", "replace") for name in names]
    if missing := [column for column in columns if names.count(column) != 1]:
        raise Refusal(
            400, f"got a header with {names.count(missing[0])} columns `{missing[0][:80]}`; "
            f"need {schema.separator.join(columns)[:400]} as the first line"
        )  # fmt: skip
    without = [name for name in names if name != schema.label]
    found: RawColumns = {column: [] for column in columns}
    with_label, without_label = (
        [header.index(column) for column in columns] for header in (names, without)
    )
    for number, line in enumerate(lines):
        header = names if len(line) == len(names) else without
        if len(line) != len(header):
            raise Refusal(
                400,
                f"got {len(line)} fields in row {number}; need {len(names)}, or one less without the label",
            )
        places = with_label if header is names else without_label
        for place, values in zip(places, found.values(), strict=True):
            values.append(line[place].encode("latin-1"))
    return found
