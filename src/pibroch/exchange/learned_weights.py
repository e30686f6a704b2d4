"""Weights of ids that are learned: torch scales and pools rows, so that weights get a gradient.

For that an exchange gives rows id by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import RowSpace, TableGroup


def by_id_where_learned(batch: JaggedBatch) -> JaggedBatch:
    """The batch, with rows wanted id by id if its weights want a gradient."""
    is_learned = (
        batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled()
    )
    return replace(batch, by_id=True) if is_learned else batch


def pool_by_weights(
    groups: Sequence[TableGroup], batch: JaggedBatch, rows_of_groups: Sequence[Tensor]
) -> list[Tensor]:
    """Embeddings of each group, ``[B, F, D]`` or ``[V, D]``, from rows ``[V, D]`` of its ids.

    Args:
        groups: of tables.
        batch: whose rows were wanted id by id.
        rows_of_groups: for each group ``[V, D]``.
    """
    return [
        _pooled(group.space, batch.pick(group.space.features), rows)
        for group, rows in zip(groups, rows_of_groups, strict=True)
    ]


def _pooled(space: RowSpace, batch: JaggedBatch, rows: Tensor) -> Tensor:
    assert batch.weights is not None, "they are what is learned"
    scaled = rows * batch.weights.float().to(rows.device)[:, None]
    if not space.is_pooled:
        return scaled
    size = batch.batch_size
    num_features = len(space.features)
    lengths = batch.lengths()
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(rows.device)
    nothing = torch.zeros(len(lengths), space.dim, device=rows.device)
    summed = nothing.index_add(0, bags, scaled).view(num_features, size, space.dim)
    is_mean = torch.from_numpy(space.mean_of_feature)[:, None]
    divisors = torch.where(is_mean, lengths.view(num_features, size).clamp(min=1), 1)
    return (summed / divisors[:, :, None].to(rows.device)).transpose(0, 1)
