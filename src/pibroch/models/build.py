"""Models by name."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from pibroch.config.model import ModelConfig
from pibroch.config.problems import config_error
from pibroch.errors import ConfigError
from pibroch.models.base import Model
from pibroch.models.dcnv2 import DCNv2
from pibroch.models.dlrm import DLRM
from pibroch.models.towers import TowerDCN, TowerDLRM, TowerModel
from pibroch.models.wide import DeepFM, WideAndDeep

MODELS: dict[str, type[Model]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "wide_deep": WideAndDeep,
    "tower_dlrm": TowerDLRM,
    "tower_dcn": TowerDCN,
}


def build_model(
    config: ModelConfig | str,
    num_dense: int,
    num_features: int,
    features: Sequence[str] = (),
    **options: object,
) -> Model:
    """A freshly initialised model; torch's seed decides its weights.

    Args:
        config: a configuration, or a model's name with the fields of `ModelConfig` as ``options``.
        num_dense: number of dense features, may be 0.
        num_features: number of categorical features.
        features: their names, by which towers may group them.
        **options: fields of `ModelConfig`, only with a name.

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
    kind = MODELS[config.name]
    if features and issubclass(kind, TowerModel):
        return kind(num_dense, num_features, config, config.towers.numbers(tuple(features)))
    return kind(num_dense, num_features, config)
