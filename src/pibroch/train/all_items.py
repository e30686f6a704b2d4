"""How well a model of users and items finds a sample's item among all items.

Shape legend: S samples of a split, N items, E width of a vector, W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.data.dataset import Split, SplitName
from pibroch.data.loader import batch_of
from pibroch.models.pairs import EmbeddedBatch, PairModel
from pibroch.train.monitored import check_groups

_NUMBERS_AT_ONCE = 1 << 24
_ORDER: tuple[SplitName, ...] = ("train", "validation", "test")
LookedUp = Callable[[JaggedBatch], EmbeddedBatch]


def figures_over_all_items(
    model: nn.Module,
    looked_up: LookedUp,
    dataset: EncodedDataset,
    split: Split,
    batch_size: int,
    top_k: Sequence[int],
    channel: Channel | None = None,
    leave_out_seen: bool = False,
) -> dict[str, float]:
    """``all_hr@k`` and ``all_ndcg@k``, means over a split's samples with a label above 0.

    All items are those of the training split, each with the features of its first sample there. A
    sample's item is placed among them by the products of vectors; equal ones share their mean
    place, and an item that training has not seen is found nowhere. Costs S N E products, and
    lookups for S samples and N items.

    Args:
        model: the layers.
        looked_up: gives what the layers are given of a batch, wherever its rows are.
        dataset: which has the training split.
        split: whose samples are looked at.
        batch_size: samples that all ranks look up at once.
        top_k: the k.
        channel: to the other ranks, each of which does its part and calls this at the same time.
        leave_out_seen: whether the items of a group's positive samples in the splits before this
            one are no candidates for its samples, but for the sample's own item.

    Returns:
        Nothing for a model without such vectors; NaN without such samples.

    Raises:
        ConfigError: for data without groups, where items are left out.
    """
    if not isinstance(model, PairModel) or model.item_id in split.bags:
        return {}
    part = (0, 1) if channel is None else (channel.ranks.rank, channel.ranks.world_size)
    num_found: Counter[float] = Counter()
    with torch.inference_mode():
        ids, items = _all_items(model, looked_up, dataset.split("train"), batch_size, channel)
        seen = None
        if leave_out_seen:
            check_groups(dataset.schema)
            before = [dataset.split(name) for name in _ORDER[: _ORDER.index(split.name)]]
            seen = _Seen.of(before, model.item_id, ids)
        for batch in Loader(split, batch_size, part=part):
            is_positive = batch.labels > 0
            users = model.user_vectors(batch.dense, looked_up(batch)).float()[is_positive]
            wanted = batch.select((model.item_id,)).values[is_positive].numpy()
            excluded = None
            if seen is not None:
                assert batch.groups is not None, "of data with groups"
                excluded = seen.by(batch.groups[is_positive].numpy())
            num_found.update(_places(users, wanted, ids, items, excluded).tolist())
    if channel is not None:
        everyone = channel.gather(sorted(num_found.items()))
        num_found = Counter()
        for of_rank in everyone:
            for place, count in of_rank:
                num_found[place] += count
    return _figures(sorted(num_found.items()), top_k)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Items that groups had.

    Attributes:
        groups: int64 ``[G]``, rising.
        starts: int64 ``[G + 1]``, of each group's columns.
        columns: int64, of items among all.
    """

    groups: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def of(cls, splits: Sequence[Split], item_id: str, ids: NDArray[np.int64]) -> _Seen:
        """Of the samples with a label above 0, and of items that are among ``ids``, rising."""
        groups = [np.empty(0, np.int64)]
        items = [np.empty(0, np.int64)]
        for each in splits:
            assert each.groups is not None, "of data with groups"
            labels: NDArray[Any] = each.labels
            is_positive = labels.reshape(len(each), -1)[:, 0] > 0
            groups.append(each.groups[is_positive].view(np.int64))
            items.append(each.ids_of(item_id)[is_positive].astype(np.int64))
        pairs = np.stack([np.concatenate(groups), np.concatenate(items)])
        pairs = pairs[:, np.isin(pairs[1], ids)]
        pairs = pairs[:, pairs[0].argsort(kind="stable")]
        found, starts = np.unique(pairs[0], return_index=True)
        return cls(found, np.append(starts, pairs.shape[1]), ids.searchsorted(pairs[1]))

    def by(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places of these samples' groups among them, and columns of what each has had."""
        if not len(self.groups):
            return self.columns, self.columns
        at = np.minimum(self.groups.searchsorted(groups), len(self.groups) - 1)
        counts = np.where(self.groups[at] == groups, self.starts[at + 1] - self.starts[at], 0)
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        columns = self.columns[np.repeat(self.starts[at], counts) + within]
        return np.arange(len(groups)).repeat(counts), columns


def _figures(num_found: Sequence[tuple[float, int]], top_k: Sequence[int]) -> dict[str, float]:
    """Of how many samples were found at which place, by rising place."""
    total = sum(count for _, count in num_found)
    figures: dict[str, float] = {}
    for k in top_k:
        near = [(place, count) for place, count in num_found if place < k]
        gains = sum(count / np.log2(place + 2) for place, count in near)
        figures[f"all_hr@{k}"] = sum(count for _, count in near) / total if total else np.nan
        figures[f"all_ndcg@{k}"] = float(gains / total) if total else np.nan
    return figures


def _all_items(
    model: PairModel, looked_up: LookedUp, train: Split, batch_size: int, channel: Channel | None
) -> tuple[NDArray[np.int64], Tensor]:
    """Ids of N items, rising, and their vectors ``[N, E]``, on all ranks."""
    ids, first = np.unique(train.ids_of(model.item_id), return_index=True)
    vectors = [torch.empty(0, model.vector_width)]
    for samples in _in_batches(first, batch_size):
        own = samples
        if channel is not None:
            own = np.array_split(samples, channel.ranks.world_size)[channel.ranks.rank]
        some = model.item_vectors(looked_up(batch_of(train, own))).float()
        vectors += [some] if channel is None else channel.gather_tensors(some)
    return ids, torch.cat(vectors)


def _in_batches(samples: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _places(
    users: Tensor,
    wanted: NDArray[np.int64],
    ids: NDArray[np.int64],
    items: Tensor,
    excluded: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> NDArray[np.float64]:
    """How many items are before the wanted one of each user, infinite where it is none.

    Pairs of a user's place, rising, and a column that are ``excluded`` are no candidates.
    """
    places = np.full(len(wanted), np.inf)
    if not len(ids):
        return places
    column = np.minimum(ids.searchsorted(wanted), len(ids) - 1)
    at_once = max(1, _NUMBERS_AT_ONCE // len(ids))
    for start in range(0, len(wanted), at_once):
        some = slice(start, start + at_once)
        scores = users[some] @ items.T
        own = scores.gather(1, torch.from_numpy(column[some, None]))
        if excluded is not None:
            first, end = excluded[0].searchsorted([start, start + at_once])
            rows, columns = (torch.from_numpy(each[first:end]) for each in excluded)
            scores[rows - start, columns] = -torch.inf
            scores.scatter_(1, torch.from_numpy(column[some, None]), own)
        before = (scores > own).sum(1).double() + ((scores == own).sum(1) - 1).double() / 2
        places[some] = before.numpy()
    places[ids[column] != wanted] = np.inf
    return places
