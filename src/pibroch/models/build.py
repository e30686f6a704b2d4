"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from pibroch.config import model as config_model
from pibroch.config.model import ModelConfig
from pibroch.config.problems import config_error
from pibroch.errors import ConfigError
from pibroch.models.base import Model, MultiTaskModel

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
    num_tasks: int = 1,
    **options: object,
) -> Model:
    """A freshly initialised model; torch's seed decides its weights.

    Args:
        config: the model's section, or its name with fields of its section as ``options``.
        num_dense: number of dense features, may be 0.
        num_features: number of categorical features.
        features: their names, by which towers may group them.
        num_tasks: logits a sample; more than one takes a :class:`MultiTaskModel`.
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
    kind = model_class(config.name)
    if issubclass(kind, MultiTaskModel):
        return kind(num_dense, num_features, config, num_tasks)
    if num_tasks != 1:
        able = [name for name, each in MODELS.items() if issubclass(each, MultiTaskModel)]
        raise ConfigError(
            f"model {config.name!r} for {num_tasks} labels",
            f"a model of several tasks: {', '.join(able)}",
            "change model.name, or prepare the data with one label",
        )
    return kind.build(num_dense, num_features, config, features)
