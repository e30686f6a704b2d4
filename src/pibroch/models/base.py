"""What a model is: dense features and embeddings in, one logit a sample out.

Shape legend: B samples, n dense features, F categorical features, D embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from torch import Tensor, nn

from pibroch.config.model import ModelConfig
from pibroch.errors import ConfigError, DataError
from pibroch.models.dropout import Dropout

Embedded = Tensor | Callable[[], Tensor]
"""Embeddings, or a function that gives them when a model needs them."""


class Model(nn.Module, ABC):
    """A plain module; it knows nothing of tables, optimizers or ranks.

    A model of one's own derives from it, and has its settings in a recipe as ``section``, see
    ``docs/my-model.md``. Its buffers are persistent: what saved models are opened from is their
    state.

    Args:
        num_dense: n, may be 0.
        num_features: F.
        config: an instance of ``section``.

    Raises:
        ConfigError: for a negative ``num_dense`` or ``num_features`` below 1, or a section of
            another model.

    Attributes:
        section: what a recipe says of it.
        pools: whether it reads a vector for each bag; else one for each id, see
            :class:`~pibroch.models.sequences.SequenceModel`.
    """

    section: ClassVar[type[ModelConfig]] = ModelConfig
    pools: ClassVar[bool] = True

    def __init__(self, num_dense: int, num_features: int, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, self.section):
            raise ConfigError(
                f"a {type(config).__name__} for the model {type(self).__name__}",
                f"a {self.section.__name__}",
                "make one, or name the model: ModelConfig(name=...)",
            )
        if num_dense < 0 or num_features < 1:
            raise ConfigError(
                f"a model of {num_dense} dense and {num_features} categorical features",
                "at least 0 dense and 1 categorical features",
                "check the schema of the data",
            )
        self.num_dense = num_dense
        self.num_features = num_features
        self.config = config
        self.embedding_dropout = Dropout(config.embedding_dropout)

    @classmethod
    def build(
        cls, num_dense: int, num_features: int, config: ModelConfig, features: Sequence[str]
    ) -> Self:
        """A model of features whose names, if they are given, it may look at."""
        return cls(num_dense, num_features, config)

    @classmethod
    def table_dim(cls, dim: int) -> int:
        """Width of a table's rows for embeddings of width ``dim``."""
        return dim

    def forward(self, dense: Tensor, embedded: Embedded) -> Tensor:
        """Logits ``[B]`` from ``dense`` ``[B, n]`` and ``embedded`` ``[B, F, table_dim(D)]``.

        Given a function, the model calls it once, as late as it can: DLRM after its bottom network,
        which then hides the time that the embeddings take to arrive. Float32 in, float32 out; under
        bf16 autocast the logits are bfloat16.

        Raises:
            DataError: when a shape is not the one the model was built for.
        """
        self._check_dense(dense)
        return self.logits(dense, lambda: self._embeddings(embedded, dense.shape[0]))

    def begin(self, dense: Tensor) -> Tensor | None:
        """What of :meth:`forward` needs no embeddings, to be worked out while they travel.

        ``None`` where there is nothing.

        Raises:
            DataError: when the shape is not the one the model was built for.
        """
        self._check_dense(dense)
        return self.dense_part(dense)

    def dense_part(self, dense: Tensor) -> Tensor | None:
        """:meth:`begin` on checked input."""
        return None

    def _check_dense(self, dense: Tensor) -> None:
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise DataError(f"dense features {list(dense.shape)}", f"[B, {self.num_dense}]")

    def finish(self, dense: Tensor, begun: Tensor | None, embedded: Tensor) -> Tensor:
        """The rest: the logits that :meth:`forward` gives, to the last bit.

        Args:
            dense: as there.
            begun: what :meth:`begin` gave for it.
            embedded: the embeddings.
        """
        logits: Tensor = self(dense, embedded)
        return logits

    def _embeddings(self, embedded: Embedded, num_samples: int) -> Tensor:
        vectors = embedded if isinstance(embedded, Tensor) else embedded()
        shape = (num_samples, self.num_features, self.table_dim(self.config.dim))
        if vectors.shape != shape:
            raise DataError(f"embeddings {list(vectors.shape)}", str(list(shape)))
        out: Tensor = self.embedding_dropout(vectors)
        return out

    @property
    def interaction_products(self) -> int:
        """Products of numbers a sample that ``forward`` makes outside its linear layers."""
        return 0

    @abstractmethod
    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:
        """:meth:`forward` on checked input.

        Args:
            dense: ``[B, n]``.
            embeddings: gives the embeddings ``[B, F, table_dim(D)]``; to be called once, as late as
                possible.

        Returns:
            ``[B]``; of several tasks ``[B, T]``.
        """


class MultiTaskModel(Model):
    """A model with a logit for each of several tasks.

    Args:
        num_dense: as for :class:`Model`.
        num_features: likewise.
        config: likewise.
        num_tasks: T. Logits are ``[B]`` of one task, else ``[B, T]``.
    """

    def __init__(
        self, num_dense: int, num_features: int, config: ModelConfig, num_tasks: int = 1
    ) -> None:
        super().__init__(num_dense, num_features, config)
        if num_tasks < 1:
            raise ConfigError(f"a model of {num_tasks} tasks", "at least one")
        self.num_tasks = num_tasks
