"""Typed run configuration: sections as pydantic models, recipes as TOML.

Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pibroch.config.loss import LossConfig
    from pibroch.config.model import ModelConfig
    from pibroch.config.recipes import find_recipe, load_recipe, recipe_names
    from pibroch.config.run import RunConfig
    from pibroch.config.toml import to_toml

__all__ = [
    "LossConfig",
    "ModelConfig",
    "RunConfig",
    "find_recipe",
    "load_recipe",
    "recipe_names",
    "to_toml",
]
_HOMES = {"LossConfig": "loss", "ModelConfig": "model", "RunConfig": "run", "to_toml": "toml"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pibroch.config' has no attribute {name!r}")
    return getattr(import_module(f"pibroch.config.{_HOMES.get(name, 'recipes')}"), name)
