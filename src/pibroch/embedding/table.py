"""An embedding table as users describe it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pibroch.embedding.dtype import Dtype
from pibroch.embedding.initializers import Initializer, Uniform
from pibroch.embedding.row_index import Identity, IndexKind
from pibroch.embedding.torchrec_config import dtype_of, initializer_of, refuse_unsupported
from pibroch.errors import ConfigError
from pibroch.integers import whole_number

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table.

    Attributes:
        name: unique among the tables of a model.
        num_rows: its capacity. Rows are 0 to ``num_rows - 1``; so are ids, unless ``rows`` says
            otherwise.
        dim: weights in a row, D.
        features: names of the features that read it; by default one, named as the table. A feature
            may read several tables.
        pooling: how the rows of one bag become one vector, ``none`` for a vector an id; a batch's
            weights scale the rows first.
        initializer: initial weights; by default uniform in ±1/sqrt(num_rows).
        dtype: of the weights in memory. Updates of ``bfloat16`` ones are made in float32 and
            rounded stochastically; optimizer state is float32.
        rows: which row an id has, see :mod:`pibroch.embedding.row_index`.
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...] = ()
    pooling: Pooling = "sum"
    initializer: Initializer = field(default_factory=Uniform)
    dtype: Dtype = "float32"
    rows: IndexKind = field(default_factory=Identity)

    def __post_init__(self) -> None:
        for label, number in (("num_rows", self.num_rows), ("dim", self.dim)):
            number = whole_number(number, f"table {self.name!r} with {label}", 1)
            object.__setattr__(self, label, number)
        for label, value, choices in (
            ("pooling", self.pooling, Pooling),
            ("dtype", self.dtype, Dtype),
        ):
            if value not in get_args(choices):
                raise ConfigError(
                    f"table {self.name!r} with {label} {value!r}", f"one of {get_args(choices)}"
                )
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))

    @classmethod
    def from_config(cls, config: Any) -> Table:
        """A table from TorchRec's ``EmbeddingBagConfig`` or ``EmbeddingConfig``.

        The latter pools nothing. Anything with the fields of one will do. Initial weights are drawn
        from the same distribution.

        Raises:
            ConfigError: for what a table cannot do: types but float32 and bfloat16, functions that
                initialise in ways of their own, virtual tables.
        """
        refuse_unsupported(config)
        pooling: Any = getattr(config, "pooling", "none")
        pooling = str(getattr(pooling, "value", pooling)).lower()
        features = tuple(config.feature_names)
        initializer = initializer_of(config)
        sizes = config.num_embeddings, config.embedding_dim
        return cls(config.name, *sizes, features, pooling, initializer, dtype_of(config))

    def resolved_initializer(self) -> Initializer:
        """The initializer with what it takes from the table filled in."""
        if isinstance(self.initializer, Uniform) and self.initializer.bound is None:
            return Uniform(self.num_rows**-0.5, self.initializer.center)
        return self.initializer


def features_of(tables: Sequence[Table]) -> tuple[str, ...]:
    """The features that read these tables, in their order, each once."""
    return tuple(dict.fromkeys(feature for table in tables for feature in table.features))


def check_tables(tables: Sequence[Table]) -> None:
    """Raise ConfigError unless tables have distinct names, and each distinct features."""
    if not tables:
        raise ConfigError("no tables", "at least one pibroch.Table")
    named = [("table", [table.name for table in tables])]
    named += [(f"of table {table.name!r} feature", list(table.features)) for table in tables]
    for kind, names in named:
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f"{kind} {twice[0]!r} named twice", "distinct names")
