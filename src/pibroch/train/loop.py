"""The training loop: steps, and what is due between them. Everything else has its own file."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from itertools import chain, islice, repeat
from typing import Any

from pibroch.collectives import clip_grad_norm
from pibroch.data import JaggedBatch, Loader, LoaderPosition
from pibroch.data.streams.base import StreamPosition
from pibroch.data.streams.batches import Stream
from pibroch.errors import NonFiniteLossError
from pibroch.forkserver import link_to_server
from pibroch.observability.notice import notice_when_slow
from pibroch.observability.records import EvaluationRecord, Sink, TrainingRecord
from pibroch.observability.trace import StepTrace, span, spans
from pibroch.state.manifest import Progress
from pibroch.state.monitor import Monitor
from pibroch.train.evaluation import evaluate
from pibroch.train.meter import ExchangedBytes, Meter, Stopwatch, totals_of
from pibroch.train.metrics import Evaluation, finite_or_none, reported
from pibroch.train.monitored import value_of
from pibroch.train.replanning import Replanner
from pibroch.train.saver import Saver
from pibroch.train.session import Session
from pibroch.train.suspect import suspect

logger = logging.getLogger(__name__)
_SECONDS_UNTIL_NOTICE = 3.0
_STEPS_UNTIL_LOADED = 20
_SKIPPING = "; or leave a record out, for good: --resume --set 'data.stream.skip=[\"FILE:LINE\"]'"
_COMPILING = "compiling kernels, on first use only"


class Trainer:
    """Trains a session to its end; every rank of its world has one, and all go the same way.

    Args:
        session: what is trained.
        saver: of checkpoints.
        sink: takes the records.
        progress: where to go on.
        stopwatch: keeps the training time.
        trace: of some of the steps; none when absent.
        replanner: lets rows follow the data; they stay where they are when absent.
        stream: to train on, in place of the dataset's training split.

    Attributes:
        bytes_sent_to_each: that this process sent to each rank a step to exchange embeddings,
            ``[W]``, once it has trained; ``None`` where the exchange does not count.
        raw_ids: of tables of raw ids after the last step, see :func:`totals_of`.
    """

    def __init__(
        self,
        session: Session,
        saver: Saver,
        sink: Sink,
        progress: Progress,
        stopwatch: Stopwatch,
        trace: StepTrace | None = None,
        replanner: Replanner | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.session = session
        self.saver = saver
        self.sink = sink
        self.stopwatch = stopwatch
        self.settings = session.config.train
        self.step = progress.step
        self.monitor = replace(progress.monitor)
        self.stream = stream
        self.loader = _loader_of(session) if stream is None else stream
        if progress.loader is not None:
            self.loader.load_state_dict(progress.loader)
        if isinstance(self.loader, Loader):
            session.embeddings.assign(self.loader)
        self.position: LoaderPosition | StreamPosition = self.loader.position
        self._windows = session.windows
        if self._windows is not None:
            self._windows.go_on(progress.event_time)
        self.steps_per_epoch = len(self.loader) if isinstance(self.loader, Loader) else None
        self.total_steps = total_steps(session)
        self._trace = trace
        self._replanner = replanner
        self._meter = Meter(session.world, stopwatch, session.embeddings)
        self._exchanged = ExchangedBytes(session.embeddings.exchange)
        self._first_step = progress.step
        self._saved_step = progress.step
        self.bytes_sent_to_each: list[float] | None = None
        self.raw_ids: dict[str, dict[str, int | float | None]] = {}

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done or nothing has improved for too long."""
        return has_finished(self.session, self.step, self.monitor)

    @property
    def samples_trained(self) -> int:
        """Samples of all ranks in all steps so far, those of earlier processes included."""
        if isinstance(self.position, StreamPosition):
            return self.position.samples
        samples = self.session.dataset.samples["train"]
        return self.position.epoch * samples + self.position.sample

    def fit(self) -> None:
        """Train until finished; a checkpoint of the last step is on the disk afterwards.

        Raises:
            NonFiniteLossError: names the step; nothing is saved of it.
            RankFailedError: when another rank failed or was lost.
            StorageError: when a checkpoint could not be saved.
        """
        session = self.session
        session.set_training(True)
        with ExitStack() as first_step:
            if self.stream is None:  # else it may be that nothing comes for a while
                notice = notice_when_slow(logger, _COMPILING, _SECONDS_UNTIL_NOTICE)
                first_step.enter_context(notice)
            while True:
                for batch in spans("read batch", session.embeddings.feed(self._batches())):
                    self._train_step(batch)
                    if self._replanner is not None:
                        self._replanner.after_step(self.step, batch)
                    first_step.close()
                    self._after_step()
                    if (
                        self.step == self._first_step + _STEPS_UNTIL_LOADED
                        and (link := link_to_server()) is not None
                    ):
                        link.say_loaded()
                    if self.is_finished:
                        break
                if self.stream is None or self.stream.has_ended or self.is_finished:
                    break
        if self.stream is not None and self._saved_step < self.step:
            self._end_of_stream()
        self.stopwatch.pause()
        self.raw_ids = totals_of(session.embeddings)
        self.saver.finish(self._progress())
        self.bytes_sent_to_each = self._exchanged.a_step(
            self.step - self._first_step, session.world.ranks.world_size
        )

    def _batches(self) -> Iterator[JaggedBatch]:
        """All that is left, in one stream: what reads ahead goes on into the next epoch."""
        left = 0 if self.is_finished else _left(self.total_steps, self.step)
        if self.stream is not None:
            return islice(self.stream, left)
        assert isinstance(self.loader, Loader) and left is not None, "a stream alone has no end"
        if self.session.processors is not None:
            return self.session.processors.batches(self.session.dataset, self.loader, left)
        return islice(chain.from_iterable(repeat(self.loader)), left)

    def _train_step(self, batch: JaggedBatch) -> None:
        session = self.session
        step = self.step + 1
        if self._trace is not None:
            self._trace.next_step()
        session.world.enter(step)
        session.set_learning_rates(step, self.total_steps, self.monitor.plateaus)
        session.optimizer.zero_grad(set_to_none=True)
        with span("forward"):
            loss = session.loss(batch, step)
            loss_value = loss.item()
        if not math.isfinite(loss_value):  # before backward, so that no row has seen it
            raise NonFiniteLossError(
                f"loss {loss_value} in step {step}",
                "a finite loss",
                f"{self._suspect(batch)}lower the learning rates or set train.clip_norm; the last"
                f" checkpoint is untouched{'' if self.stream is None else _SKIPPING}",
            )
        with span("backward"):
            loss.backward()
        with span("dense optimizer"):
            if self.settings.clip_norm is not None:
                clip_grad_norm(session.model, self.settings.clip_norm, session.world.control)
            session.update_dense()
        self.step = step
        if batch.position is not None:  # a filler after the last batch of a rank has none
            self.position = batch.position
        self._meter.add(loss_value, batch.batch_size)
        self.stopwatch.add(batch.batch_size)

    def _suspect(self, batch: JaggedBatch) -> str:
        """Which sample to look at, of a batch with a loss that is none, in words."""
        if self.session.logits is None or not batch.batch_size:
            return ""
        sample, why = suspect(batch, self.session.logits)
        place = None
        if isinstance(batch.position, StreamPosition) and self.stream is not None:
            place = self.stream.place_of(batch.position.step, sample)
        where = f"sample {sample} of this rank's part" if place is None else place
        return f"look at {where}, {why}; "

    def _after_step(self) -> None:
        self.stopwatch.start()  # the first step of a process may compile and is not timed
        is_last = self.step == self.total_steps
        if self._windows is not None and self._windows.is_due:
            self._settle_windows()
        if is_last or self.step % self.settings.log_every == 0:
            self._report()
        improved = False
        is_due = is_last or self._is_due(self.settings.evaluate_every)
        if is_due and self.session.dataset.samples["validation"]:
            with self._between_steps("evaluate"):
                improved = self._evaluate()
        if improved or self._is_due(self.settings.checkpoint_every) or self.is_finished:
            self._save()
        else:
            self.saver.after_step(self.step, self._progress)
        self.stopwatch.start()

    def _is_due(self, every: int | None) -> bool:
        """Whether it is time for what comes every so many steps, or else with each epoch."""
        interval = every or self.steps_per_epoch
        return interval is not None and self.step % interval == 0

    def _save(self) -> None:
        with self._between_steps("checkpoint"):
            self.saver.save(self.session, self._progress())
        self._saved_step = self.step

    def _end_of_stream(self) -> None:
        """What the last step is followed by, where it was known too late that it was the last."""
        if self.step % self.settings.log_every:
            self._report()
        if self.session.dataset.samples["validation"] and not self._is_due(
            self.settings.evaluate_every
        ):
            with self._between_steps("evaluate"):
                self._evaluate()
        self._save()

    @contextmanager
    def _between_steps(self, name: str) -> Iterator[None]:
        self.stopwatch.pause()
        with span(name), self._exchanged.aside():
            yield

    def _evaluate(self) -> bool:
        evaluation = evaluate(self.session, "validation")
        value = value_of(self.settings.monitor, evaluation.tasks, self.session.dataset.schema)
        improved = self.monitor.update(self.step, value)
        self.sink.evaluation(evaluation_record(self.step, "validation", evaluation, improved))
        return improved

    def _settle_windows(self) -> int | None:
        """Report the windows that have closed; the watermark. Every rank calls it."""
        if self._windows is None:
            return None
        for record in self._windows.settle():
            self.sink.window(record)
        return self._windows.watermark

    def _report(self) -> None:
        event_time = self._settle_windows()
        reading = self._meter.read()
        record = TrainingRecord(
            step=self.step,
            epoch=0 if self.steps_per_epoch is None else self.step // self.steps_per_epoch,
            learning_rate=self.session.optimizer.param_groups[0]["lr"],
            seconds=self.stopwatch.seconds_before + self.stopwatch.read()[0],
            event_time=event_time,
            **{each.name: getattr(reading, each.name) for each in fields(reading)},
        )
        self.sink.training(record)

    def _data_state(self) -> dict[str, Any]:
        if isinstance(self.position, StreamPosition):
            assert self.stream is not None
            return self.stream.state_at(self.position)
        assert isinstance(self.loader, Loader)
        return self.loader.state_at(self.position)

    def _progress(self) -> Progress:
        """Where the run is; every rank calls it after the same step."""
        return Progress(
            step=self.step,
            event_time=self._settle_windows(),
            loader=self._data_state(),
            monitor=replace(self.monitor),
        )


def has_finished(session: Session, step: int, monitor: Monitor) -> bool:
    """Whether a run that is so far has nothing more to train, whatever may come."""
    left = _left(total_steps(session), step)
    patience = session.config.train.early_stop_patience
    return (left is not None and left <= 0) or monitor.is_exhausted(patience)


def _left(total_steps: int | None, step: int) -> int | None:
    return None if total_steps is None else total_steps - step


def _loader_of(session: Session) -> Loader:
    ranks = session.world.ranks
    return Loader(
        session.dataset.split("train"),
        session.config.train.samples_per_step,
        shuffle=True,
        seed=session.config.seed,
        part=(ranks.rank, ranks.world_size),
    )


def total_steps(session: Session) -> int | None:
    """Steps of the whole run, early stop aside; ``None`` where there is no end."""
    settings = session.config.train
    if settings.steps is not None or session.config.data.stream is not None:
        return settings.steps
    return (settings.epochs or 0) * math.ceil(
        session.dataset.samples["train"] / settings.samples_per_step
    )


def evaluation_record(
    step: int, split: str, evaluation: Evaluation, is_best: bool
) -> EvaluationRecord:
    """An evaluation as it is reported."""
    figures: dict[str, Any] = {
        name: finite_or_none(value) for name, value in asdict(evaluation.metrics).items()
    }
    return EvaluationRecord(
        step=step, split=split, is_best=is_best, tasks=reported(evaluation), **figures
    )
