"""TorchRec's two embedding modules over pibroch's exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch

from pibroch.data import JaggedBatch
from pibroch.embedding import Optimizers, Table, names_of_readers
from pibroch.errors import ConfigError, DataError
from pibroch.exchange import Embeddings
from pibroch.exchange.base import ExchangeOptions
from pibroch.exchange.keyed_tensor import KeyedTensor
from pibroch.exchange.output import EmbeddingOutput, JaggedEmbeddings
from pibroch.torchrec.jagged_tensor import JaggedTensor


class _Collection(Embeddings):
    """What both share: tables of configurations, with an optimizer.

    Attributes:
        names: of what comes out, in the order of the tables.
    """

    def __init__(
        self,
        configs: Sequence[object],
        tables: Sequence[Table],
        device: Any,
        optimizer: Optimizers | None,
        exchange: str | ExchangeOptions,
        options: dict[str, Any],
    ) -> None:
        kind = type(self).__name__
        if optimizer is None:
            raise ConfigError(
                f"a {kind} without an optimizer of its rows",
                "optimizer=, e.g. pibroch.RowWiseAdagrad(lr=0.05, eps=1e-8)",
                "give it here in place of apply_optimizer_in_backward, fused_params or torch.optim;"
                " to learn nothing pibroch.Frozen()",
            )
        there = None if device is None or torch.device(device).type in ("cpu", "meta") else device
        super().__init__(tables, optimizer, exchange, device=there, **options)
        self._configs = [_with_features(config) for config in configs]
        self.names = list(names_of_readers(tables))

    @property
    def device(self) -> torch.device:
        """Where what comes out lies; rows lie in host memory."""
        return torch.device("cpu") if self._port is None else self._port.device


class EmbeddingBagCollection(_Collection):
    """Tables whose rows are pooled, as TorchRec's ``EmbeddingBagCollection``.

    Everything that :class:`pibroch.Embeddings` does holds: rows are updated inside backward, once
    for each call; :meth:`~pibroch.Embeddings.feed` looks ahead; ``state_dict`` has
    ``embedding_bags.NAME.weight``.

    Args:
        tables: configurations of TorchRec or of :mod:`pibroch.torchrec`.
        is_weighted: whether rows are scaled by the weights of the batch, which are left aside
            otherwise.
        device: where the dense model is, as of :class:`pibroch.Embeddings`; ``meta`` means the CPU.
        optimizer: of the rows, or one by table name; always given.
        exchange: as of :class:`pibroch.Embeddings`; by default ``local`` in one process and
            ``alltoall`` in several.
        **options: of :class:`pibroch.Embeddings` and of the exchange.

    Raises:
        ConfigError: for a table that cannot be, a device, or no optimizer.

    Example:
        >>> import pibroch as pb
        >>> from pibroch.torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        >>> features = ["user", "friend"]
        >>> config = EmbeddingBagConfig(9, 4, name="t", feature_names=features)
        >>> collection = EmbeddingBagCollection(tables=[config], optimizer=pb.SGD(lr=0.1))
        >>> lengths = torch.tensor([1, 1, 0, 1])
        >>> ids = KeyedJaggedTensor(features, torch.tensor([1, 2, 3]), lengths=lengths)
        >>> pooled = collection(ids)
        >>> pooled.keys(), pooled.values().shape
        (['user', 'friend'], torch.Size([2, 8]))
    """

    def __init__(
        self,
        tables: Sequence[object],
        is_weighted: bool = False,
        device: object = None,
        *,
        optimizer: Optimizers | None = None,
        exchange: str | ExchangeOptions = "auto",
        **options: object,
    ) -> None:
        made = [Table.from_config(config) for config in tables]
        for table in made:
            if table.pooling == "none":
                raise ConfigError(
                    f"table {table.name!r} without pooling in an EmbeddingBagCollection",
                    "sum or mean",
                    "put it into an EmbeddingCollection",
                )
        super().__init__(tables, made, device, optimizer, exchange, options)
        self._is_weighted = is_weighted

    def is_weighted(self) -> bool:
        """Whether rows are scaled by the weights of the batch."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' configurations."""
        return self._configs

    def forward(self, features: object) -> KeyedTensor:  # TorchRec's form of the same
        """Pooled embeddings by feature, in the order of the tables.

        Named ``feature@table`` where a feature reads several tables.

        Args:
            features: anything with a ``KeyedJaggedTensor``'s ``keys()``, ``values()``,
                ``lengths()``, ``weights_or_none()``.

        Raises:
            DataError: for features without weights where they are to scale the rows, and as
                :class:`pibroch.Embeddings`.
        """
        out = super().forward(features)
        if isinstance(out, EmbeddingOutput):
            return out.keyed_tensor()
        return KeyedTensor(self.names, [out.shape[2]] * out.shape[1], out.flatten(1))

    def _prepare(self, batch: object) -> JaggedBatch:
        ids = super()._prepare(batch)
        if not self._is_weighted:
            return ids if ids.weights is None else replace(ids, weights=None, by_id=False)
        if ids.weights is None and ids.batch_size:
            raise DataError(
                "features without weights in an EmbeddingBagCollection with is_weighted=True",
                "a weight for each id",
            )
        return ids


class EmbeddingCollection(_Collection):
    """Tables that give a vector for each id, as TorchRec's ``EmbeddingCollection``.

    As :class:`EmbeddingBagCollection`, but for ``embeddings.NAME.weight`` in ``state_dict``. Tables
    may differ in their dims.

    Args:
        tables: configurations of TorchRec or of :mod:`pibroch.torchrec`; pooling is ignored.
        device: where the dense model is, as of :class:`pibroch.Embeddings`; ``meta`` means the CPU.
        need_indices: whether what comes out has the ids as its ``weights()``.
        optimizer: of the rows, or one by table name; always given.
        exchange: as of :class:`pibroch.Embeddings`; by default ``local`` in one process and
            ``alltoall`` in several.
        **options: of :class:`pibroch.Embeddings` and of the exchange.

    Raises:
        ConfigError: for a table that cannot be, a device, or no optimizer.
    """

    kind_in_state: ClassVar[str] = "embeddings"

    def __init__(
        self,
        tables: Sequence[object],
        device: object = None,
        need_indices: bool = False,
        *,
        optimizer: Optimizers | None = None,
        exchange: str | ExchangeOptions = "auto",
        **options: object,
    ) -> None:
        made = [replace(Table.from_config(config), pooling="none") for config in tables]
        super().__init__(tables, made, device, optimizer, exchange, options)
        self._need_indices = need_indices

    def need_indices(self) -> bool:
        """Whether what comes out has the ids as its weights."""
        return self._need_indices

    def embedding_configs(self) -> list[Any]:
        """The tables' configurations."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of what comes out."""
        names = iter(self.names)
        return [[next(names) for _ in table.features] for table in self.tables]

    def embedding_dim(self) -> int:
        """Of all tables.

        Raises:
            ConfigError: when they differ.
        """
        dims = sorted({table.dim for table in self.tables})
        if len(dims) > 1:
            raise ConfigError(f"embedding_dim() of tables of dims {dims}", "one dim")
        return dims[0]

    def forward(self, features: object) -> dict[str, JaggedTensor]:  # TorchRec's form of the same
        """A vector an id, ``[V, D]``, for each feature.

        Named ``feature@table`` where a feature reads several tables.

        Args:
            features: anything with a ``KeyedJaggedTensor``'s ``keys()``, ``values()``,
                ``lengths()``; weights are left aside.

        Raises:
            DataError: as :class:`pibroch.Embeddings`.
        """
        out = super().forward(features)
        assert isinstance(out, EmbeddingOutput)
        by_feature = {}
        ids = self._ids(features) if self._need_indices else None
        for name, vectors in out.items():
            assert isinstance(vectors, JaggedEmbeddings)
            weights = None if ids is None else ids[name.split("@")[0]]
            lengths = vectors.lengths().to(self.device)
            offsets = vectors.offsets.to(self.device)
            by_feature[name] = JaggedTensor(vectors.values, weights, lengths, offsets)
        return by_feature

    def _ids(self, features: object) -> dict[str, torch.Tensor]:
        batch, _ = self._as_prepared(features)
        bounds = (
            batch.offsets[:: max(1, batch.batch_size)].tolist()
            if batch.batch_size
            else [0] * (len(batch.keys) + 1)
        )
        values = batch.values.to(self.device)
        return {key: values[bounds[i] : bounds[i + 1]] for i, key in enumerate(batch.keys)}

    def _prepare(self, batch: object) -> JaggedBatch:
        ids = super()._prepare(batch)
        return ids if ids.weights is None else replace(ids, weights=None, by_id=False)


def _with_features(config: Any) -> Any:
    """A configuration that names the features of its table, as TorchRec's modules leave it."""
    if config.feature_names:
        return config
    named = copy(config)
    named.feature_names = [config.name]
    return named
