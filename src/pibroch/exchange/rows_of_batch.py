"""Batches of raw ids as exchanges take them: rows in place of ids, without those that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.batch import FreshRows
from pibroch.embedding import TableGroup
from pibroch.embedding.row_index import LearningIndex
from pibroch.exchange.step_ids import feature_bounds
from pibroch.kernels.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfBatch:
    """A batch as exchanges take it.

    Attributes:
        given: the batch, with ids.
        rows: the same with rows, without the ids that have none.
        kept: the positions of the batch's ids that have rows, int64; ``None`` where all have.
    """

    given: JaggedBatch
    rows: JaggedBatch
    kept: Tensor | None

    @classmethod
    def of(
        cls, batch: JaggedBatch, parts: Sequence[tuple[slice, Ints]], fresh: FreshRows | None
    ) -> RowsOfBatch:
        """A batch whose rows are known.

        Args:
            batch: with ids.
            parts: where raw ids stand among its values, and their rows, negative for none.
            fresh: what begins anew with the batch.
        """
        values: Ints = batch.values.numpy()
        if len(parts) == 1 and len(parts[0][1]) == len(values):
            rows = parts[0][1]
        else:  # other values that are no rows are refused later
            rows = values.copy()
            for here, found in parts:
                rows[here] = found
        if all(found.min(initial=0) >= 0 for _, found in parts):
            return cls(batch, batch.with_rows(torch.from_numpy(rows), fresh), None)
        has_row = np.ones(len(values), np.bool_)
        for here, found in parts:
            has_row[here] = found >= 0
        (kept,) = np.nonzero(has_row)
        num_kept = np.concatenate([[0], np.cumsum(has_row)])
        positions = torch.from_numpy(kept)
        left = replace(
            batch,
            values=torch.from_numpy(rows[kept]),
            offsets=torch.from_numpy(num_kept[batch.offsets.numpy()]),
            weights=None if batch.weights is None else batch.weights[positions],
            fresh=fresh,
        )
        return cls(batch, left, positions)

    def positions_of(self, features: tuple[str, ...]) -> Tensor | None:
        """Among the ids of some features, those that have rows, int64; ``None`` where all have."""
        if self.kept is None:
            return None
        has_row = torch.zeros(len(self.given.values), dtype=torch.bool)
        has_row[self.kept] = True
        size = self.given.batch_size
        bounds = self.given.offsets[:: max(1, size)]
        places = [self.given.keys.index(feature) for feature in features]
        spans = [has_row[bounds[place] : bounds[place + 1]] for place in places]
        return torch.cat(spans).nonzero().squeeze(1)


def looked_up(batch: JaggedBatch, indices: Mapping[str, LearningIndex]) -> list[tuple[slice, Ints]]:
    """Where ids stand among a batch's values, and their rows.

    Args:
        batch: with ids.
        indices: of the features that are meant.
    """
    if not indices:
        return []
    values: Ints = batch.values.numpy()
    bounds = feature_bounds(batch)
    spans = {
        feature: slice(bounds[place], bounds[place + 1]) for place, feature in enumerate(batch.keys)
    }
    return [
        (here, indices[feature].rows_of(values[here]))
        for feature, here in spans.items()
        if feature in indices
    ]


def with_absent_ids(
    groups: Sequence[TableGroup], batch: RowsOfBatch, embeddings: Sequence[Tensor]
) -> list[Tensor]:
    """Embeddings of each group, with zeros for ids that have no row where a vector an id is given.

    Args:
        groups: of tables.
        batch: that was looked up.
        embeddings: of each group, as an exchange gives them.
    """
    if batch.kept is None:
        return list(embeddings)
    return [
        _spread(batch, each.space.features, vectors)
        if batch.rows.by_id or not each.space.is_pooled
        else vectors
        for each, vectors in zip(groups, embeddings, strict=True)
    ]


def _spread(batch: RowsOfBatch, features: tuple[str, ...], vectors: Tensor) -> Tensor:
    positions = batch.positions_of(features)
    assert positions is not None, "some are absent"
    num_ids = int(batch.given.offsets_of(features)[-1])
    return torch.zeros(num_ids, vectors.shape[1]).index_copy_(0, positions, vectors)


def without_absent_ids(
    groups: Sequence[TableGroup], batch: RowsOfBatch, gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The inverse of :func:`with_absent_ids`, for gradients."""
    if batch.kept is None:
        return list(gradients)
    of_groups = []
    for each, gradient in zip(groups, gradients, strict=True):
        if batch.rows.by_id or not each.space.is_pooled:
            positions = batch.positions_of(each.space.features)
            assert positions is not None, "some are absent"
            of_groups.append(gradient[positions])
        else:
            of_groups.append(gradient)
    return of_groups
