"""What predictions are worth.

AUC, log loss, normalised entropy, calibration, and the curves behind them.

Counted in integers and float64 over all predictions, so that the figures are exact and do not
depend on batches or threads. (torchmetrics, which the tests compare with, gives the same to float32
but takes three times as long and seconds to import.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures over N samples.

    Attributes:
        auc: area under the ROC curve, ties counted half; NaN with labels of one kind only, or
            predictions that are no numbers.
        logloss: mean binary cross-entropy, nats.
        normalized_entropy: log loss over the entropy of the average click rate; below 1 is better
            than knowing only that.
        calibration: predicted over observed clicks; 1 is right, above 1 predicts too many.
        num_samples: N.
    """

    auc: float
    logloss: float
    normalized_entropy: float
    calibration: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Curves:
    """Points to draw, a few hundred at most.

    Attributes:
        false_positive_rate, true_positive_rate: the ROC curve from (0, 0) to (1, 1).
        predicted, observed: mean prediction and click rate in bins of equally many samples, rising.
    """

    false_positive_rate: list[float]
    true_positive_rate: list[float]
    predicted: list[float]
    observed: list[float]


class Predictions:
    """Collects predictions batch by batch: 5 bytes a sample, and sums."""

    def __init__(self) -> None:
        self._logits: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.bool_]] = []
        self._loss_sum = 0.0

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.float32]) -> None:
        """Add a batch: logits ``[B]`` and labels ``[B]`` of 0 and 1; both are copied."""
        wide = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite logits: the loss is no number then
            self._loss_sum += float(np.sum(np.logaddexp(0.0, wide) - wide * labels))
        self._logits.append(np.array(logits, np.float32))
        self._labels.append(labels > 0.5)

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """All logits and labels so far, ``[N]`` each."""
        logits = np.concatenate(self._logits or [np.empty(0, np.float32)])
        return logits, np.concatenate(self._labels or [np.empty(0, np.bool_)])

    def result(self, num_points: int = 200, num_bins: int = 20) -> tuple[Metrics, Curves]:
        """Figures and curves over all batches so far; costs one sort."""
        logits, labels = self.arrays()
        order = np.argsort(logits, kind="stable")
        # NaN last
        logits = logits[order]
        labels = labels[order]
        with np.errstate(invalid="ignore"):
            predicted = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
        negatives, positives = _roc_counts(logits, labels)
        count = len(labels)
        clicks = int(labels.sum())
        logloss = self._loss_sum / count if count else math.nan
        is_number = not (count and np.isnan(logits[-1]))
        entropy = binary_entropy(clicks / count) if 0 < clicks < count else math.nan
        metrics = Metrics(
            auc=area_under_roc(negatives, positives) if is_number else math.nan,
            logloss=logloss,
            normalized_entropy=logloss / entropy,
            calibration=float(predicted.sum()) / clicks if clicks else math.nan,
            num_samples=count,
        )
        bins = [part for part in np.array_split(np.arange(count), num_bins) if len(part)]
        points = _thin(len(negatives), num_points)
        return metrics, Curves(
            false_positive_rate=_shares(negatives)[points].tolist(),
            true_positive_rate=_shares(positives)[points].tolist(),
            predicted=[float(predicted[part].mean()) for part in bins],
            observed=[float(labels[part].mean()) for part in bins],
        )


def area_under_roc(negatives: Counts | Floats, positives: Counts | Floats) -> float:
    """Area under a ROC curve given as cumulative counts or weights, by trapezia.

    Exact in integers until the one division.

    >>> area_under_roc(np.array([0, 0, 1, 2]), np.array([0, 1, 2, 2]))
    0.875
    """
    pairs = negatives[-1].item() * positives[-1].item()
    twice = np.sum(np.diff(negatives) * (positives[1:] + positives[:-1])).item()
    return twice / (2 * pairs) if pairs else math.nan


def _roc_counts(logits: NDArray[np.float32], labels: NDArray[np.bool_]) -> tuple[Counts, Counts]:
    """Negatives and positives at or above each distinct logit, highest first, from 0."""
    falling = logits[::-1]
    hits = labels[::-1]
    last_of_ties = np.flatnonzero(falling[1:] != falling[:-1])
    if len(falling):
        last_of_ties = np.append(last_of_ties, len(falling) - 1)
    positives = np.cumsum(hits, dtype=np.int64)[last_of_ties]
    negatives = last_of_ties + 1 - positives
    return np.insert(negatives, 0, 0), np.insert(positives, 0, 0)


def binary_entropy(rate: float) -> float:
    """In nats, of an event of this rate: the log loss of a model that knows only the rate."""
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _shares(counts: Counts) -> Floats:
    return counts / max(1, int(counts[-1]))


def _thin(length: int, num_points: int) -> Counts:
    return np.unique(np.linspace(0, length - 1, min(length, num_points)).astype(np.int64))


def finite_or_none(value: float) -> float | None:
    """``None`` for NaN and infinities, which JSON does not know."""
    return value if math.isfinite(value) else None
