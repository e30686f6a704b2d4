"""Which model stands on the embeddings, and its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from pibroch.config.base import Section
from pibroch.config.tower_groups import groups_of, read_groups
from pibroch.untrusted import NO_FILES

ModelName = Literal["dlrm", "dcnv2", "deepfm", "wide_deep", "tower_dlrm", "tower_dcn"]
Activation = Literal["relu", "gelu", "silu", "tanh"]
Width = Annotated[int, Field(ge=1)]
Widths = Annotated[tuple[Width, ...], Field(max_length=256)]


class TowersConfig(Section):
    """Groups of features, and the dense module that makes fewer or shorter vectors of each group's embeddings (DMT).

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


class ModelConfig(Section):
    """A model by name.

    Fields that the named model has no use for are ignored, so that one recipe serves all names.

    Attributes:
        name: ``dlrm``, ``dcnv2``, ``deepfm``, ``wide_deep``, or one with towers: ``tower_dlrm``,
            ``tower_dcn``.
        dim: width of an embedding; the table may be wider, see ``table_dim`` of the model.
        bottom: hidden widths of DLRM's bottom network; its last layer, of width ``dim``, is added.
        top: hidden widths of DLRM's top network and of the other models' deep network; the logit is
            added.
        cross_layers: number of crosses of DCNv2.
        cross_rank: rank of a cross's matrix; ``None`` for a full matrix.
        structure: DCNv2's deep network runs on the crosses' output (``stacked``) or beside them
            (``parallel``).
        activation: after each hidden layer.
        dropout: after each hidden layer of ``top``.
        embedding_dropout: on the embeddings that enter the model.
        batch_norm: before each activation of ``top``.
        towers: of the models that have some.
    """

    name: ModelName = "dlrm"
    dim: int = Field(default=16, ge=1, le=4096)
    bottom: Widths = (512, 256)
    top: Widths = (512, 256)
    cross_layers: int = Field(default=3, ge=1, le=64)
    cross_rank: int | None = Field(default=None, ge=1)
    structure: Literal["stacked", "parallel"] = "parallel"
    activation: Activation = "relu"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    embedding_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    batch_norm: bool = False
    towers: TowersConfig = TowersConfig()
