"""Raw rows in a request's body: JSON rows or columns, or lines of the log's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from pibroch.data.kernels.text import count_json
from pibroch.data.lines import fields_of_lines
from pibroch.data.schema import Schema
from pibroch.errors import DataError
from pibroch.serve.predictor import columns_of
from pibroch.serve.settings import Refusal

RawColumns = dict[str, list[object]]
_TEXTS = ("text/csv", "text/tab-separated-values", "text/plain")
LARGE_BODY_BYTES = 1 << 18
"""Above this a body takes milliseconds.

It is parsed beside the event loop, and its rows are counted before.
"""
MOST_ITEMS = 1000
"""That a user is given; more are refused with 400."""
_NEED_ROWS = (
    'need {"rows": [{column: value, ...}, ...]}, {"columns": {column: [values]}}, or a list of rows'
)
_NEED_USERS = '{"rows": [{column: value, ...}, ...], "k": 10}, or `columns` in place of `rows`'
_SINGLE = frozenset({str, int, float, bool, type(None)})


def parse_raw(
    body: bytes, content_type: str, schema: Schema, columns: Sequence[str], max_rows: int = 8192
) -> RawColumns:
    """The needed columns of a body, B values each.

    Args:
        body: as it came.
        content_type: JSON where it is empty.
        schema: of the model's data, which says how lines are written.
        columns: that the model reads.
        max_rows: more are refused before they are parsed, where that would take memory or long.

    Raises:
        Refusal: for a body that is not such rows.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _TEXTS:
        try:
            return fields_of_lines(body, schema, columns, max_rows)
        except DataError as error:
            raise Refusal(400, str(error)) from error
    # the last is what curl says of --data
    if kind not in ("", "application/json", "application/x-www-form-urlencoded"):
        need = f"need application/json, or lines as {', '.join(_TEXTS)}"
        raise Refusal(415, f"got {kind[:80]}; {need}")
    content = _decoded(body, columns, max_rows, _NEED_ROWS)
    return _columns_in(content, columns, _NEED_ROWS)


def warm_parsers(schema: Schema, columns: Sequence[str]) -> None:
    """Compile what reads bodies, so that no request waits for it."""
    count_json(np.frombuffer(b"[]", np.uint8))
    line = schema.separator.join(columns).encode() + b"\n"  # a header, or a row
    fields_of_lines(line, schema, columns, 1)


def parse_users(body: bytes, columns: Sequence[str], max_rows: int) -> tuple[RawColumns, int]:
    """The needed columns of users, B values each, and how many items each wants.

    Args:
        body: JSON, ``{"rows": [...], "k": 10}`` or ``{"columns": {...}, "k": 10}``; 10 when absent.
        columns: that are read for users.
        max_rows: more are refused.

    Raises:
        Refusal: for a body that is not such.
    """
    content = _decoded(body, columns, max_rows, _NEED_USERS)
    k = content.pop("k", 10) if isinstance(content, dict) else None
    if type(k) is not int or not 1 <= k <= MOST_ITEMS:
        got = f"got {str(k)[:40]} as `k`" if isinstance(content, dict) else "got no JSON object"
        raise Refusal(400, f"{got}; need a whole number from 1 to {MOST_ITEMS} in {_NEED_USERS}")
    users = _columns_in(content, columns, f"need {_NEED_USERS}")
    count = len(next(iter(users.values())))
    if not 1 <= count <= max_rows:
        raise Refusal(400, f"got {count} rows; need 1 to {max_rows} in a request")
    return users, k


def _refuse_rows(body: bytes, columns: Sequence[str], max_rows: int) -> None:
    """Refuse JSON of too many rows, or of more lists and objects than rows can have."""
    num_items, num_nested = count_json(np.frombuffer(body, np.uint8))
    if num_items > max_rows:
        raise Refusal(400, f"got {num_items} rows; need 1 to {max_rows} in a request")
    most = 4 * (max_rows + 1) * (len(columns) + 1)
    if num_nested > most:
        raise Refusal(400, f"got {num_nested} lists and objects in JSON; need at most {most}")


def _decoded(body: bytes, columns: Sequence[str], max_rows: int, need: str) -> Any:
    if len(body) > LARGE_BODY_BYTES:
        _refuse_rows(body, columns, max_rows)
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Refusal(400, f"got a body that is no JSON: {error}; {need}") from error
    if isinstance(content, dict):  # what is optional and absent, many clients write as null
        return {name: value for name, value in content.items() if value is not None}
    return content


def _columns_in(content: object, columns: Sequence[str], need: str) -> RawColumns:
    """Columns of one length, whose values are single ones or lists of these."""
    if isinstance(content, dict) and len(content) == 1:
        if isinstance(content.get("columns"), dict):
            found = {column: content["columns"].get(column) for column in columns}
            return _of_single_values(_of_one_length(found))
        content = content.get("rows")
    if not isinstance(content, list):
        raise Refusal(400, f"got JSON of another form; {need}")
    try:
        return _of_single_values(columns_of(content, columns))
    except DataError as error:
        raise Refusal(400, str(error)) from error


def _of_one_length(columns: Mapping[str, object]) -> RawColumns:
    checked: RawColumns = {}
    for column, values in columns.items():
        if not isinstance(values, list):
            got = f"got no list of values for column `{column[:80]}`"
            raise Refusal(400, f"{got}; need one for each column")
        checked[column] = values
    if len(set(map(len, checked.values()))) > 1:
        need = "need one value a row in each, null where missing"
        raise Refusal(400, f"got columns of different lengths; {need}")
    return checked


def _of_single_values(columns: RawColumns) -> RawColumns:
    if _SINGLE.issuperset(map(type, chain.from_iterable(columns.values()))):
        return columns
    for column, values in columns.items():
        for number, value in enumerate(values):
            if type(value) not in _SINGLE and not _is_list_of_single(value):
                got = f"got an object or nested list as `{column[:80]}` of row {number}"
                raise Refusal(400, f"{got}; need text, a number, a list of such or null")
    return columns


def _is_list_of_single(value: object) -> bool:
    return isinstance(value, list) and _SINGLE.issuperset(map(type, value))
