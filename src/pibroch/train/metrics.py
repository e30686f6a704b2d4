"""What predictions are worth.

AUC, log loss, normalised entropy, calibration, and the curves behind them; by label, and by group.

Counted in integers and float64 over all predictions, so that the figures are exact and do not
depend on batches or threads. Where samples have weights, a sample counts as much as it weighs, as
in scikit-learn, TorchRec and LightGBM; what each figure would be if all weighed the same stands
beside it, under its name with ``_unweighted``. (torchmetrics, which the tests compare with, gives
the same to float32 but takes three times as long and seconds to import.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pibroch.data.schema import Target
from pibroch.kernels.arrays import Array
from pibroch.observability.records import UNWEIGHTED
from pibroch.train.ranking_metrics import ranking_figures

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures over N samples, weighted where they have weights.

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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What predictions are worth.

    Attributes:
        metrics: of the first label; where it holds numbers, its count alone.
        curves: likewise.
        tasks: every figure by label and name. Of labels of 0 and 1 those of :class:`Metrics`,
            ``pr_auc`` (the average precision) and, where samples have groups, those of
            :func:`pibroch.train.ranking_metrics.ranking_figures`; of numbers ``rmse`` and ``mae``.
            Where samples have weights each is there a second time, see
            :data:`pibroch.observability.records.UNWEIGHTED`.
    """

    metrics: Metrics
    curves: Curves
    tasks: dict[str, dict[str, float]]


class Predictions:
    """Collects predictions batch by batch: 5 to 16 bytes a sample and label, and sums.

    Args:
        targets: the labels; one of 0 and 1 when absent.
        top: the k of figures over the best k of a group.
    """

    def __init__(
        self, targets: Mapping[str, Target] | None = None, top: Sequence[int] = (10,)
    ) -> None:
        self.targets = dict(targets or {"label": Target()})
        self._top = tuple(top)
        self._dtype: type[np.generic] = (
            np.float32
            if any(target.kind == "number" for target in self.targets.values())
            else np.bool_
        )
        self._logits: list[NDArray[np.float32]] = []
        self._labels: list[Array] = []
        self._groups: list[NDArray[np.int64]] = []
        self._weights: list[NDArray[np.float32]] = []
        self._loss_sums = [0.0] * len(self.targets)

    def add(
        self,
        logits: NDArray[np.float32],
        labels: NDArray[np.float32],
        groups: NDArray[np.int64] | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a batch, which is copied.

        Args:
            logits: ``[B]``, or ``[B, T]`` of several labels.
            labels: of the same shape.
            groups: ``[B]``, in all batches or in none.
            weights: ``[B]``, at least 0, likewise.
        """
        for task, target in enumerate(self.targets.values()):
            if target.kind == "binary":
                wide = _column(logits, task).astype(np.float64)
                with np.errstate(invalid="ignore"):  # infinite logits: the loss is no number then
                    losses = np.logaddexp(0.0, wide) - wide * _column(labels, task)
                    self._loss_sums[task] += float(np.sum(losses))
        self._logits.append(np.array(logits, np.float32))
        self._labels.append(labels > 0.5 if self._dtype is np.bool_ else np.array(labels))
        if groups is not None:
            self._groups.append(np.array(groups))
        if weights is not None:
            self._weights.append(np.array(weights, np.float32))

    def arrays(self) -> tuple[NDArray[np.float32], Array]:
        """All logits and labels so far, ``[N]`` or ``[N, T]``; labels are truths or float32."""
        shape = (0,) if len(self.targets) == 1 else (0, len(self.targets))
        logits = np.concatenate(self._logits or [np.empty(shape, np.float32)])
        return logits, np.concatenate(self._labels or [np.empty(shape, self._dtype)])

    def groups(self) -> NDArray[np.int64] | None:
        """All groups so far, ``[N]``; ``None`` where samples have none."""
        return np.concatenate(self._groups) if self._groups else None

    def weights(self) -> NDArray[np.float32] | None:
        """All weights so far, ``[N]``; ``None`` where samples have none."""
        return np.concatenate(self._weights) if self._weights else None

    def result(self, num_points: int = 200, num_bins: int = 20) -> Evaluation:
        """Figures and curves over all batches so far.

        Costs a sort a label, two with groups, and as much again with weights.
        """
        logits, labels = self.arrays()
        groups = self.groups()
        weights = self.weights()
        tasks: dict[str, dict[str, float]] = {}
        first: tuple[Metrics, Curves] | None = None
        for task, (name, target) in enumerate(self.targets.items()):
            samples = _Samples(_column(logits, task), _column(labels, task), groups, None)
            loss_sum = self._loss_sums[task]
            result = _figures(samples, target, loss_sum, self._top, num_points, num_bins)
            if weights is not None:
                plain = {f"{key}{UNWEIGHTED}": value for key, value in result.figures.items()}
                weighted = samples.weighted(weights)
                result = _figures(weighted, target, None, self._top, num_points, num_bins)
                result.figures.update(plain)
            tasks[name] = result.figures
            first = first or (replace(result.metrics, num_samples=len(logits)), result.curves)
        assert first is not None
        return Evaluation(*first, tasks)


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """A label's samples.

    Attributes:
        logits: ``[N]``, as all that follow.
        labels: truths or numbers.
        groups: ``None`` where there are none.
        weights: above 0; ``None`` for all ones.
    """

    logits: NDArray[np.float32]
    labels: Array
    groups: NDArray[np.int64] | None
    weights: Floats | None

    def weighted(self, weights: NDArray[np.float32]) -> _Samples:
        """Those of some weight."""
        counts = weights > 0
        groups = None if self.groups is None else self.groups[counts]
        wide = weights[counts].astype(np.float64)
        return _Samples(self.logits[counts], self.labels[counts], groups, wide)

    def in_order(self) -> _Samples:
        """By logits, rising, NaN last.

        Sums of weights then do not depend on the order in which samples came.
        """
        order = (
            np.argsort(self.logits, kind="stable")
            if self.weights is None
            else np.lexsort((self.weights, self.labels, self.logits))
        )
        weights = None if self.weights is None else self.weights[order]
        return _Samples(self.logits[order], self.labels[order], None, weights)


@dataclass(frozen=True, slots=True)
class _Result:
    metrics: Metrics
    curves: Curves
    figures: dict[str, float]


def _figures(
    samples: _Samples,
    target: Target,
    loss_sum: float | None,
    top: Sequence[int],
    num_points: int,
    num_bins: int,
) -> _Result:
    """All of a label.

    Args:
        samples: in any order.
        target: the label.
        loss_sum: of clicks; it is worked out when absent.
        top: as for :class:`Predictions`.
        num_points: of a ROC curve.
        num_bins: of a calibration curve.
    """
    if target.kind == "number":
        metrics = Metrics(math.nan, math.nan, math.nan, math.nan, len(samples.logits))
        return _Result(metrics, Curves([], [], [], []), _regression_figures(samples))
    clicks = replace(samples, labels=samples.labels > 0.5)
    ordered = clicks.in_order()
    counts = _roc_counts(ordered)
    loss_sum = _loss_sum(ordered) if loss_sum is None else loss_sum
    metrics = _click_figures(ordered, counts, loss_sum)
    figures = asdict(metrics)
    del figures["num_samples"]
    figures["pr_auc"] = average_precision(*counts)
    if clicks.groups is not None:
        figures |= ranking_figures(clicks.logits, clicks.labels, clicks.groups, top, clicks.weights)
    return _Result(metrics, _curves(ordered, counts, num_points, num_bins), figures)


def _column(array: Array, task: int) -> Array:
    return array if array.ndim == 1 else array[:, task]


def _loss_sum(samples: _Samples) -> float:
    wide = samples.logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        losses = np.logaddexp(0.0, wide) - wide * samples.labels
    return float(np.sum(losses if samples.weights is None else losses * samples.weights))


def _predicted(samples: _Samples) -> Floats:
    """Probabilities."""
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -samples.logits.astype(np.float64)))


def _click_figures(
    samples: _Samples, counts: tuple[Counts | Floats, Counts | Floats], loss_sum: float
) -> Metrics:
    """Of samples in order, and their :func:`_roc_counts`."""
    negatives, positives = counts
    predicted = _predicted(samples)
    predicted_sum = float(
        np.sum(predicted if samples.weights is None else predicted * samples.weights)
    )
    clicks = positives[-1].item()
    weight = clicks + negatives[-1].item()
    rate = clicks / weight if weight else math.nan
    logloss = loss_sum / weight if weight else math.nan
    is_number = not (len(predicted) and np.isnan(samples.logits[-1]))
    return Metrics(
        auc=area_under_roc(negatives, positives) if is_number else math.nan,
        logloss=logloss,
        normalized_entropy=logloss / binary_entropy(rate) if 0 < rate < 1 else math.nan,
        calibration=predicted_sum / clicks if clicks else math.nan,
        num_samples=len(predicted),
    )


def _curves(
    samples: _Samples,
    counts: tuple[Counts | Floats, Counts | Floats],
    num_points: int,
    num_bins: int,
) -> Curves:
    """Likewise."""
    negatives, positives = counts
    predicted = _predicted(samples)
    bins = [part for part in np.array_split(np.arange(len(predicted)), num_bins) if len(part)]
    points = _thin(len(negatives), num_points)

    def mean(values: Array, part: Counts) -> float:
        weights = samples.weights
        return float(np.average(values[part], weights=None if weights is None else weights[part]))

    return Curves(
        false_positive_rate=_shares(negatives)[points].tolist(),
        true_positive_rate=_shares(positives)[points].tolist(),
        predicted=[mean(predicted, part) for part in bins],
        observed=[mean(samples.labels, part) for part in bins],
    )


def figures_of(sums: Floats, curve: Floats) -> Metrics:
    """From sums over samples.

    Args:
        sums: of 1, and of weights times 1, loss, prediction and label, ``[5]``.
        curve: rising logits, weights of negatives and of positives with each, ``[3, K]``.
    """
    count, weight, loss, predicted, positive = sums.tolist()
    negatives, positives = (np.append(0.0, each[::-1].cumsum()) for each in curve[1:])
    logloss = loss / weight if weight else math.nan
    return Metrics(
        auc=area_under_roc(negatives, positives),
        logloss=logloss,
        normalized_entropy=logloss / binary_entropy(positive / weight)
        if 0 < positive < weight
        else math.nan,
        calibration=predicted / positive if positive else math.nan,
        num_samples=int(count),
    )


def _regression_figures(samples: _Samples) -> dict[str, float]:
    errors = samples.logits.astype(np.float64) - samples.labels
    if not len(errors):
        return {"rmse": math.nan, "mae": math.nan}
    return {
        "rmse": math.sqrt(np.average(errors**2, weights=samples.weights)),
        "mae": float(np.average(np.abs(errors), weights=samples.weights)),
    }


def average_precision(negatives: Counts | Floats, positives: Counts | Floats) -> float:
    """Area under the precision-recall curve, as a sum of steps, from cumulative counts or weights.

    >>> round(average_precision(np.array([0, 0, 1, 2]), np.array([0, 1, 2, 2])), 4)
    0.8333
    """
    if not positives[-1]:
        return math.nan
    precisions = positives[1:] / (positives[1:] + negatives[1:])
    return float((np.diff(positives) * precisions).sum() / positives[-1])


def area_under_roc(negatives: Counts | Floats, positives: Counts | Floats) -> float:
    """Area under a ROC curve given as cumulative counts or weights, by trapezia.

    Exact in integers until the one division.

    >>> area_under_roc(np.array([0, 0, 1, 2]), np.array([0, 1, 2, 2]))
    0.875
    """
    pairs = negatives[-1].item() * positives[-1].item()
    twice = np.sum(np.diff(negatives) * (positives[1:] + positives[:-1])).item()
    return twice / (2 * pairs) if pairs else math.nan


def _roc_counts(samples: _Samples) -> tuple[Counts | Floats, Counts | Floats]:
    """Negatives and positives at or above each distinct logit, highest first, from 0.

    Args:
        samples: in order; their weights are summed up where they have some.
    """
    falling = samples.logits[::-1]
    hits = samples.labels[::-1]
    last_of_ties = np.flatnonzero(falling[1:] != falling[:-1])
    if len(falling):
        last_of_ties = np.append(last_of_ties, len(falling) - 1)
    if samples.weights is not None:
        weights = samples.weights[::-1]
        summed = [np.cumsum(weights * each)[last_of_ties] for each in (~hits, hits)]
        return np.insert(summed[0], 0, 0.0), np.insert(summed[1], 0, 0.0)
    positives = np.cumsum(hits, dtype=np.int64)[last_of_ties]
    negatives = last_of_ties + 1 - positives
    return np.insert(negatives, 0, 0), np.insert(positives, 0, 0)


def binary_entropy(rate: float) -> float:
    """In nats, of an event of this rate: the log loss of a model that knows only the rate."""
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _shares(counts: Counts | Floats) -> Floats:
    return counts / (counts[-1].item() or 1)


def _thin(length: int, num_points: int) -> Counts:
    return np.unique(np.linspace(0, length - 1, min(length, num_points)).astype(np.int64))


def reported(evaluation: Evaluation) -> dict[str, dict[str, float | None]]:
    """All figures by label and name, as JSON has them."""
    return {
        label: {name: finite_or_none(value) for name, value in figures.items()}
        for label, figures in evaluation.tasks.items()
    }


def finite_or_none(value: float) -> float | None:
    """``None`` for NaN and infinities, which JSON does not know."""
    return value if math.isfinite(value) else None
