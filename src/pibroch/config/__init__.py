"""Typed run configuration and recipes."""

from pibroch.config.model import ModelConfig
from pibroch.config.recipes import find_recipe, load_recipe, recipe_names
from pibroch.config.run import RunConfig
from pibroch.config.toml import to_toml

__all__ = ["ModelConfig", "RunConfig", "find_recipe", "load_recipe", "recipe_names", "to_toml"]
