"""The items among which a sample's item is looked for.

Unknown and missing values are no items: their rows are shared by all that training does not know.

Shape legend: N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.data.encode import MISSING_KEY, is_known
from pibroch.data.items import check_columns, read_items
from pibroch.data.loader import ids_of
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import CategoricalFeature
from pibroch.data.transform import FIRST_ROW, MISSING_ROW
from pibroch.errors import ConfigError, DataError
from pibroch.models.pairs import PairModel


class Catalogue(Protocol):
    """N items.

    Attributes:
        ids: int64 ``[N]``, rising, none of them unknown or missing.
    """

    ids: NDArray[np.int64]

    def batch(self, places: NDArray[np.int64]) -> JaggedBatch:
        """The items at some places with their features; what is not of items is empty."""


class TrainedItems:
    """All items of the training split, those of histories among them.

    An item has the features of its first sample there, and misses them where it has none.

    Args:
        dataset: whose training split it is.
        item_features: what items are made of, their id first.
    """

    def __init__(self, dataset: EncodedDataset, item_features: Sequence[str]) -> None:
        schema = dataset.schema
        self._dataset = dataset
        self._features = {each.name: each for each in schema.categorical}
        self._item_id, *self._others = item_features
        self._train = dataset.split("train")
        item = self._features[self._item_id]
        if item.is_raw:
            readers = schema.readers[item.table]
            ids = np.unique(np.concatenate([np.unique(self._train.ids_of(n)) for n in readers]))
            self.ids = ids[is_known(item, ids)]
        else:
            counts = dataset.access_counts(item.table)
            self.ids = FIRST_ROW + np.flatnonzero(counts[FIRST_ROW:])

    @cached_property
    def _first_samples(self) -> NDArray[np.int64]:
        """Of each item, -1 for one without."""
        ids, first = np.unique(self._train.ids_of(self._item_id), return_index=True)
        places = np.minimum(ids.searchsorted(self.ids), max(0, len(ids) - 1))
        if not len(ids):
            return np.full(len(self.ids), -1)
        return np.where(ids[places] == self.ids, first[places], -1)

    def batch(self, places: NDArray[np.int64]) -> JaggedBatch:
        """See :class:`Catalogue`."""
        bags = {self._item_id: (self.ids[places], np.ones(len(places), np.int64))}
        if self._others:
            samples = self._first_samples[places]
            given = ids_of(self._train, samples[samples >= 0])
            for name in self._others:
                of_given = given.pick((name,))
                bags[name] = _filled(
                    self._features[name],
                    samples >= 0,
                    of_given.values.numpy(),
                    of_given.lengths().numpy(),
                )
        schema = self._dataset.schema
        none = np.empty(0, np.int64), np.zeros(len(places), np.int64)
        values, lengths = zip(*(bags.get(key, none) for key in schema.keys), strict=True)
        return JaggedBatch(
            torch.zeros(len(places), len(schema.dense)),
            schema.keys,
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(np.concatenate([[0], np.concatenate(lengths).cumsum()])),
            torch.zeros(len(places)),
        )


def _filled(
    feature: CategoricalFeature,
    is_given: NDArray[np.bool_],
    values: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bags of items of which some have none: these miss the value, or have an empty bag."""
    if is_given.all():
        return values, lengths
    if feature.multi_hot:
        of_all = np.zeros(len(is_given), np.int64)
        of_all[is_given] = lengths
        return values, of_all
    filled = np.full(len(is_given), MISSING_KEY if feature.is_raw else MISSING_ROW)
    filled[is_given] = values
    return filled, np.ones(len(is_given), np.int64)


class ItemsOfFile:
    """The items of a file with their features, as a server has them; unknown ones are left out.

    Args:
        dataset: by whose dictionaries they are encoded.
        item_features: what items are made of, their id first.
        path: of the file, see :func:`pibroch.data.items.read_items`.

    Raises:
        DataError: where it cannot be read, has no rows, or lacks a column.
    """

    def __init__(self, dataset: EncodedDataset, item_features: Sequence[str], path: Path) -> None:
        self._dataset = dataset
        features = {each.name: each for each in dataset.schema.categorical}
        columns = read_items(path)
        self._columns = {features[name].column for name in item_features}
        check_columns(columns, self._columns, str(path))
        item = features[item_features[0]]
        ids, _ = dataset.encoders[item.name].encode(columns[item.column])
        distinct, first = np.unique(ids.astype(np.int64), return_index=True)
        known = is_known(item, distinct)
        self.ids = distinct[known]
        self._values = {
            name: [columns[name][row] for row in first[known]] for name in self._columns
        }

    def batch(self, places: NDArray[np.int64]) -> JaggedBatch:
        """See :class:`Catalogue`."""
        schema = self._dataset.schema
        none = [None] * len(places)
        columns = {
            name: [self._values[name][place] for place in places] if name in self._columns else none
            for name in schema.used_columns(with_label=False)
        }
        return batch_from_raw(schema, self._dataset.encoders, columns)


def catalogue(
    dataset: EncodedDataset, item_features: Sequence[str], path: str | None = None
) -> Catalogue:
    """The items of a file, or of the training split without one."""
    if path is not None:
        return ItemsOfFile(dataset, item_features, Path(path))
    return TrainedItems(dataset, item_features)


def check_items(model: nn.Module, dataset: EncodedDataset, path: str) -> None:
    """Read a file of items before training begins.

    Raises:
        ConfigError: for a model that names no items.
        DataError: as :class:`ItemsOfFile`, or where none is known.
    """
    multi_hot = [each.name for each in dataset.schema.categorical if each.multi_hot]
    if not isinstance(model, PairModel) or model.item_id in multi_hot:
        raise ConfigError(
            f"train.items for a {type(model).__name__}",
            "a two_tower or sasrec model, of items with one id each",
            "leave train.items out, or train such a model",
        )
    if not len(ItemsOfFile(dataset, model.item_features, Path(path)).ids):
        raise DataError(
            f"items in {path}, none of which the data know",
            "items of the training split",
            "write their ids as in the data",
        )
