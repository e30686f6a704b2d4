"""Which features are in which tower: a file of groups, and what groups have to be."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pibroch.errors import ConfigError

_DO = "make groups for this data: pibroch plan towers"


def read_groups(path: Path) -> list[list[str]]:
    """The groups of a file that ``pibroch plan towers`` wrote.

    Raises:
        ConfigError: when there is none, or it is another file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        towers = content["towers"]
        if not isinstance(towers, list) or not all(
            isinstance(name, str) for tower in towers for name in tower
        ):
            raise TypeError("no lists of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, which is no file of groups: {error}", "a file of pibroch plan towers", _DO
        ) from error
    return [list(tower) for tower in towers]


def groups_of(
    features: Sequence[str], count: int, groups: Sequence[Sequence[str]] | None
) -> list[list[int]]:
    """The numbers of the features of each tower.

    >>> groups_of(["a", "b", "c"], 2, None), groups_of(["a", "b", "c"], 9, [["c"], ["a", "b"]])
    ([[0, 2], [1]], [[2], [0, 1]])

    Raises:
        ConfigError: for more towers than features, a feature that is not there, that is in two
            groups, or in none.
    """
    if groups is None:
        if count > len(features):
            raise ConfigError(f"{count} towers", f"at most {len(features)}, the number of features")
        return [list(range(first, len(features), count)) for first in range(count)]
    named = [name for group in groups for name in group]
    number = {name: number for number, name in enumerate(features)}
    unknown = [name for name in named if name not in number]
    if unknown:
        raise ConfigError(
            f"feature {unknown[0]!r} in a tower", f"one of {', '.join(features)}", _DO
        )
    twice = [name for name, uses in Counter(named).items() if uses > 1]
    if twice or not all(groups):
        raise ConfigError(
            f"feature {twice[0]!r} in two towers" if twice else "a tower without features",
            "each in one",
            _DO,
        )
    is_named = set(named)
    missing = [name for name in features if name not in is_named]
    if missing:
        raise ConfigError(f"feature {missing[0]!r} in no tower", "each in one", _DO)
    return [[number[name] for name in group] for group in groups]
