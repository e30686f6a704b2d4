"""``pibroch recipes``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pibroch.config.data import DataConfig


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe's name or file; all that ship when absent.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value, as in training."),
    ] = None,
) -> None:
    """List the recipes that ship, or show one as a run would have it.

    Shown is a recipe with all settings, those of what it extends and defaults too. Behind each
    stands the file that says it.

    **Examples**

        pibroch recipes

        pibroch recipes criteo_kaggle_sample_dcnv2

        pibroch recipes synthetic_small --set model.name=gdcn > mine.toml
    """
    if name is not None:
        typer.echo(_shown(name, overrides or []), nl=False)
    elif overrides:
        from pibroch.errors import ConfigError

        raise ConfigError("--set without a recipe", "the recipe to show with it", "name one")
    else:
        _list()


def _list() -> None:
    from pibroch.config import load_recipe, recipe_names
    from pibroch.config.origins import purpose

    rows = [("recipe", "model", "data", "what for")]
    for name in recipe_names():
        config = load_recipe(name)
        rows.append((name, config.model.name, _data(config.data), purpose(name)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        typer.echo("  ".join([*padded, last]))


def _data(data: DataConfig) -> str:
    if data.stream is not None:
        return "stream"
    return "generated" if data.dir is None else data.dir


def _shown(name: str, overrides: list[str]) -> str:
    """A recipe behind what must be known of it, all in TOML."""
    from pibroch.config.origins import purpose, resolve

    recipe = resolve(name, overrides)
    said = purpose(name)
    lines = [said] if said else []
    if len(recipe.files) > 1:
        extended = ", ".join(path.name for path in reversed(recipe.files[:-1]))
        lines.append(f"{recipe.files[-1].name} extends {extended}.")
    data = recipe.config.data
    if data.dir is None and data.stream is None:
        lines.append("Data: generated when a run begins.")
    elif data.prepare is not None:
        lines.append(f"Data: {data.prepare}")
    elif data.dir is not None:
        lines.append(f"Data: {data.dir}, of which the recipe does not say how it is made.")
    changes = [part for change in overrides for part in ("--set", change)]
    lines.append(f"Train: {shlex.join(['pibroch', 'train', name, *changes])}")
    return "".join(f"# {line}\n" for line in lines) + "\n" + recipe.to_toml()
