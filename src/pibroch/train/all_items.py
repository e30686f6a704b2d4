"""How well a model of users and items finds a sample's item among all items.

Shape legend: S samples of a split, N items, E width of a vector, W ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.config.train import TrainConfig
from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.data.dataset import Split, SplitName
from pibroch.data.schema import Schema
from pibroch.models.pairs import EmbeddedBatch, PairModel
from pibroch.train.catalogue import Catalogue, catalogue
from pibroch.train.monitored import check_groups
from pibroch.train.seen_items import SeenItems

logger = logging.getLogger(__name__)

_NUMBERS_AT_ONCE = 1 << 24
_ORDER: tuple[SplitName, ...] = ("train", "validation", "test")
LookedUp = Callable[[JaggedBatch], EmbeddedBatch]


def figures_over_all_items(
    model: nn.Module,
    looked_up: LookedUp,
    dataset: EncodedDataset,
    split: Split,
    settings: TrainConfig,
    channel: Channel | None = None,
) -> dict[str, float]:
    """``all_hr@k`` and ``all_ndcg@k``, means over a split's samples with a label above 0.

    All items are those of ``settings.items``, or of the training split, see
    :mod:`pibroch.train.catalogue`. A sample's item is placed among them by the products of vectors;
    equal ones share their mean place, and an item that is none of them is found nowhere. Costs S N
    E products, and lookups for S samples and N items.

    Args:
        model: the layers.
        looked_up: gives what the layers are given of a batch, wherever its rows are.
        dataset: which has the training split.
        split: whose samples are looked at.
        settings: samples that all ranks look up at once, the k, the items, and whether those that a
            sample's group had before, in the splits before this one or in the sample's own history,
            are no candidates, but for the sample's own item.
        channel: to the other ranks, each of which does its part and calls this at the same time.

    Returns:
        Nothing for a model without such vectors; NaN without such samples, or without items.

    Raises:
        ConfigError: for data without groups, where items are left out.
        DataError: for a file of items that cannot be read, or lacks a column.
    """
    if not isinstance(model, PairModel) or model.item_id in split.bags:
        return {}
    part = (0, 1) if channel is None else (channel.ranks.rank, channel.ranks.world_size)
    batch_size = settings.evaluate_batch_size
    num_found: Counter[float] = Counter()
    with torch.inference_mode():
        items = catalogue(dataset, model.item_features, settings.items)
        if not len(items.ids):
            _warn_of_no_items(dataset, settings.items)
            return _figures([], settings.top_k)
        vectors = _vectors(model, looked_up, items, batch_size, channel)
        seen = None
        if settings.leave_out_seen:
            check_groups(dataset.schema)
            before = [dataset.split(name) for name in _ORDER[: _ORDER.index(split.name)]]
            histories = _histories(dataset.schema, model)
            seen = SeenItems.of(before, model.item_id, histories, items.ids)
        for batch in Loader(split, batch_size, part=part):
            is_positive = batch.labels > 0
            users = model.user_vectors(batch.dense, looked_up(batch)).float()[is_positive]
            wanted = batch.select((model.item_id,)).values[is_positive].numpy()
            excluded = None if seen is None else seen.by(batch, is_positive.numpy())
            num_found.update(_places(users, wanted, items.ids, vectors, excluded).tolist())
    if channel is not None:
        everyone = channel.gather(sorted(num_found.items()))
        num_found = Counter()
        for of_rank in everyone:
            for place, count in of_rank:
                num_found[place] += count
    return _figures(sorted(num_found.items()), settings.top_k)


def _histories(schema: Schema, model: PairModel) -> tuple[str, ...]:
    """The user's features that read the items' table."""
    (table,) = (each.table for each in schema.categorical if each.name == model.item_id)
    return tuple(name for name in schema.readers[table] if name not in model.item_features)


def _warn_of_no_items(dataset: EncodedDataset, items: str | None) -> None:
    where = f"the training split of {dataset.path}" if items is None else items
    logger.warning(
        "no items that are known in %s: figures over all items are not defined; a file of them can"
        " be given, as train.items or by `pibroch evaluate --items`",
        where,
    )


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


def _vectors(
    model: PairModel,
    looked_up: LookedUp,
    items: Catalogue,
    batch_size: int,
    channel: Channel | None,
) -> Tensor:
    """Of all items ``[N, E]``, on all ranks."""
    vectors = [torch.empty(0, model.vector_width)]
    for places in _in_batches(np.arange(len(items.ids)), batch_size):
        own = places
        if channel is not None:
            own = np.array_split(places, channel.ranks.world_size)[channel.ranks.rank]
        some = model.item_vectors(looked_up(items.batch(own))).float()
        vectors += [some] if channel is None else channel.gather_tensors(some)
    return torch.cat(vectors)


def _in_batches(places: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


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
