"""What a user says of an embedding table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pibroch.embedding.initializers import Initializer, Uniform
from pibroch.embedding.torchrec_config import initializer_of, refuse_unsupported
from pibroch.errors import ConfigError

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table.

    Attributes:
        name: unique among the tables of a model.
        num_rows: ids are 0 to ``num_rows - 1``.
        dim: weights in a row, D.
        features: names of the features that read it; by default one, named as the table.
        pooling: how the rows of one bag become one vector; a batch's weights scale the rows first.
        initializer: initial weights; by default uniform in ±1/sqrt(num_rows).
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...] = ()
    pooling: Pooling = "sum"
    initializer: Initializer = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        for label, number in (("num_rows", self.num_rows), ("dim", self.dim)):
            if not isinstance(number, int) or number < 1:
                raise ConfigError(f"table {self.name!r} with {label} {number!r}", "a whole number of at least 1")
        if self.pooling not in get_args(Pooling):
            raise ConfigError(f"table {self.name!r} with pooling {self.pooling!r}", f"one of {get_args(Pooling)}")
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))

    @classmethod
    def from_config(cls, config: Any) -> Table:
        """A table from TorchRec's ``EmbeddingBagConfig`` or anything with its fields, initial weights alike.

        Raises:
            ConfigError: for what a table cannot do: embeddings that are not pooled, other types than float32, functions that
                initialise in ways of their own, virtual tables.
        """
        refuse_unsupported(config)
        pooling: Any = str(getattr(config.pooling, "value", config.pooling)).lower()
        features, initializer = tuple(config.feature_names), initializer_of(config)
        return cls(config.name, config.num_embeddings, config.embedding_dim, features, pooling, initializer)

    def resolved_initializer(self) -> Initializer:
        """The initializer with what it takes from the table filled in."""
        if isinstance(self.initializer, Uniform) and self.initializer.bound is None:
            return Uniform(self.num_rows**-0.5, self.initializer.center)
        return self.initializer


def check_tables(tables: Sequence[Table]) -> None:
    """Raise ConfigError unless there are tables with distinct names, distinct features and one dim."""
    if not tables:
        raise ConfigError("no tables", "at least one pibroch.Table")
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f for t in tables for f in t.features])):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f"{kind} {twice[0]!r} named twice", "distinct names")
    dims = sorted({table.dim for table in tables})
    if len(dims) > 1:
        raise ConfigError(
            f"tables of dim {dims}", "one dim, since embeddings(batch) is [B, F, D]", "make one Embeddings for each dim"
        )
