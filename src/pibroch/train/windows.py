"""Progressive validation: predictions of a step before it trains, by windows of event time.

The forward pass of a step gives them, by weights as all steps before have left them. All ranks'
samples count. Ranks agree now and then (:meth:`ProgressiveWindows.settle`), and whenever something
is saved. The figures do not depend on when, nor on the number of ranks, as all that is summed up
are whole numbers: weights by label and cell of logits, losses and predictions in units of 2^-24.
Which windows are open, and what is late or ahead, follows from the steps alone, see
:mod:`pibroch.data.event_windows` and :mod:`pibroch.data.event_clock`.

A cell is 1/256 of a logit, from -16 to 16; for AUC, logits of one are ties.

Where samples have weights, what a sample adds to the sums is weighted; beside them are others in
which all that are in a window count alike.

Legend: N samples of this rank, L labels, T sums of these that are 0 or 1, twice as many with
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.config.train import WindowsConfig
from pibroch.data import JaggedBatch
from pibroch.data.event_clock import EventClock, runs_of
from pibroch.data.event_windows import NO_TIME, WindowRule
from pibroch.data.schema import Schema
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.observability.records import UNWEIGHTED, WindowRecord
from pibroch.state.files import CHECKPOINT
from pibroch.train.metrics import Metrics, figures_of, finite_or_none

MOST_STEPS = 64
"""Until ranks agree at the latest."""
_CELLS = 8192
_LIMIT = 16.0
_UNIT = float(1 << 24)
_NUM_TOTALS = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Of some samples, in units.

    Attributes:
        counts: weights by sum, label and cell, int64 ``[T, 2, cells]``.
        totals: by sum as :func:`figures_of` takes them, int64 ``[T, 5]``.
    """

    counts: Ints
    totals: Ints

    @classmethod
    def none(cls, num_sums: int) -> _Sums:
        counts = np.zeros((num_sums, 2, _CELLS), np.int64)
        return cls(counts, np.zeros((num_sums, _NUM_TOTALS), np.int64))

    def metrics(self, number: int) -> Metrics:
        counts = self.counts[number] / _UNIT
        seen = np.flatnonzero(counts.any(0))
        centres = (seen + 0.5) * (2 * _LIMIT / _CELLS) - _LIMIT
        return figures_of(self.totals[number] / _UNIT, np.stack([centres, *counts[:, seen]]))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a step adds on this rank: runs of its times, and its samples where windows are kept."""

    number: int
    runs: Ints
    times: Ints
    scores: Floats
    labels: Floats
    weights: Floats


class ProgressiveWindows:
    """The watermark of a run, and its windows where the recipe asks for some.

    Args:
        schema: of the data, which has times.
        settings: of windows; none are kept when absent.
        channel: to the other ranks.

    Raises:
        ConfigError: for settings of data without times, or without a label of 0 and 1.
    """

    def __init__(self, schema: Schema, settings: WindowsConfig | None, channel: Channel) -> None:
        targets = list(schema.targets.items())
        self._num_labels = len(targets)
        self._tasks = {
            name: place for place, (name, target) in enumerate(targets) if target.kind == "binary"
        }
        if settings is not None and (schema.time is None or not self._tasks):
            raise ConfigError(
                "[train.windows] of data without event times, or without labels of 0 and 1",
                "both",
                "name the column of times as `time` in the schema, or leave [train.windows] out",
            )
        columns = list(self._tasks.values())
        self._has_weights = schema.weight is not None
        self._summed = [(column, True) for column in columns]  # a label, and whether it is weighted
        if self._has_weights:
            self._summed += [(column, False) for column in columns]
        self._settings = settings
        self._channel = channel
        self._rule = _rule_of(settings)
        self._gap = round(1000 * (settings or WindowsConfig()).ahead_seconds)
        self._steps: list[_Step] = []
        self._clock = EventClock(self._gap, trusts_first=True)
        self._num_late = 0
        self._open: dict[int, _Sums] = {}

    @property
    def watermark(self) -> int | None:
        """The event time of all ranks when they last agreed, in milliseconds since 1970."""
        return self._clock.time

    @property
    def is_due(self) -> bool:
        """Whether ranks are to agree now; the same on all."""
        return len(self._steps) >= MOST_STEPS

    def go_on(self, watermark: int | None) -> None:
        """Take the watermark of an earlier process of the run."""
        if watermark is not None and (self._clock.time is None or self._clock.time < watermark):
            self._clock.time = watermark

    def add(self, step: int, logits: Tensor, batch: JaggedBatch) -> None:
        """Take a step's predictions on this rank, before it trains; no other rank is waited for.

        Args:
            step: its number.
            logits: ``[N]``, or ``[N, T]`` of several labels.
            batch: of which these are; one without samples may lack times.
        """
        times = np.empty(0, np.int64) if batch.event_times is None else batch.event_times.numpy()
        size = len(times) if self._settings is not None else 0
        shape = size, self._num_labels
        weights = torch.ones(size) if batch.sample_weights is None else batch.sample_weights
        columns = (logits.detach().cpu()[:size], batch.labels[:size], weights[:size])
        scores, labels, sample_weights = (each.double().numpy().copy() for each in columns)
        self._steps.append(
            _Step(
                step,
                runs_of(times, self._gap),
                times[:size].copy(),
                scores.reshape(shape),
                labels.reshape(shape),
                sample_weights,
            )
        )

    def settle(self) -> list[WindowRecord]:
        """Agree with the other ranks; the windows that have closed, in the order of their times.

        Every rank calls it after the same step, and it blocks.

        Raises:
            RankFailedError: when a rank was lost.
        """
        if not self._steps:
            return []
        steps = self._steps
        self._steps = []
        numbers = np.repeat(np.arange(len(steps)), [len(each.runs) for each in steps])
        own = np.column_stack([numbers, np.concatenate([each.runs for each in steps])])
        runs = self._of_all_ranks(own)
        marks = [self._watermark]
        num_ahead = []
        for number in range(len(steps)):
            self._clock.advance(_rows_of(number, runs)[:, 1:])
            marks.append(self._watermark)
            num_ahead.append(self._clock.num_ahead)
        if self._settings is None:
            return []
        return self._count(steps, np.array(marks), num_ahead)

    def state(self) -> dict[str, Tensor]:
        """Of the last agreement, in tensors whose shapes never change."""
        kind = [self._rule.width_ms, self._rule.lateness_ms, self._gap]
        arrays = {"about": np.array([*kind, *self._clock.state(), self._num_late])}
        if self._settings is not None:
            none = _Sums.none(len(self._summed))
            begins = np.full(self._rule.most_open, NO_TIME, np.int64)
            begins[: len(self._open)] = sorted(self._open)
            sums = [self._open.get(begin, none) for begin in begins.tolist()]
            arrays["begins"] = begins
            arrays["counts"] = np.stack([each.counts for each in sums])
            arrays["totals"] = np.stack([each.totals for each in sums])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse; windows of another width begin anew.

        Raises:
            CheckpointError: for tensors that are none of these.
        """
        expected = self.state()
        about = tensors.get("about", torch.empty(0)).numpy()
        if about[:3].tolist() != expected["about"][:3].tolist():
            return
        kinds = {name: (each.shape, each.dtype) for name, each in tensors.items()}
        if kinds != {name: (each.shape, each.dtype) for name, each in expected.items()}:
            raise CHECKPOINT("windows of event time in other shapes", "those of its recipe")
        self._clock.load_state(about[3:-1])
        self._num_late = int(about[-1])
        self._open = {
            begin: _Sums(*(tensors[name][place].numpy().copy() for name in ("counts", "totals")))
            for place, begin in enumerate(tensors["begins"].tolist() if self._settings else ())
            if begin != NO_TIME
        }

    @property
    def _watermark(self) -> int:
        return NO_TIME if self._clock.time is None else self._clock.time

    def _count(
        self, steps: Sequence[_Step], marks: Ints, num_ahead: Sequence[int]
    ) -> list[WindowRecord]:
        """Sum up all ranks' samples of some steps, and close the windows that are over.

        Args:
            steps: this rank's samples.
            marks: the watermark before the first step, and after each.
            num_ahead: samples of the run up to each step that were ahead.
        """
        step_of = np.repeat(np.arange(len(steps)), [len(each.times) for each in steps])
        times = np.concatenate([each.times for each in steps])
        begins = self._rule.begins(times)
        is_late = self._rule.is_over(begins, marks[step_of])
        is_ahead = times > marks[step_of + 1]
        late = np.bincount(step_of[is_late], minlength=len(steps)).tolist()
        num_late = self._num_late + np.sum(self._channel.gather(late), 0).cumsum()
        self._num_late = int(num_late[-1])
        counts, totals = map(self._of_all_ranks, self._sparse(steps, begins, ~(is_late | is_ahead)))
        records = []
        for begin in sorted({*self._open, *totals[:, 0].tolist()}):
            sums = self._open.pop(begin, None) or _Sums.none(len(self._summed))
            own = _rows_of(begin, counts)
            np.add.at(sums.counts.reshape(-1), own[:, 1], own[:, 2])
            added = _rows_of(begin, totals)[:, 1:].sum(0)
            sums.totals[...] += added.reshape(sums.totals.shape)
            closed = np.flatnonzero(self._rule.is_over(begin, marks[1:]))
            if len(closed):
                place = int(closed[0])
                late_and_ahead = int(num_late[place]), num_ahead[place]
                records.append(self._record(steps[place].number, begin, sums, *late_and_ahead))
            else:
                self._open[begin] = sums
        return records

    def _of_all_ranks(self, rows: Ints) -> Ints:
        """All rows, by their first numbers."""
        gathered = torch.cat(self._channel.gather_tensors(torch.from_numpy(rows))).numpy()
        return gathered[np.argsort(gathered[:, 0], kind="stable")]

    def _sparse(
        self, steps: Sequence[_Step], begins: Ints, is_kept: NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """This rank's sums.

        Rows of a window, a place in its counts and the weight there; and of a window and its
        totals.
        """
        weights = np.concatenate([each.weights for each in steps])
        if not self._has_weights:
            is_kept = is_kept & (weights > 0)
        weights = weights[is_kept]
        ones = np.ones(len(weights))
        scores = np.concatenate([each.scores for each in steps])[is_kept]
        labels = np.concatenate([each.labels for each in steps])[is_kept]
        windows, window_of = np.unique(begins[is_kept], return_inverse=True)
        size = 2 * _CELLS * len(self._summed)
        totals = np.zeros((len(windows), _NUM_TOTALS * len(self._summed)), np.int64)
        counts = []
        for number, (column, is_weighted) in enumerate(self._summed):
            is_hit = labels[:, column] > 0.5
            place = (2 * number + is_hit) * _CELLS + _cells(scores[:, column])
            keys, key_of = np.unique(window_of * size + place, return_inverse=True)
            units = np.zeros(len(keys), np.int64)
            of_sample = weights if is_weighted else ones
            np.add.at(units, key_of, _in_units(of_sample))
            window, place = np.divmod(keys, size)
            counts.append(np.stack([windows[window], place, units], 1))
            own = totals[:, _NUM_TOTALS * number : _NUM_TOTALS * (number + 1)]
            np.add.at(own, window_of, _totals(scores[:, column], is_hit, of_sample))
        return np.concatenate(counts), np.concatenate([windows[:, None], totals], 1)

    def _record(
        self, step: int, begin: int, sums: _Sums, num_late: int, num_ahead: int
    ) -> WindowRecord:
        assert self._settings is not None, "else there are no windows"
        metrics = {name: sums.metrics(task) for task, name in enumerate(self._tasks)}
        figures = {
            name: {key: finite_or_none(value) for key, value in asdict(each).items()}
            for name, each in metrics.items()
        }
        for number, name in enumerate(self._tasks, len(metrics)) if self._has_weights else ():
            for key, value in asdict(sums.metrics(number)).items():
                figures[name][f"{key}{UNWEIGHTED}"] = finite_or_none(value)
        alarms = [
            problem if len(metrics) == 1 else f"{name}: {problem}"
            for name, each in metrics.items()
            for problem in self._settings.problems(each.num_samples, each.auc, each.calibration)
        ]
        first = next(iter(metrics))
        return WindowRecord(
            step=step,
            begin_ms=begin,
            end_ms=begin + self._rule.width_ms,
            num_samples=metrics[first].num_samples,
            num_late=num_late,
            num_ahead=num_ahead,
            auc=figures[first]["auc"],
            logloss=figures[first]["logloss"],
            normalized_entropy=figures[first]["normalized_entropy"],
            calibration=figures[first]["calibration"],
            alarms=tuple(alarms),
            tasks=figures,
        )


def _rows_of(begin: int, rows: Ints) -> Ints:
    first, after = np.searchsorted(rows[:, 0], [begin, begin + 1])
    return rows[first:after]


def _rule_of(settings: WindowsConfig | None) -> WindowRule:
    if settings is None:
        return WindowRule(1)
    return WindowRule(round(1000 * settings.seconds), round(1000 * settings.lateness_seconds))


def _cells(logits: Floats) -> Ints:
    cells = np.clip((logits + _LIMIT) * (_CELLS / (2 * _LIMIT)), 0, _CELLS - 1)
    return cells.astype(np.int64)


def _totals(logits: Floats, is_hit: NDArray[np.bool_], weights: Floats) -> Ints:
    """Count, weight, loss, prediction and label of each sample, weighted, in units ``[N, 5]``.

    Those that weigh nothing are not counted.
    """
    losses = np.logaddexp(0.0, logits) - logits * is_hit
    predicted = np.exp(-np.logaddexp(0.0, -logits))
    columns = (weights > 0, weights, weights * losses, weights * predicted, weights * is_hit)
    return _in_units(np.stack(columns, 1))


def _in_units(values: Floats) -> Ints:
    return np.rint(values * _UNIT).astype(np.int64)
