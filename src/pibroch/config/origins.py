"""Where each value of a resolved recipe comes from: a file, the command line, or the default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pibroch.config.differences import settings
from pibroch.config.recipes import check_config, find_recipe, merge, parse_overrides, recipe_layers
from pibroch.config.run import RunConfig
from pibroch.config.toml import to_toml

DEFAULT = "default"
COMMAND_LINE = "--set"


@dataclass(frozen=True, slots=True)
class ResolvedRecipe:
    """A recipe with all that it extends.

    Attributes:
        config: what a run would have.
        files: that the recipe is made of, what all extend first.
        origins: by key with dots, the name of the file that says a value last, or ``--set``.
        given: keys that somebody says, in the spelling of today.
    """

    config: RunConfig
    files: tuple[Path, ...]
    origins: Mapping[str, str]
    given: frozenset[str]

    def origin(self, key: str) -> str:
        """Of the value of a key."""
        if key in self.origins:
            return self.origins[key]
        # names of default components are filled in
        is_renamed = key in self.given and not key.endswith(".name")
        return "given under an earlier name" if is_renamed else DEFAULT

    def to_toml(self) -> str:
        """A recipe that extends none, each value with its origin behind it."""
        return to_toml(self.config.model_dump(mode="json"), self.origin)


def resolve(name_or_path: str, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Read a recipe as a run would, and remember who said what.

    Raises:
        ConfigError: as :func:`pibroch.config.load_recipe` does.
    """
    layers = recipe_layers(name_or_path)
    raw: dict[str, object] = {}
    origins: dict[str, str] = {}
    changes = [(path.name, said) for path, said in layers]
    for source, said in (*changes, (COMMAND_LINE, parse_overrides(overrides))):
        raw = merge(raw, said)
        # `model = "dcnv2"` says `model.name`
        origins |= {spelled: source for key in settings(said) for spelled in (key, f"{key}.name")}
        keys = settings(raw).keys()
        origins = {
            key: source
            for key, source in origins.items()
            if key in keys or key.removesuffix(".name") in keys
        }
    config = check_config(raw, layers[-1][0].name)
    given = settings(config.model_dump(mode="json", exclude_unset=True))
    return ResolvedRecipe(config, tuple(path for path, _ in layers), origins, frozenset(given))


def purpose(name_or_path: str) -> str:
    """The first sentence of the comment that a recipe begins with; empty without one."""
    text = find_recipe(name_or_path).read_text(encoding="utf-8-sig")
    comment = re.match(r"(?:#.*\n)*", text)
    words = " ".join(line.lstrip("# ") for line in (comment[0] if comment else "").splitlines())
    return re.split(r"(?<=\.)\s", words)[0]
