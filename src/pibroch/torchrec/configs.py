"""Table configurations with TorchRec's names.

:meth:`pibroch.Table.from_config` says which of them can be had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PoolingType(Enum):
    """How the rows of one bag become one vector."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """Of weights. Tables here are float32 or bfloat16; the others are refused by name."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"


@dataclass
class BaseEmbeddingConfig:
    """What all tables have.

    Attributes:
        num_embeddings: rows; ids are 0 to ``num_embeddings - 1``.
        embedding_dim: weights in a row.
        name: unique in a collection.
        data_type: of the weights.
        feature_names: that read the table; by default one, named as the table.
        weight_init_max, weight_init_min: bounds of uniform initial weights; by default plus and
            minus 1/sqrt(num_embeddings).
        init_fn: ``torch.nn.init.uniform_``, ``normal_`` (mean 0) or ``zeros_``, or a
            ``functools.partial`` of these, in their place.
        num_embeddings_post_pruning, need_pos, use_virtual_table: refused unless left as they are.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[..., Any] | None = None
    need_pos: bool = False
    use_virtual_table: bool = False

    def num_features(self) -> int:
        """That read the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose rows are pooled, bag by bag."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table that gives a vector for each id."""
