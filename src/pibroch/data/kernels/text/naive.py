"""What the kernels over raw text mean, on bytes, one record or field at a time."""

from __future__ import annotations

import json
import math
import re

_NUMBER = re.compile(rb" *([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?) *\Z")
_CHARACTER = re.compile(rb"\A.[\x80-\xbf]*|[^\x80-\xbf][\x80-\xbf]*", re.DOTALL)
_MASK = 2**64 - 1


def find_fields(text: bytes, separator: bytes, quotes: bool) -> list[list[bytes]]:
    """The fields of each record; a record of one empty field is none."""
    records = []
    fields: list[bytes] = []
    position = 0
    while position < len(text):
        is_quoted = quotes and text[position : position + 1] == b'"'
        field, position = (_quoted if is_quoted else _plain)(text, position, separator)
        is_last = text[position : position + 1] != separator
        fields.append(field.removesuffix(b"\r") if is_last and not is_quoted else field)
        position += 1
        if not is_last and position == len(text):
            fields.append(b"")  # the last field is empty, and no newline follows
        if is_last or position == len(text):
            records.append(fields)
            fields = []
    return [fields for fields in records if fields != [b""]]


def _plain(text: bytes, position: int, separator: bytes) -> tuple[bytes, int]:
    """A field as it stands, and where it ends."""
    end = position
    while text[end : end + 1] not in (b"", b"\n", separator):
        end += 1
    return text[position:end], end


def _quoted(text: bytes, position: int, separator: bytes) -> tuple[bytes, int]:
    """A field without its quotes, a doubled one made one; what follows them belongs to it."""
    inside = re.compile(rb'"((?:[^"]|"")*)("?)').match(text, position)
    assert inside is not None
    rest, end = _plain(text, inside.end(), separator)
    return inside[1].replace(b'""', b'"') + rest.removesuffix(b"\r"), end


def complete_records_end(text: bytes, separator: bytes) -> int:
    """End of the last record that its newline ends."""
    end = 0
    position = 0
    while position < len(text):
        is_quoted = text[position : position + 1] == b'"'
        _, position = (_quoted if is_quoted else _plain)(text, position, separator)
        position += 1
        if text[position - 1 : position] == b"\n":
            end = position
    return end


def hash_fields(fields: list[bytes]) -> list[int]:
    """64-bit FNV-1a, then murmur3's mixing."""
    codes = []
    for field in fields:
        code = 0xCBF29CE484222325
        for byte in field:
            code = (code ^ byte) * 0x100000001B3 & _MASK
        code = (code ^ code >> 33) * 0xFF51AFD7ED558CCD & _MASK
        code = (code ^ code >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
        codes.append(code ^ code >> 33)
    return codes


def cut_characters(field: bytes, first: int, end: int) -> bytes:
    """Characters ``first`` to ``end`` of UTF-8; a stray byte belongs to what is before it."""
    return b"".join(_CHARACTER.findall(field)[first:end])


def split_items(field: bytes, delimiter: bytes, ended: bool) -> list[bytes]:
    """The items of a field."""
    items = field.split(delimiter)
    return items[:-1] if ended else items * bool(field)


def parse_number(field: bytes) -> tuple[float, bool]:
    """A number, NaN for an empty field, and whether it is finite or empty."""
    number = _NUMBER.match(field)
    if number is None:
        return math.nan, not field.strip(b" ")
    return float(number[1]), math.isfinite(float(number[1]))


def count_json(text: bytes) -> tuple[int, int]:
    """Items of the longest outermost list, at least 1 of each; all lists and objects."""
    longest = 0
    count = 0

    def walk(value: object, is_outside: bool) -> None:
        nonlocal longest, count
        if isinstance(value, list):
            longest = max(longest, len(value), 1) if is_outside else longest
        elif not isinstance(value, dict):
            return
        count += 1
        for item in value if isinstance(value, list) else value.values():
            walk(item, is_outside and isinstance(value, dict))

    walk(json.loads(text), True)
    return longest, count
