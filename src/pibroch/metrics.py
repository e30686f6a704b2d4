"""What predictions are worth while training goes on.

AUC, log loss, normalised entropy and calibration, task by task.

Each rank adds its own samples; figures are those of all ranks together. ``pibroch evaluate`` keeps
every prediction and is exact (:mod:`pibroch.train.metrics`); here memory is bounded, 7 MB a task,
and AUC alone may be off: up to 32,768 different logits are kept as they are, of more those that are
next to each other are put together and count as ties. In streams of a million samples of all sizes,
spreads and drifts that were tried AUC was off by 2e-5 at most, of one distribution by 1e-6.

Shape legend: B samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Ranks
from pibroch.errors import ConfigError, DataError
from pibroch.train.metrics import Metrics, figures_of

__all__ = ["Metrics", "StreamingMetrics", "WindowedMetrics"]

NUM_CELLS = 8192
"""Each group of neighbours has at most about this fraction of all weight."""
MOST_KEPT = 4 * NUM_CELLS
"""Logits of a sketch; then it puts neighbours together, which leaves 2 * NUM_CELLS + 1 at most."""
NUM_PARTS = 8
"""Of a window: it moves on by an eighth of its length."""
Sums = NDArray[np.float64]
_COUNT = 0
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
        window: samples, of all ranks together, that count as the latest ones. It moves on by
            eighths, between batches: the latest 7/8 to 8/8 of it and at most one batch more are
            counted.
        ranks: whose samples belong together; those of torch.distributed's default group when not
            given. All construct it, in one order with their other modules that talk.

    Raises:
        ConfigError: for no or equal tasks, or a window that is too short.

    Example:
        >>> metrics = StreamingMetrics(["click"])
        >>> metrics.add(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0]))
        >>> lifetime = metrics.compute()["click"].lifetime
        >>> lifetime.auc, round(lifetime.normalized_entropy, 3), lifetime.num_samples
        (1.0, 0.479, 3)
    """

    def __init__(
        self, tasks: Sequence[str] = ("label",), window: int = 1_000_000, ranks: Ranks | None = None
    ) -> None:
        if not tasks or isinstance(tasks, str) or len(set(tasks)) < len(tasks):
            raise ConfigError(f"metrics of tasks {tasks!r}", "a list of distinct names")
        ranks = Ranks.joined() if ranks is None else ranks
        self.tasks = tuple(tasks)
        self._channel = ranks.open_channel()
        self._most_in_part = window / NUM_PARTS / ranks.world_size
        if self._most_in_part < 1:
            raise ConfigError(
                f"a window of {window} samples", f"at least {NUM_PARTS * ranks.world_size}"
            )
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._lifetime = {task: np.zeros(_NUM_SUMS) for task in self.tasks}
        self._before = {task: _Curve() for task in self.tasks}  # all but the part that is open
        self._parts = {task: deque([_Samples()], maxlen=NUM_PARTS) for task in self.tasks}

    def add(self, logits: object, labels: object, weights: object = None) -> None:
        """Add this rank's samples, perhaps none; no other rank is waited for.

        Args:
            logits: floating ``[B]`` or ``[B, 1]``, before the sigmoid (``torch.logit`` of
                probabilities); with several tasks by task. Gradients are left alone.
            labels: of the same shape, from 0 to 1; by task.
            weights: of the same shape, at least 0; by task, or for all tasks; 1 when absent. A
                sample of weight 0 is left out, whatever its label and logit.

        Raises:
            DataError: for other shapes or values.
        """
        named = (("logits", logits), ("labels", labels), ("weights", weights))
        columns_by_task = {
            task: _checked(*(self._of(task, name, given) for name, given in named))
            for task in self.tasks
        }
        for task, columns in columns_by_task.items():
            parts = self._parts[task]
            sums = _sums(*columns)
            curve = _curve(*columns)
            if parts[-1].sums[_COUNT] >= self._most_in_part:
                self._before[task].add(parts[-1].curve.rows())
                parts.append(_Samples())
            parts[-1].sums += sums
            parts[-1].curve.add(curve)
            self._lifetime[task] += sums

    def compute(self) -> dict[str, WindowedMetrics]:
        """Figures by task, over the samples of all ranks; every rank calls it, and it blocks.

        NaN where there is nothing to say: no samples, or labels of one kind only.
        """
        sums = list[Sums]()
        curves = list[Sums]()
        for task in self.tasks:
            parts = self._parts[task]
            sums += [np.sum([part.sums for part in parts], 0), self._lifetime[task]]
            curves += [
                self._of_all_ranks([part.curve for part in parts]),
                self._of_all_ranks([self._before[task], parts[-1].curve]),
            ]
        total = torch.from_numpy(np.stack(sums))
        self._channel.all_reduce(total)()
        figures = [figures_of(*each) for each in zip(total.numpy(), curves, strict=True)]
        return {
            task: WindowedMetrics(figures[2 * number], figures[2 * number + 1])
            for number, task in enumerate(self.tasks)
        }

    def _of_all_ranks(self, curves: Sequence[_Curve]) -> Sums:
        whole = _Curve()
        for curve in curves:
            whole.add(curve.rows())
        here = torch.from_numpy(np.ascontiguousarray(whole.rows().T))
        everywhere = self._channel.gather_tensors(here)
        return _ordered(torch.cat(everywhere).numpy().T)

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
        return tensor.reshape(-1).to("cpu", torch.float64).numpy()


class _Curve:
    """Weights of negatives and positives by logit: what a ROC curve needs, of bounded size.

    >>> curve = _Curve()
    >>> curve.add(np.array([[0.5, 0.1, 0.5], [1, 0, 0], [0, 1, 1]]))
    >>> curve.rows().tolist()
    [[0.1, 0.5], [0.0, 1.0], [1.0, 1.0]]
    """

    def __init__(self) -> None:
        self._parts: list[Sums] = [np.empty((3, 0))]
        self._num_kept = 0

    def add(self, rows: Sums) -> None:
        """Add logits, their weights of negatives and those of positives, ``[3, N]``; not copied."""
        self._parts.append(rows)
        self._num_kept += rows.shape[1]
        if self._num_kept > MOST_KEPT:
            rows = self.rows()
            if rows.shape[1] > MOST_KEPT:
                rows = _with_neighbours(rows)
            self._parts = [rows]
            self._num_kept = rows.shape[1]

    def rows(self) -> Sums:
        """Rising logits, each once, with their weights, ``[3, N]``."""
        return _ordered(np.concatenate(self._parts, 1))


def _ordered(rows: Sums) -> Sums:
    rows = rows[:, np.argsort(rows[0], kind="stable")]
    first = np.flatnonzero(np.diff(rows[0], prepend=-np.inf) > 0)
    return _summed(rows, first, first)


def _with_neighbours(rows: Sums) -> Sums:
    """Put logits together that are in one of NUM_CELLS cells of equal weight.

    What weighs as much as a cell stays alone, so that groups do not grow round by round: what a
    round makes ties of is what is new in it.
    """
    weight = rows[1] + rows[2]
    ends = weight.cumsum()
    cell = np.floor((ends - weight / 2) * (NUM_CELLS / ends[-1]))
    is_heavy = weight * NUM_CELLS >= ends[-1]
    begins = np.append(True, (np.diff(cell) > 0) | is_heavy[1:] | is_heavy[:-1])
    first = np.flatnonzero(begins)
    middle = (first + np.append(first[1:], len(cell)) - 1) // 2
    return _summed(rows, first, middle)


def _summed(rows: Sums, first: NDArray[np.int64], shown: NDArray[np.int64]) -> Sums:
    """Groups of logits that begin at ``first``, each with its logit and its weights."""
    if len(first) == rows.shape[1]:
        return rows
    return np.stack([rows[0][shown], *np.add.reduceat(rows[1:], first, axis=1)])


@dataclass(slots=True, eq=False)
class _Samples:
    """Sums over samples, and their curve."""

    sums: Sums = field(default_factory=lambda: np.zeros(_NUM_SUMS))
    curve: _Curve = field(default_factory=_Curve)


def _checked(
    logits: Sums | None, labels: Sums | None, weights: Sums | None
) -> tuple[Sums, Sums, Sums]:
    """The samples that have weight."""
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
    return logits, labels, weights


def _sums(logits: Sums, labels: Sums, weights: Sums) -> Sums:
    losses = np.logaddexp(0.0, logits) - logits * labels
    predicted = np.exp(-np.logaddexp(0.0, -logits))
    positive = (weights * labels).sum()
    return np.array([len(logits), weights.sum(), weights @ losses, weights @ predicted, positive])


def _curve(logits: Sums, labels: Sums, weights: Sums) -> Sums:
    return np.stack([logits, weights * (1 - labels), weights * labels])
