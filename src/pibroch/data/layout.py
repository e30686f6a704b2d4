"""How the text of a source is laid out, and hints for text that is laid out otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "spaces"}
ITEM_END = "\x1f"
"""Stands after each item of a list column in text made of Parquet: ASCII's unit separator."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How records, columns and items are told apart.

    Attributes:
        separator: the byte between columns.
        quotes: whether fields may be quoted.
        unit: what places count: lines of a text file, or rows of a table that became text here, so
            that all quotes are right.
        lists: columns that hold lists, each item followed by ``ITEM_END``.
    """

    separator: str
    quotes: bool
    unit: Literal["line", "row"] = "line"
    lists: frozenset[str] = frozenset()


def shown(text: str, limit: int = 40) -> str:
    r"""Text for a message: one line, at most ``limit`` long, without control characters.

    >>> print(shown("a\n\x1b[1mb"), shown("abcdef", 5))
    a\n\x1b[1mb ab...
    """
    printable = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * limit]
    )
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def hint_for_header(columns: Iterable[str], separator: str, needed: Iterable[str]) -> str | None:
    """What to do about a header that lacks columns, where another separator explains it.

    >>> hint_for_header(["y;price"], ",", ["y", "price"])
    'set `separator = ";"` in the schema: with it the header has these columns'
    """
    header = separator.join(columns)
    for other in _SEPARATORS:
        if other != separator and set(needed) <= {
            name.strip('" \r') for name in header.split(other)
        }:
            return (
                f"set `separator = {_as_toml(other)}` in the schema: with it the header has these"
                " columns"
            )
    return None


def hint_for_record(record: str, separator: str, num_columns: int) -> str:
    """A hint for a record with a wrong number of columns that another separator would mend.

    >>> hint_for_record("1;2;3", ",", 3)
    ' (split at semicolons it has 3: is the separator right?)'
    """
    for other, name in _SEPARATORS.items():
        if other != separator and record.count(other) == num_columns - 1:
            return f" (split at {name} it has {num_columns}: is the separator right?)"
    return ""


def _as_toml(separator: str) -> str:
    return '"\\t"' if separator == "\t" else f'"{separator}"'
