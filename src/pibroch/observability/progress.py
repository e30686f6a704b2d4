"""Progress for people: one moving line on a terminal, plain log lines anywhere else."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pibroch.observability.records import (
    EvaluationRecord,
    RawIdsRecord,
    Sink,
    TrainingRecord,
    WindowRecord,
    figure,
    has_more_than_clicks,
    shown_time,
    task_figures,
)

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 5.0


def progress_sink(console: Console, total_steps: int | None) -> Sink:
    """The display that suits the console; ``None`` steps are a run without an end."""
    if console.is_terminal:
        return TerminalProgress(console, total_steps)
    return LoggedProgress(total_steps)


class TerminalProgress:
    """A bar with step, loss, AUC, samples/s, memory and time left."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task("", total=total_steps)
        self._auc = ""
        self._progress.start()

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        self._progress.update(
            self._task, completed=record.step, description=_figures(record) + self._auc
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        self._auc = f"  [bold]AUC {figure(record.auc)}[/bold]"
        self._progress.console.print(_evaluation_line(record), highlight=False)

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        self._progress.console.print(window_line(record), highlight=False)
        _warn(record)

    def close(self) -> None:
        """See `Sink`."""
        self._progress.stop()


class LoggedProgress:
    """The same figures as log lines, at most one every few seconds, and one for each evaluation."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._next_line = 0.0
        self._first_step: int | None = None

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        now = time.monotonic()
        if self._first_step is None:
            self._started = now
            self._first_step = record.step
        if now < self._next_line:
            return
        self._next_line = now + SECONDS_BETWEEN_LINES
        total = self._total_steps
        if total is None:
            logger.info("step %d  %s", record.step, _figures(record))
            return
        done = record.step - self._first_step
        left = (now - self._started) / done * (total - record.step) if done else None
        time_left = "" if left is None else f"  {left:.0f} s left"
        logger.info("step %d/%d  %s%s", record.step, total, _figures(record), time_left)

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        logger.info("%s", _evaluation_line(record))

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        logger.info("%s", window_line(record))
        _warn(record)

    def close(self) -> None:
        """See `Sink`."""


def window_line(record: WindowRecord) -> str:
    """A window as people read it.

    >>> window_line(WindowRecord(7, 0, 60_000, 512, 0, 0.75, 0.5, 0.9, None)).partition(": ")[0]
    'window from 1970-01-01T00:00:00.000Z'
    """
    if len(record.tasks) > 1:
        figures = task_figures(record.tasks)
    else:
        figures = (
            f"AUC {figure(record.auc)}  logloss {figure(record.logloss)}"
            f"  NE {figure(record.normalized_entropy)}"
            f"  calibration {figure(record.calibration, 3)}"
        )
    late = f"  {record.num_late:,} late so far" if record.num_late else ""
    ahead = f"  {record.num_ahead:,} ahead" if record.num_ahead else ""
    begin = shown_time(record.begin_ms)
    return f"window from {begin}: {figures}  {record.num_samples:,} samples{late}{ahead}"


def _warn(record: WindowRecord) -> None:
    for alarm in record.alarms:
        logger.warning(
            "alarm at step %d: %s, in the window from %s",
            record.step,
            alarm,
            shown_time(record.begin_ms),
        )


def _figures(record: TrainingRecord) -> str:
    waiting = f"  waiting {record.waiting_seconds:.1f} s" if record.waiting_seconds else ""
    hits = "" if record.cache_hit_rate is None else f"  hits {record.cache_hit_rate:.1%}"
    ahead = "" if record.lookahead is None else f"  lookahead {record.lookahead}"
    spared = (
        ""
        if record.transfers_spared is None
        else f"  transfers spared {record.transfers_spared:.1%}"
    )
    memory = f"  memory {record.rss_bytes / 2**20:,.0f} MiB"
    return (
        f"loss {record.loss:.4f}  {record.samples_per_second:,.0f}"
        f" samples/s{waiting}{hits}{ahead}{spared}{_raw_ids(record)}{memory}"
    )


def _raw_ids(record: TrainingRecord) -> str:
    """All tables of raw ids together."""
    if record.raw_ids is None:
        return ""
    tables = RawIdsRecord.together(record.raw_ids.values())
    hits = "" if tables.hit_rate is None else f"  ids with rows {tables.hit_rate:.1%}"
    lost = tables.evictions + tables.expiries
    return f"  rows used {tables.fill:.1%}{hits}" + (f"  ids lost {lost:,}" if lost else "")


def _evaluation_line(record: EvaluationRecord) -> str:
    best = "  best so far" if record.is_best and record.split == "validation" else ""
    if has_more_than_clicks(record.tasks):
        return f"step {record.step}  {record.split}: {task_figures(record.tasks)}{best}"
    return (
        f"step {record.step}  {record.split}: AUC {figure(record.auc)}  logloss"
        f" {figure(record.logloss)}  NE {figure(record.normalized_entropy)}  calibration"
        f" {figure(record.calibration, 3)}{best}"
    )
