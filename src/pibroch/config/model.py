"""Which model stands on the embeddings, and its shape: ``[model]`` of a recipe.

Sections of the house's models are here, so that a recipe is read before torch is loaded; those of
others stand beside their models, see ``docs/my-model.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from pibroch.config.base import Section
from pibroch.config.registry import Choice, Registry, Spec
from pibroch.config.tower_groups import groups_of, read_groups
from pibroch.untrusted import NO_FILES

Activation = Literal["relu", "gelu", "silu", "tanh", "identity"]
Structure = Literal["stacked", "parallel"]
Width = Annotated[int, Field(ge=1)]
Widths = Annotated[tuple[Width, ...], Field(max_length=256)]

MODELS = Registry(
    "model",
    "pibroch.models",
    Spec,
    "pibroch.models.base:Model",
    [
        f"pibroch.config.{name}:SPECS"
        for name in ("model", "model_zoo", "model_sequences", "model_two_tower")
    ],
)


class ModelConfig(Choice):
    """A model and what all models have; each adds settings of its own.

    ``ModelConfig(name="dcnv2", cross_layers=2)`` makes the section of the model that it names.

    Attributes:
        name: of the model; a DLRM when absent.
        dim: width of an embedding; the table may be wider, see ``table_dim`` of the model.
        embedding_dropout: on the embeddings that enter the model.
    """

    registry: ClassVar[Registry[Spec]] = MODELS

    name: str = "dlrm"
    dim: int = Field(default=16, ge=1, le=4096)
    embedding_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    def __new__(cls, **values: Any) -> Self:
        """Of ``ModelConfig`` itself, the section that is named: ``__init__`` then fills it."""
        if cls is ModelConfig:
            section: type[Self]
            section = MODELS.find(values.get("name", "dlrm"), may_import=True).section
            return super().__new__(section)
        return super().__new__(cls)


class HouseConfig(ModelConfig):
    """Of the house's models: what only others of them have is checked and left out.

    So one recipe serves all of them.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_settings_of_others(cls, raw: object, info: ValidationInfo) -> object:
        if not isinstance(raw, Mapping):
            return raw
        sections = [spec.section for spec in MODELS.built_in.values()]
        of_others: dict[str, list[type[ModelConfig]]] = {
            key: having
            for key in raw.keys() - cls.model_fields.keys()
            if (having := [each for each in sections if key in each.model_fields])
        }
        for key, having in of_others.items():
            _check_setting(key, raw[key], having, info)
        return {key: value for key, value in raw.items() if key not in of_others}


def _check_setting(
    key: str, value: object, sections: Sequence[type[ModelConfig]], info: ValidationInfo
) -> None:
    """A setting is right where one of the sections takes it."""
    problem: ValidationError | None = None
    for section in sections:
        try:
            section.model_validate({key: value}, context=info.context)
        except ValidationError as error:
            problem = problem or error
        else:
            return
    if problem is not None:
        raise problem


class HiddenConfig(HouseConfig):
    """Of models with hidden layers.

    Attributes:
        activation: after each hidden layer.
        dropout: after each hidden layer, but those of ``bottom``.
        batch_norm: before each activation, but in ``bottom``.
    """

    activation: Activation = "relu"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    batch_norm: bool = False


class DeepConfig(HiddenConfig):
    """What most of the house's models have: a network of hidden layers under the logit.

    Attributes:
        top: hidden widths of DLRM's top network and of the other models' deep network; the logit is
            added.
    """

    top: Widths = (512, 256)


class DLRMConfig(DeepConfig):
    """Settings of :class:`pibroch.models.DLRM`.

    Attributes:
        bottom: hidden widths of the bottom network; its last layer, of width ``dim``, is added.
    """

    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = (512, 256)


class CrossConfig(DeepConfig):
    """Of models with crosses and a deep network.

    Attributes:
        cross_layers: number of crosses.
        cross_rank: rank of a cross's matrix; ``None`` for a full matrix.
        structure: the deep network runs on the crosses' output (``stacked``) or beside them
            (``parallel``).
    """

    cross_layers: int = Field(default=3, ge=1, le=64)
    cross_rank: int | None = Field(default=None, ge=1)
    structure: Structure = "parallel"


class DCNv2Config(CrossConfig):
    """Settings of :class:`pibroch.models.DCNv2`."""

    name: Literal["dcnv2"] = "dcnv2"


class DeepFMConfig(DeepConfig):
    """Settings of :class:`pibroch.models.DeepFM`."""

    name: Literal["deepfm"] = "deepfm"


class WideAndDeepConfig(DeepConfig):
    """Settings of :class:`pibroch.models.WideAndDeep`."""

    name: Literal["wide_deep"] = "wide_deep"


class TowersConfig(Section):
    """Groups of features, and what a tower makes of each group's embeddings (DMT).

    Attributes:
        count: towers, where ``groups`` does not say which features they have: feature i is in tower
            ``i % count``.
        groups: names of each tower's features, or a file with them that `pibroch plan towers`
            wrote.
        pass_through: leave all embeddings as they are; the model is then one without towers.
        width: of the vectors that a tower gives; that of the embeddings when absent.
        combined: vectors that are linear combinations of all embeddings of a tower (``c`` of the
            paper); ``tower_dlrm`` alone.
        projected: vectors that are made of each single embedding (``p``), by one projection for all
            of a tower; likewise.
        rank: of the matrix of the cross that a tower of ``tower_dcn`` has.
    """

    count: int = Field(default=2, ge=1)
    groups: tuple[tuple[str, ...], ...] | None = None
    pass_through: bool = False
    width: int | None = Field(default=None, ge=1, le=4096)
    combined: int = Field(default=0, ge=0)
    projected: int = Field(default=1, ge=0)
    rank: int | None = Field(default=None, ge=1)

    @field_validator("groups", mode="before")
    @classmethod
    def _from_file(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str) and info.context != NO_FILES:
            return read_groups(Path(value))
        return value

    def numbers(self, features: tuple[str, ...]) -> list[list[int]]:
        """The features of each tower by their number.

        Raises:
            ConfigError: where groups are not those of these features.
        """
        return groups_of(features, self.count, self.groups)


class TowerConfig(DeepConfig):
    """Settings of :class:`pibroch.models.TowerModel`.

    Attributes:
        bottom: hidden widths of the bottom network.
        towers: which features are in which, and what is made of them.
    """

    bottom: Widths = (512, 256)
    towers: TowersConfig = TowersConfig()


class TowerDLRMConfig(TowerConfig):
    """Settings of :class:`pibroch.models.TowerDLRM`."""

    name: Literal["tower_dlrm"] = "tower_dlrm"


class TowerDCNConfig(TowerConfig):
    """Settings of :class:`pibroch.models.TowerDCN`.

    Attributes:
        cross_layers: number of crosses over all towers' vectors.
        cross_rank: rank of a cross's matrix; ``None`` for a full matrix.
    """

    name: Literal["tower_dcn"] = "tower_dcn"
    cross_layers: int = Field(default=3, ge=1, le=64)
    cross_rank: int | None = Field(default=None, ge=1)


SPECS = (
    Spec("dlrm", "dot products of all pairs", DLRMConfig, "pibroch.models.dlrm:DLRM"),
    Spec("dcnv2", "crosses and a deep network", DCNv2Config, "pibroch.models.dcnv2:DCNv2"),
    Spec(
        "deepfm",
        "a factorisation machine and a deep network",
        DeepFMConfig,
        "pibroch.models.wide:DeepFM",
    ),
    Spec(
        "wide_deep",
        "a linear model and a deep network",
        WideAndDeepConfig,
        "pibroch.models.wide:WideAndDeep",
    ),
    Spec("tower_dlrm", "DLRM on towers", TowerDLRMConfig, "pibroch.models.towers:TowerDLRM"),
    Spec("tower_dcn", "DCN on towers", TowerDCNConfig, "pibroch.models.towers:TowerDCN"),
)
