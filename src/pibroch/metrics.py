"""What predictions are worth while training goes on: AUC, log loss, normalised entropy and calibration, task by task.

Each rank adds its own samples; figures are those of all ranks together. ``pibroch evaluate`` keeps every prediction and is
exact (:mod:`pibroch.train.metrics`); here memory is fixed, 1.2 MB a task, and only AUC is not exact: logits are told apart by
steps of 1/256 between -16 and 16, pairs within a step count as ties.

Shape legend: B samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Ranks
from pibroch.errors import ConfigError, DataError
from pibroch.train.metrics import Metrics, area_under_roc, binary_entropy

__all__ = ["Metrics", "StreamingMetrics", "WindowedMetrics"]

LARGEST_LOGIT, STEPS_PER_UNIT = 16, 256
NUM_BINS = 2 * LARGEST_LOGIT * STEPS_PER_UNIT
NUM_PARTS = 8
"""Of a window: it moves on by an eighth of its length."""
Sums = NDArray[np.float64]
_COUNT, _WEIGHT, _LOSS, _PREDICTED, _POSITIVE = range(5)
_NUM_SUMS = 5


@dataclass(frozen=True, slots=True)
class WindowedMetrics:
    """Figures of one task.

    Attributes:
        window: over the latest samples.
        lifetime: over all samples.
    """

    window: Metrics
    lifetime: Metrics


class StreamingMetrics:
    """Collects predictions batch by batch.

    Args:
        tasks: names of what is predicted.
        window: samples, of all ranks together, that count as the latest ones. It moves on by eighths, between batches: the
            latest 7/8 to 8/8 of it and at most one batch more are counted.
        ranks: whose samples belong together; those of torch.distributed's default group when not given. All construct it, in
            one order with their other modules that talk.

    Raises:
        ConfigError: for no or equal tasks, or a window that is too short.

    Example:
        >>> metrics = StreamingMetrics(["click"])
        >>> metrics.add(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0]))
        >>> found = metrics.compute()["click"].lifetime
        >>> found.auc, round(found.normalized_entropy, 3), found.num_samples
        (1.0, 0.479, 3)
    """

    def __init__(
        self, tasks: Sequence[str] = ("label",), window: int = 1_000_000, ranks: Ranks | None = None
    ) -> None:
        if not tasks or isinstance(tasks, str) or len(set(tasks)) < len(tasks):
            raise ConfigError(f"metrics of tasks {tasks!r}", "a list of distinct names")
        ranks = Ranks.joined() if ranks is None else ranks
        self.tasks, self._channel = tuple(tasks), ranks.open_channel()
        self._most_in_part = window / NUM_PARTS / ranks.world_size
        if self._most_in_part < 1:
            raise ConfigError(
                f"a window of {window} samples", f"at least {NUM_PARTS * ranks.world_size}"
            )
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._lifetime = {task: _nothing() for task in self.tasks}
        self._parts = {task: deque([_nothing()], maxlen=NUM_PARTS) for task in self.tasks}

    def add(self, logits: object, labels: object, weights: object = None) -> None:
        """Add this rank's samples, perhaps none; no other rank is waited for.

        Args:
            logits: floating ``[B]`` or ``[B, 1]``, before the sigmoid (``torch.logit`` of probabilities); with several tasks by
                task. Gradients are left alone.
            labels: of the same shape, from 0 to 1; by task.
            weights: of the same shape, at least 0; by task, or for all tasks; 1 when absent. A sample of weight 0 is left out,
                whatever its label and logit.

        Raises:
            DataError: for other shapes or values.
        """
        named = (("logits", logits), ("labels", labels), ("weights", weights))
        found = {
            task: _sums(*(self._of(task, name, given) for name, given in named))
            for task in self.tasks
        }
        for task, sums in found.items():
            self._lifetime[task] += sums
            parts = self._parts[task]
            if parts[-1][_COUNT] >= self._most_in_part:
                parts.append(_nothing())
            parts[-1] += sums

    def compute(self) -> dict[str, WindowedMetrics]:
        """Figures by task, over the samples of all ranks; every rank calls it, and it blocks.

        NaN where there is nothing to say: no samples, or labels of one kind only.
        """
        both = [
            (np.sum(np.stack(self._parts[task]), 0), self._lifetime[task]) for task in self.tasks
        ]
        sums = torch.from_numpy(np.stack([each for pair in both for each in pair]))
        self._channel.all_reduce(sums)()
        figures = [_figures(each) for each in sums.numpy()]
        return {
            task: WindowedMetrics(figures[2 * number], figures[2 * number + 1])
            for number, task in enumerate(self.tasks)
        }

    def _of(self, task: str, name: str, given: object) -> Sums | None:
        """One task's part of what was given, ``[B]``."""
        if isinstance(given, Mapping):
            if task not in given:
                raise DataError(
                    f"{name} without task {task!r}", f"one for each of {list(self.tasks)}"
                )
            given = given[task]
        elif len(self.tasks) > 1 and name != "weights":
            raise DataError(
                f"{name} that are a {type(given).__name__}",
                f"a dictionary by task: {list(self.tasks)}",
            )
        if given is None:
            return None
        tensor = given.detach() if isinstance(given, Tensor) else torch.as_tensor(given)
        if tensor.ndim == 0 or tensor.numel() != len(tensor):
            raise DataError(f"{name} {list(tensor.shape)} of task {task!r}", "[B] or [B, 1]")
        found: Sums = tensor.reshape(-1).to("cpu", torch.float64).numpy()
        return found


def _nothing() -> Sums:
    return np.zeros(_NUM_SUMS + 2 * NUM_BINS)


def _sums(logits: Sums | None, labels: Sums | None, weights: Sums | None) -> Sums:
    """Sums over one batch, then the weights of negatives and positives in each bin of logits."""
    assert logits is not None and labels is not None
    weights = np.ones(len(logits)) if weights is None else weights
    if not len(logits) == len(labels) == len(weights):
        raise DataError(
            f"{len(logits)} logits, {len(labels)} labels, {len(weights)} weights", "equally many"
        )
    if not (weights >= 0).all() or not np.isfinite(weights).all():
        raise DataError(
            "a weight below 0, or one that is no finite number", "finite weights of at least 0"
        )
    logits, labels, weights = (each[weights > 0] for each in (logits, labels, weights))
    if not np.isfinite(logits).all() or not ((labels >= 0) & (labels <= 1)).all():
        raise DataError(
            "a logit that is no finite number, or a label outside 0 to 1",
            "finite logits, labels of 0 to 1",
        )
    positive, negative, sums = weights * labels, weights * (1 - labels), _nothing()
    losses = np.logaddexp(0.0, logits) - logits * labels
    predicted = np.exp(-np.logaddexp(0.0, -logits))
    sums[:_NUM_SUMS] = (
        len(logits),
        weights.sum(),
        weights @ losses,
        weights @ predicted,
        positive.sum(),
    )
    bins = np.clip((logits + LARGEST_LOGIT) * STEPS_PER_UNIT, 0, NUM_BINS - 1).astype(np.int64)
    sums[_NUM_SUMS:] = np.concatenate(
        [np.bincount(bins, each, NUM_BINS) for each in (negative, positive)]
    )
    return sums


def _figures(sums: Sums) -> Metrics:
    weight, positive = sums[_WEIGHT], sums[_POSITIVE]
    negatives, positives = (
        np.append(0.0, each[::-1].cumsum()) for each in sums[_NUM_SUMS:].reshape(2, NUM_BINS)
    )
    logloss = float(sums[_LOSS] / weight) if weight else math.nan
    return Metrics(
        auc=area_under_roc(negatives, positives),
        logloss=logloss,
        normalized_entropy=logloss / binary_entropy(float(positive / weight))
        if 0 < positive < weight
        else math.nan,
        calibration=float(sums[_PREDICTED] / positive) if positive else math.nan,
        num_samples=int(sums[_COUNT]),
    )
