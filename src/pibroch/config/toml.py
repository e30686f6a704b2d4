"""Write a configuration as TOML, so that a run's resolved configuration is itself a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping


def to_toml(tables: Mapping[str, object], comments: Callable[[str], str] | None = None) -> str:
    """TOML text of nested tables of plain values; ``None`` entries are left out.

    ``comments`` says what stands behind a value, by its key with dots.

    >>> print(to_toml({"seed": 1, "train": {"steps": 5, "epochs": None}}), end="")
    seed = 1
    <BLANKLINE>
    [train]
    steps = 5
    """
    return "\n".join(_lines(tables, (), comments)) + "\n"


def _lines(
    table: Mapping[str, object], path: tuple[str, ...], comments: Callable[[str], str] | None
) -> Iterator[str]:
    values = {
        key: value
        for key, value in table.items()
        if value is not None and not isinstance(value, Mapping)
    }
    if path and (values or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        comment = "" if comments is None else f"  # {comments('.'.join((*path, key)))}"
        yield f"{_key(key)} = {_value(value)}{comment}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key), comments)


def _key(name: str) -> str:
    """A key as TOML writes it: bare where it may be, else as a string."""
    is_bare = name and all(
        character.isascii() and (character.isalnum() or character in "-_") for character in name
    )
    return name if is_bare else json.dumps(name, ensure_ascii=False)


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back to the same bits
    return json.dumps(value, ensure_ascii=False)  # TOML's strings, integers and booleans are JSON's
