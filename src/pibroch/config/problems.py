"""Turn pydantic's errors into one ConfigError.

It names the key of the recipe, and suggests the one that was probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError

from pibroch.config.registry import Choice
from pibroch.config.secret import is_secret, redacted
from pibroch.errors import ConfigError

_SECTIONS = {
    "data": "pass --data DIR, or add a [data] table with `dir` or a [data.synthesize] table",
    "train": "write one into the [train] table, e.g. `epochs = 1`, or pass --set train.epochs=1",
}
"""What helps where a whole table is missing or says too little: no single value can stand for it.
"""


def config_error(
    error: ValidationError, raw: Mapping[str, object], model: type[BaseModel], source: str
) -> ConfigError:
    """The error for the first problem of a recipe.

    Args:
        error: of pydantic.
        raw: the merged recipe.
        model: the section that ``raw`` was checked against.
        source: the recipe's name, for the message.
    """
    problem = error.errors(include_url=False)[0]
    path = recipe_path(problem["loc"])
    key = ".".join(path)
    got = redacted(problem["input"], next(filter(is_secret, path), ""))
    more = len(error.errors()) - 1
    tail = f" ({more} more problem{'s' * (more > 1)} after this one)" if more else ""
    if problem["type"] == "extra_forbidden":
        fields = sorted(_fields_at(model, path[:-1], raw))
        return ConfigError(
            f"unknown key `{key}` in {source}{tail}",
            f"one of {', '.join(fields)}",
            _suggestion(path, fields, key),
        )
    if problem["type"] == "missing":
        do = _SECTIONS.get(key, f"add it, or pass --set {key}=VALUE")
        return ConfigError(f"no `{key}` in {source}{tail}", "a value for it", do)
    if problem["type"].startswith("union_tag"):
        name = (
            f"`{key}.name = {got.get('name')!r}`"
            if isinstance(got, Mapping)
            else f"`{key} = {_shorten(got)}`"
        )
        names = problem.get("ctx", {}).get("expected_tags", "a name")
        return ConfigError(f"{name} in {source}{tail}", names, "choose one by `name`")
    need = (
        problem["msg"]
        .removeprefix("Value error, ")
        .removeprefix("Input should be ")
        .removeprefix("needs ")
    )
    if problem["type"].startswith("model_"):
        need = f"a table, [{key}]"
    is_section = problem["type"].startswith("model_") or isinstance(problem["input"], Mapping)
    where = f"`{key} = {_shorten(got)}`" if key else "a recipe"
    setting = (f"{key}.KEY" if is_section else key) if key else "KEY"
    advice = _SECTIONS.get(key) if is_section else None
    return ConfigError(
        f"{where} in {source}{tail}", need, advice or f"change it, or pass --set {setting}=VALUE"
    )


def recipe_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The recipe's key for pydantic's location, which also holds types that a value may have.

    >>> recipe_path(("embedding", "exchange", "placement", "literal['row_wise']"))
    ('embedding', 'exchange', 'placement')
    """
    return tuple(str(part) for part in loc if "[" not in str(part))


def _suggestion(path: tuple[str, ...], fields: list[str], key: str) -> str:
    close = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
    return f"did you mean `{'.'.join([*path[:-1], close[0]])}`?" if close else f"remove `{key}`"


def _fields_at(
    model: type[BaseModel], path: tuple[str, ...], raw: Mapping[str, object]
) -> set[str]:
    """Field names of the section at ``path``, of the variant that ``raw`` chose there."""
    types: list[object] = [model]
    at: object = raw
    for part in path:
        types = [inner for each in types for inner in _types_at(each, part, at)]
        at = at.get(part) if isinstance(at, Mapping) else None
    sections = [_chosen(inner, at) for each in types for inner in _sections_in(each)]
    return {name for section in sections for name in section.model_fields}


def _types_at(annotation: object, part: str, raw: object) -> Iterator[object]:
    """Types that the value of a key may have, in a table of some type."""
    if get_origin(annotation) is dict:
        yield get_args(annotation)[1]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        section = _chosen(annotation, raw)
        if part in section.model_fields:
            yield section.model_fields[part].annotation
    else:
        for inner in get_args(annotation):
            yield from _types_at(inner, part, raw)


def _chosen(section: type[BaseModel], raw: object) -> type[BaseModel]:
    """The section that a table chooses by its name, where it is one of a kind."""
    if "registry" not in vars(section) or not isinstance(raw, Mapping):
        return section
    assert issubclass(section, Choice)
    name = raw.get("name", section.model_fields["name"].default)
    chosen: type[BaseModel] = section.registry.find(name).section
    return chosen


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
