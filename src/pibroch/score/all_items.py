"""How well a model of users and items finds a sample's item among all items.

Shape legend: S samples of a batch, N items, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.data.dataset import Split
from pibroch.models.pairs import PairModel
from pibroch.serve.predictor import Predictor

_NUMBERS_AT_ONCE = 1 << 24


def figures_over_all_items(
    predictor: Predictor, dataset: EncodedDataset, split: Split, top_k: Sequence[int]
) -> dict[str, float]:
    """``all_hr@k`` and ``all_ndcg@k``, means over a split's samples with a label above 0.

    All items are those of the training split, each with the features of its first sample there. A
    sample's item is placed among them by the products of vectors; equal ones share their mean
    place, and an item that training has not seen is found nowhere. Items that a user had before
    are candidates like all others. Costs S N E products a batch, and a pass over the training
    split.

    Args:
        predictor: of a model that makes vectors of users and items.
        dataset: which has the training split.
        split: whose samples are looked at.
        top_k: the k.

    Returns:
        Nothing for another model; NaN without such samples.
    """
    model = predictor.dense
    if not isinstance(model, PairModel):
        return {}
    size = predictor.config.train.evaluate_batch_size
    ids, items = _all_items(predictor, model, Loader(dataset.split("train"), size))
    places = [np.empty(0)]
    with torch.inference_mode():
        for batch in Loader(split, size):
            is_positive = batch.labels > 0
            users = model.user_vectors(batch.dense, predictor.looked_up(batch)).float()[is_positive]
            wanted = _item_ids(batch, model)[is_positive.numpy()]
            places.append(_places(users, wanted, ids, items))
    found = np.concatenate(places)
    figures: dict[str, float] = {}
    for k in top_k:
        gains = np.where(found < k, 1 / np.log2(found + 2), 0.0)
        figures[f"all_hr@{k}"] = float((found < k).mean()) if len(found) else np.nan
        figures[f"all_ndcg@{k}"] = float(gains.mean()) if len(found) else np.nan
    return figures


def _item_ids(batch: JaggedBatch, model: PairModel) -> NDArray[np.int64]:
    return batch.select((model.item_id,)).values.numpy()


def _all_items(
    predictor: Predictor, model: PairModel, batches: Loader
) -> tuple[NDArray[np.int64], Tensor]:
    """Ids of N items, rising, and their vectors ``[N, E]``."""
    ids = np.empty(0, np.int64)
    vectors = torch.empty(0, model.vector_width)
    for batch in batches:
        some, first = np.unique(_item_ids(batch, model), return_index=True)
        is_new = ~np.isin(some, ids)
        if is_new.any():
            with torch.inference_mode():
                new = model.item_vectors(predictor.looked_up(batch)).float()[first[is_new]]
            ids = np.concatenate([ids, some[is_new]])
            vectors = torch.cat([vectors, new])
    order = np.argsort(ids)
    return ids[order], vectors[order]


def _places(
    users: Tensor, wanted: NDArray[np.int64], ids: NDArray[np.int64], items: Tensor
) -> NDArray[np.float64]:
    """How many items are before the wanted one of each user, infinite where it is none."""
    places = np.full(len(wanted), np.inf)
    if not len(ids):
        return places
    column = np.minimum(ids.searchsorted(wanted), len(ids) - 1)
    at_once = max(1, _NUMBERS_AT_ONCE // len(ids))
    for start in range(0, len(wanted), at_once):
        some = slice(start, start + at_once)
        scores = users[some] @ items.T
        own = scores.gather(1, torch.from_numpy(column[some, None]))
        before = (scores > own).sum(1).double() + ((scores == own).sum(1) - 1).double() / 2
        places[some] = before.numpy()
    places[ids[column] != wanted] = np.inf
    return places
