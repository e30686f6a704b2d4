"""Recipes: TOML files that may extend one another, with overrides from the command line."""

from __future__ import annotations

import difflib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pibroch.config.base import Section
from pibroch.config.embedding import EmbeddingSection, with_exchange_section
from pibroch.config.exchange import EXCHANGES
from pibroch.config.model import MODELS
from pibroch.config.problems import config_error
from pibroch.config.registry import Registry
from pibroch.config.run import RunConfig
from pibroch.errors import ConfigError

logger = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[1]
# In a wheel the recipes lie inside the package, in a checkout at its root.
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
# Tables whose keys depend on their `name`; all others keep their keys when it changes.
_VARIANTS = ("optimizer", "init", "exchange", "model", "loss", "rows")
# Keys of a table of which only one is there.
_RIVALS = (("epochs", "steps"), ("env", "file"))
# Of these, settings that another variant has, too, stay.
_SHARING: dict[str, Registry[Any]] = {"exchange": EXCHANGES, "model": MODELS}


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.toml")})


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe, given its path or the name of a shipped one.

    Raises:
        ConfigError: when there is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = [folder / f"{name_or_path}.toml" for folder in _FOLDERS]
    file = next((candidate for candidate in shipped if candidate.is_file()), None)
    if file is not None:
        return file
    names = recipe_names()
    close = difflib.get_close_matches(path.stem, names, n=1)
    raise ConfigError(
        f"recipe {name_or_path!r}, which is no file and no shipped recipe",
        f"a TOML file or one of {', '.join(names)}",
        f"did you mean {close[0]!r}?" if close else "check the path",
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and what it extends, apply ``a.b=value`` overrides, and check it.

    Raises:
        ConfigError: when a file is missing or is no TOML, or when a key or a value is wrong.
    """
    layers = recipe_layers(name_or_path)
    said = [*(each for _, each in layers), parse_overrides(overrides)]
    merged = list(accumulate(said, merge))
    config = check_config(merged[-1], layers[-1][0].name)
    for written, so_far in zip(said, merged, strict=True):
        _warn_of_settings_of_other_models(written, so_far)
    return config


def change_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with ``a.b=value`` overrides applied."""
    raw = merge(config.model_dump(mode="json", exclude_none=True), parse_overrides(overrides))
    return check_config(raw, "the run's configuration")


def check_config(raw: Mapping[str, object], source: str) -> RunConfig:
    """Turn a merged recipe into a RunConfig; ``source`` names it in errors."""
    raw = _with_default_names(raw, RunConfig)
    if isinstance(embedding := raw.get("embedding"), Mapping):
        raw = {
            **raw,
            "embedding": with_exchange_section(_with_default_names(embedding, EmbeddingSection)),
        }
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise config_error(error, raw, RunConfig, source) from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """Turn ``a.b=value`` texts into nested tables.

    ``none`` takes a value away, another that is no TOML is taken as text.

    >>> parse_overrides(["train.steps=10", "model.name=dcnv2"])
    {'train': {'steps': 10}, 'model': {'name': 'dcnv2'}}
    """
    result: dict[str, object] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not all(key.strip().split(".")):
            raise ConfigError(
                f"--set {text}",
                "KEY=VALUE, with dots in KEY for nested tables",
                "try --set train.epochs=2",
            )
        nested: Any = _toml_value(value.strip())
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        result = merge(result, nested)
    return result


def merge(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    """``base`` with the values of ``change``; tables are merged key by key.

    An optimizer, loss, initialiser or row index whose ``name`` changes is replaced whole: the
    settings of one mean nothing to another. Of an exchange's and a model's those stay that the
    other has too. Of ``epochs`` and ``steps``, which exclude each other, the change's wins, and so
    of a secret's ``env`` and ``file``.

    >>> base = {"optimizer": {"name": "adam", "lr": 0.1}, "seed": 2}
    >>> merge(base, {"optimizer": {"name": "sgd", "lr": 1.0}})
    {'optimizer': {'name': 'sgd', 'lr': 1.0}, 'seed': 2}
    """
    result = dict(base)
    for pair in _RIVALS:
        for rival, other in (pair, pair[::-1]):
            if rival in change and other not in change:
                result.pop(other, None)
    for key, value in change.items():
        old = result.get(key)
        if key in _VARIANTS and isinstance(old, str):
            old = {"name": old}  # a name alone is a section without settings
        if key in _VARIANTS and isinstance(value, str) and isinstance(old, Mapping):
            value = {"name": value}
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            is_other_variant = key in _VARIANTS and value.get("name", old.get("name")) != old.get(
                "name"
            )
            if is_other_variant and key in _SHARING:
                value = _shared(_SHARING[key], old, value["name"]) | dict(value)
            result[key] = value if is_other_variant else merge(old, value)
        else:
            result[key] = value
    return result


def _shared(registry: Registry[Any], old: Mapping[str, object], name: object) -> dict[str, object]:
    """Settings that another variant has, too, or that it says itself how to read."""
    if not isinstance(name, str) or not registry.has(name):
        return {}
    if registry is MODELS and name in registry.built_in:
        return {key: value for key, value in old.items() if key != "name"}
    fields = registry.find(name, may_import=True).section.model_fields
    return {key: value for key, value in old.items() if key in fields and key != "name"}


def _with_default_names(raw: Mapping[str, object], section: type[Section]) -> dict[str, object]:
    """A table with a name in each section that has settings and none: that of the default."""
    result = dict(raw)
    for key in _VARIANTS:
        default = section.model_fields[key].default if key in section.model_fields else None
        if (
            isinstance(default, Section)
            and isinstance(settings := raw.get(key), Mapping)
            and "name" not in settings
        ):
            result[key] = {**default.model_dump(mode="json", exclude_unset=True), **settings}
    return result


def _warn_of_settings_of_other_models(
    written: Mapping[str, object], so_far: Mapping[str, object]
) -> None:
    """Name what one file, or the command line, sets of a model and that model does not have."""
    section = written.get("model")
    whole = so_far.get("model")
    if not isinstance(section, Mapping) or not isinstance(whole, Mapping):
        return
    name = whole.get("name", RunConfig.model_fields["model"].default.name)
    model = MODELS.built_in.get(name)
    if model is None:
        return
    for key in sorted(section.keys() - model.section.model_fields.keys()):
        having = [
            other for other, spec in MODELS.built_in.items() if key in spec.section.model_fields
        ]
        logger.warning(
            "model.%s is a setting of %s; the model %s has none and leaves it out",
            key,
            ", ".join(having),
            name,
        )


def recipe_layers(name_or_path: str) -> list[tuple[Path, dict[str, object]]]:
    """The files that a recipe is made of and what each says, what all extend first."""
    return _layers(find_recipe(name_or_path), ())


def _layers(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, dict[str, object]]]:
    if path.resolve() in seen:
        raise ConfigError(
            f"{path}, which extends itself", "a chain of recipes that ends", "remove one `extends`"
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "a readable recipe", "check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}, which is no TOML: {error}", "a TOML file", "correct that line"
        ) from error
    parent = raw.pop("extends", None)
    if parent is None:
        return [(path, raw)]
    if not isinstance(parent, str):
        raise ConfigError(
            f"extends = {parent!r} in {path}",
            "the path of one recipe",
            'write extends = "base.toml"',
        )
    beside = path.parent / parent
    base = beside if beside.is_file() else find_recipe(parent)
    return [*_layers(base, (*seen, path.resolve())), (path, raw)]


def _toml_value(text: str) -> object:
    if text == "none":  # TOML has no word for it
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
