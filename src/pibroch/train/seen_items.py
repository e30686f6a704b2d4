"""Items that a sample's group had before it, such as a user's own clicks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.data.dataset import Split
from pibroch.data.kernels.text import EMPTY_CODE

_Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows and items, or columns of items."""


@dataclass(frozen=True, slots=True)
class SeenItems:
    """What the groups of some splits had; samples without a group are nobody's.

    Attributes:
        ids: of all N items, int64 ``[N]``, rising.
        histories: features with items that a sample's group had before it.
        groups: int64 ``[G]``, rising.
        starts: int64 ``[G + 1]``, of each group's columns.
        columns: int64, of items among all; of a group each once.
    """

    ids: NDArray[np.int64]
    histories: tuple[str, ...]
    groups: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        splits: Sequence[Split],
        item_id: str,
        histories: Sequence[str],
        ids: NDArray[np.int64],
    ) -> SeenItems:
        """Of samples with a label above 0 their items, and of all samples their histories'.

        Args:
            splits: of data with groups.
            item_id: the feature that tells items apart.
            histories: see :attr:`histories`.
            ids: see :attr:`ids`; others are no items.
        """
        pairs = [
            np.stack([groups, columns])
            for split in splits
            for groups, columns in _pairs_of(split, item_id, histories, ids)
        ]
        distinct = np.unique(np.concatenate([np.empty((2, 0), np.int64), *pairs], 1), axis=1)
        groups, starts = np.unique(distinct[0], return_index=True)
        bounds = np.append(starts, distinct.shape[1])
        return cls(ids, tuple(histories), groups, bounds, distinct[1])

    def by(self, batch: JaggedBatch, is_chosen: NDArray[np.bool_]) -> _Pairs:
        """Of some samples of a batch the places among them, rising, and columns of what each had.

        A column may stand there twice.
        """
        assert batch.groups is not None, "of data with groups"
        parts = [self._of_groups(batch.groups.numpy()[is_chosen])]
        numbers = is_chosen.cumsum() - 1
        for name in self.histories:
            history = batch.pick((name,))
            samples = np.arange(batch.batch_size).repeat(history.lengths().numpy())
            is_of_chosen = is_chosen[samples]
            items = history.values.numpy()[is_of_chosen]
            parts.append(_known(numbers[samples[is_of_chosen]], items, self.ids))
        samples, columns = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = samples.argsort(kind="stable")
        return samples[order], columns[order]

    def _of_groups(self, groups: NDArray[np.int64]) -> _Pairs:
        if not len(self.groups):
            return self.columns, self.columns
        at = np.minimum(self.groups.searchsorted(groups), len(self.groups) - 1)
        counts = np.where(self.groups[at] == groups, self.starts[at + 1] - self.starts[at], 0)
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        columns = self.columns[np.repeat(self.starts[at], counts) + within]
        return np.arange(len(groups)).repeat(counts), columns


def _pairs_of(
    split: Split, item_id: str, histories: Sequence[str], ids: NDArray[np.int64]
) -> Iterator[_Pairs]:
    """Groups and columns of what their samples in a split have."""
    assert split.groups is not None, "of data with groups"
    groups = split.groups.view(np.int64)
    has_group = split.groups != EMPTY_CODE
    labels: NDArray[Any] = split.labels
    is_positive = has_group & ((labels if labels.ndim == 1 else labels[:, 0]) > 0)
    yield _known(groups[is_positive], split.ids_of(item_id)[is_positive], ids)
    for name in histories:
        items = split.ids_of(name)
        lengths = np.diff(split.bags[name].offsets) if name in split.bags else 1
        of_group = has_group.repeat(lengths)
        yield _known(groups.repeat(lengths)[of_group], items[of_group], ids)


def _known(rows: NDArray[np.int64], items: NDArray[Any], ids: NDArray[np.int64]) -> _Pairs:
    """Rows and columns of those items that are among ``ids``."""
    if not len(ids):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    columns = np.minimum(ids.searchsorted(items), len(ids) - 1)
    is_known = ids[columns] == items
    return rows[is_known], columns[is_known]
