"""Evaluate a model on a split, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.data import EncodedDataset, Loader
from pibroch.data.dataset import SplitName
from pibroch.train.metrics import Curves, Metrics, Predictions
from pibroch.train.session import Session


@dataclass(frozen=True, slots=True)
class AccessSkew:
    """How few rows take most accesses.

    Attributes:
        row_share: fractions of the rows that are accessed at all, most accessed first, rising to 1.
        access_share: fraction of all accesses that these rows take.
    """

    row_share: list[float]
    access_share: list[float]


def evaluate(session: Session, split: SplitName) -> tuple[Metrics, Curves]:
    """Metrics over a whole split; weights, optimizer state and random numbers stay untouched."""
    predictions = Predictions()
    with session.predicting() as logits:
        for batch in Loader(session.dataset.split(split), session.config.train.evaluate_batch_size):
            predictions.add(logits(batch).numpy(), batch.labels.numpy())
    return predictions.result()


def access_skew(dataset: EncodedDataset, num_points: int = 60) -> AccessSkew:
    """Skew of the training split over the rows of all tables; costs one sort of the rows that are accessed."""
    counts = np.concatenate([_accessed(dataset.access_counts(feature)) for feature in dataset.num_rows])
    if not len(counts):
        return AccessSkew([], [])
    counts.sort()
    points = np.unique(np.geomspace(1, len(counts), num_points).astype(np.int64))
    shares = np.cumsum(counts[::-1], dtype=np.int64)[points - 1] / counts.sum(dtype=np.int64)
    return AccessSkew((points / len(counts)).tolist(), shares.tolist())


def _accessed(counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    return counts[counts > 0].astype(np.uint32)
