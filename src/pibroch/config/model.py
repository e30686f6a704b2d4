"""Which model stands on the embeddings, and its shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pibroch.config.base import Section

ModelName = Literal["dlrm", "dcnv2", "deepfm", "wide_deep"]
Activation = Literal["relu", "gelu", "silu", "tanh"]
Width = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    """A model by name. Fields that the named model has no use for are ignored, so that one recipe serves all names.

    Attributes:
        name: ``dlrm``, ``dcnv2``, ``deepfm`` or ``wide_deep``.
        dim: width of an embedding; the table may be wider, see ``table_dim`` of the model.
        bottom: hidden widths of DLRM's bottom network; its last layer, of width ``dim``, is added.
        top: hidden widths of DLRM's top network and of the other models' deep network; the logit is added.
        cross_layers: number of crosses of DCNv2.
        cross_rank: rank of a cross's matrix; ``None`` for a full matrix.
        structure: DCNv2's deep network runs on the crosses' output (``stacked``) or beside them (``parallel``).
        activation: after each hidden layer.
        dropout: after each hidden layer of ``top``.
        embedding_dropout: on the embeddings that enter the model.
        batch_norm: before each activation of ``top``.
    """

    name: ModelName = "dlrm"
    dim: int = Field(default=16, ge=1, le=4096)
    bottom: tuple[Width, ...] = (512, 256)
    top: tuple[Width, ...] = (512, 256)
    cross_layers: int = Field(default=3, ge=1, le=64)
    cross_rank: int | None = Field(default=None, ge=1)
    structure: Literal["stacked", "parallel"] = "parallel"
    activation: Activation = "relu"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    embedding_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    batch_norm: bool = False
