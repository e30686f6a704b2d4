"""The best items of all for a user, by the vectors of a model of both.

Shape legend: B users, N items, E width of a vector, k items that are wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.items import check_columns, read_items
from pibroch.errors import ConfigError, DataError
from pibroch.models.pairs import PairModel
from pibroch.serve.predictor import Columns, Predictor
from pibroch.serve.sampled_users import sampled_users

logger = logging.getLogger(__name__)
LEAST_RECALL = 0.95
"""Of an index; one that finds less is not used."""
MEASURED_USERS = 256
MEASURED_ITEMS = 10
"""By which recall is measured: users, and best items of each."""
NUMBERS_AT_ONCE = 1 << 24
"""Products of users and items that are held at once."""
_ITEMS_AT_ONCE = 8192
_ROUNDING = 1e-5
"""Of two sums of the same products, in float32."""
_SCORE_BYTES = 27
"""Of a number and two commas in JSON, at most."""


class ItemIndex(Protocol):
    """Finds the items whose vectors have the largest products with a user's."""

    def search(self, users: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Products, float32 ``[B, k]``, falling, and the items' places, int64 ``[B, k]``.

        Args:
            users: float32 ``[B, E]``.
            k: at most N.
        """


class ExactIndex:
    """Compares with every item: ``B N E`` products.

    Args:
        items: float32 ``[N, E]``.

    Example:
        >>> index = ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
        >>> [each.tolist() for each in index.search(torch.tensor([[1.0, 1.0]]), 2)]
        [[[3.0, 2.0]], [[2, 1]]]
    """

    def __init__(self, items: Tensor) -> None:
        self._items = items

    def search(self, users: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :class:`ItemIndex`."""
        at_once = max(1, NUMBERS_AT_ONCE // len(self._items))
        best = [(some @ self._items.T).topk(k) for some in users.split(at_once)]
        return torch.cat([each.values for each in best]), torch.cat([each.indices for each in best])


def recall_of(index: ItemIndex, exact: ExactIndex, users: Tensor, k: int) -> float:
    """The share of what an index finds that is among the k best, or as good but for rounding.

    Args:
        index: measured.
        exact: of the same items.
        users: float32 ``[B, E]``.
        k: at most N.
    """
    best = exact.search(users, k)[0]
    rounding = _ROUNDING * best.abs().amax(1, keepdim=True)
    is_found = index.search(users, k)[0] >= best[:, -1:] - rounding
    return is_found.float().mean().item()


@dataclass(frozen=True, slots=True)
class Items:
    """Raw columns of N items, at least one.

    Attributes:
        source: where they are from, for messages.
        columns: of N values each.
        index: makes of each version's vectors, float32 ``[N, E]``, what finds the best.
    """

    source: str
    columns: dict[str, list[object]]
    index: Callable[[Tensor], ItemIndex] = ExactIndex

    @classmethod
    def read(cls, path: Path, index: Callable[[Tensor], ItemIndex] = ExactIndex) -> Items:
        """A Parquet file, or a CSV file with a header, all of whose values are text.

        Args:
            path: of the file.
            index: see :attr:`index`.

        Raises:
            DataError: where it cannot be read, or has no rows.
        """
        return cls(str(path), read_items(path), index)


class Retriever:
    """A version's vectors of users, and the index of those of all items.

    Nothing of it changes after it was made; any number of threads may ask it.

    Args:
        predictor: of a model that makes both, whose dictionaries are known.
        items: of which the best are found. Those that this version does not know, whose vectors
            are all alike, are left out with a logged warning.

    Raises:
        ConfigError: for another model.
        DataError: for items without a column that the model reads, the same item twice, or none
            that is known.

    Attributes:
        predictor: whose vectors these are.
        user_columns: of raw rows, those that are read for users.
        num_items: N, without those that are left out.
        pair_bytes: of an item's id and score in JSON, at most.
        recall: the share of the best items that the index finds, measured; ``None`` of exact
            search. Below :data:`LEAST_RECALL` exact search answers in its place.
    """

    def __init__(self, predictor: Predictor, items: Items) -> None:
        model = predictor.dense
        if not isinstance(model, PairModel):
            raise ConfigError(
                f"items for version {predictor.version}, a {type(model).__name__}",
                "a two_tower or sasrec model",
                "leave --items out, or serve such a model",
            )
        self.predictor = predictor
        self._model = model
        features = predictor.schema.categorical
        column_of = {feature.name: feature.column for feature in features}
        of_item = {column_of[name] for name in model.item_features}
        of_user = {column_of[name] for name in column_of if name not in model.item_features}
        of_user |= {feature.column for feature in predictor.schema.dense}
        check_columns(items.columns, of_item, items.source)
        self.user_columns = tuple(name for name in predictor.columns if name in of_user)
        ids = items.columns[column_of[model.item_id]]
        if len({*map(str, ids)}) < len(ids):
            raise DataError(
                f"items in {items.source}, of which two have one id",
                f"each `{column_of[model.item_id]}` once",
                "leave the others out",
            )
        vectors = []
        known = []
        for first in range(0, len(ids), _ITEMS_AT_ONCE):
            some = slice(first, first + _ITEMS_AT_ONCE)
            batch = self._encoded({name: items.columns[name][some] for name in of_item})
            is_known = predictor.knows(batch, model.item_id)
            with torch.inference_mode():
                some_vectors = model.item_vectors(predictor.looked_up(batch)).float()
            vectors.append(some_vectors[is_known])
            known.append(is_known)
        self.ids = [
            id_ for id_, is_kept in zip(ids, torch.cat(known).tolist(), strict=True) if is_kept
        ]
        self.num_items = len(self.ids)
        if self.num_items < len(ids):
            self._tell_of_unknown(items, ids)
        self.pair_bytes = _SCORE_BYTES + max(map(len, map(msgspec.json.encode, self.ids)))
        self._index, self.recall = self._measured(items.index, torch.cat(vectors))

    @property
    def is_exact(self) -> bool:
        """Whether every best item is found."""
        return isinstance(self._index, ExactIndex)

    def __call__(self, users: Columns, k: int) -> tuple[list[list[object]], list[list[float]]]:
        """The ids of the k best items for each user, or of all where there are fewer, and logits.

        Best first. Logits are those that the model gives the pair, within rounding.

        Args:
            users: raw values of B users by column, all of :attr:`user_columns`.
            k: at least 1.

        Raises:
            DataError: as :meth:`Predictor.encode`.
        """
        batch = self._encoded(users)
        with torch.inference_mode():
            scores, places = self._index.search(self._vectors(batch), min(k, self.num_items))
        return [[self.ids[place] for place in row] for row in places.tolist()], scores.tolist()

    def _vectors(self, users: JaggedBatch) -> Tensor:
        embedded = self.predictor.looked_up(users)
        return self._model.user_vectors(users.dense, embedded).float()

    def _measured(
        self, make: Callable[[Tensor], ItemIndex], items: Tensor
    ) -> tuple[ItemIndex, float | None]:
        """An index that finds enough, and what the one that was made finds."""
        index = make(items)
        if isinstance(index, ExactIndex):
            return index, None
        exact = ExactIndex(items)
        with torch.inference_mode():
            users = self._vectors(sampled_users(self.predictor, MEASURED_USERS))
            recall = recall_of(index, exact, users, min(MEASURED_ITEMS, self.num_items))
        found = f"version {self.predictor.version}: the items' index finds {recall:.1%} of the best"
        if recall < LEAST_RECALL:
            logger.warning("%s: exact search answers, %.0f%% are needed", found, 100 * LEAST_RECALL)
            return exact, recall
        logger.info("%s", found)
        return index, recall

    def _tell_of_unknown(self, items: Items, ids: Sequence[object]) -> None:
        """Log that some are left out, or refuse where these are all."""
        known = {*map(str, self.ids)}
        unknown = next(str(id_) for id_ in ids if str(id_) not in known)
        if not known:
            raise DataError(
                f"items in {items.source}, none of which version {self.predictor.version} knows,"
                f" such as {unknown[:80]!r}",
                "items that were trained on",
                "write their ids as in the training data",
            )
        logger.warning(
            "%d of %d items in %s are not known to version %s, such as %r: they are never found",
            len(ids) - len(known),
            len(ids),
            items.source,
            self.predictor.version,
            unknown[:80],
        )

    def _encoded(self, columns: Columns) -> JaggedBatch:
        """A batch; what belongs to the other side is missing in it."""
        count = len(next(iter(columns.values())))
        others = {name: [None] * count for name in self.predictor.columns if name not in columns}
        return self.predictor.encode({**columns, **others})
