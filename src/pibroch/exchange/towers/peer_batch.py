"""A rank's ids of one tower as bytes to its peer, and the batch that the peer makes of them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import DTypeLike

from pibroch.data import JaggedBatch
from pibroch.data.batch import one_hot_offsets
from pibroch.exchange.rows import is_one_hot
from pibroch.kernels.arrays import Bytes

ONE_HOT = 1
WEIGHTED = 2
BY_ID = 4
"""Marks of a batch in a head.

Each bag has one id, so that lengths do not travel; ids have weights; rows are wanted id by id.
"""


def kind_of(batch: JaggedBatch) -> int:
    """The marks that a batch has, added."""
    return (
        ONE_HOT * is_one_hot(batch) + WEIGHTED * (batch.weights is not None) + BY_ID * batch.by_id
    )


def packed(batch: JaggedBatch, kind: int, id_type: DTypeLike) -> Bytes:
    """Ids, then int32 lengths of bags unless all are one, then float32 weights if there are any."""
    parts = [batch.values.numpy().astype(id_type)]
    if not kind & ONE_HOT:
        parts.append(batch.lengths().numpy().astype(np.int32))
    if batch.weights is not None:
        parts.append(batch.weights.detach().contiguous().float().numpy())
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpacked(
    message: Bytes, num_samples: int, kind: int, features: tuple[str, ...], id_type: DTypeLike
) -> JaggedBatch:
    """The batch of :func:`packed`, without dense features and labels."""
    # copied: may lie unaligned
    num_bags = len(features) * num_samples
    data = message.tobytes()
    id_bytes = np.dtype(id_type).itemsize
    weight_bytes = 4 * bool(kind & WEIGHTED)
    num_ids = num_bags
    if not kind & ONE_HOT:
        num_ids = (len(data) - 4 * num_bags) // (id_bytes + weight_bytes)
    values = np.frombuffer(data, id_type, num_ids).astype(np.int64)
    offsets = one_hot_offsets(num_bags)
    at = num_ids * id_bytes
    weights = None
    if not kind & ONE_HOT:
        lengths = np.frombuffer(data, np.int32, num_bags, at)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        at += 4 * num_bags
    if kind & WEIGHTED:
        weights = torch.from_numpy(np.frombuffer(data, np.float32, num_ids, at).copy())
    nothing = torch.empty(num_samples, 0)
    labels = torch.zeros(num_samples)
    return JaggedBatch(
        nothing,
        features,
        torch.from_numpy(values),
        offsets,
        labels,
        weights,
        by_id=bool(kind & BY_ID),
    )
