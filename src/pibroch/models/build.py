"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from pibroch.config import model as config_model
from pibroch.config.model import ModelConfig
from pibroch.config.problems import config_error
from pibroch.errors import ConfigError
from pibroch.models.base import Model

_HOUSE = config_model.MODELS.built_in
MODELS: Mapping[str, type[Model]] = {name: spec.load() for name, spec in _HOUSE.items()}
"""The house's own, by name."""


def model_class(name: str) -> type[Model]:
    """The class of a model by its name in a recipe.

    Raises:
        ConfigError: when there is none.
    """
    kind: type[Model] = config_model.MODELS.find(name).load()
    return kind


def pooling_of(config: ModelConfig) -> Literal["sum", "none"]:
    """How the rows of one bag become what a model reads."""
    return "sum" if model_class(config.name).pools else "none"


def build_model(
    config: ModelConfig | str,
    num_dense: int,
    num_features: int,
    features: Sequence[str] = (),
    **options: object,
) -> Model:
    """A freshly initialised model; torch's seed decides its weights.

    Args:
        config: the model's section, or its name with fields of its section as ``options``.
        num_dense: number of dense features, may be 0.
        num_features: number of categorical features.
        features: their names, by which towers may group them.
        **options: fields of the section, only with a name.

    Raises:
        ConfigError: for an unknown name or option, or a value out of range.
    """
    if isinstance(config, str):
        raw = {"name": config, **options}
        try:
            config = ModelConfig.model_validate(raw)
        except ValidationError as error:
            raise config_error(error, raw, ModelConfig, "the options of build_model") from error
    elif options:
        raise ConfigError(
            f"a ModelConfig and {sorted(options)}",
            "one or the other",
            "use config.model_copy(update=...)",
        )
    return model_class(config.name).build(num_dense, num_features, config, features)
