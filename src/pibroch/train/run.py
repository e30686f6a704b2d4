"""A run from configuration to summary.

Open the data, build, resume, train, evaluate the best model on the test split.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from pibroch.collectives.agreement import on_first
from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.data import EncodedDataset
from pibroch.embedding.row_marks import SAVED
from pibroch.observability.memory import peak_rss_bytes
from pibroch.observability.records import FanOut, Sink
from pibroch.observability.sinks import JsonLines
from pibroch.observability.trace import STEPS, STEPS_BEFORE, StepTrace
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import Progress
from pibroch.state.resumption import warn_of_surroundings
from pibroch.train.evaluation import access_skew, check_splits, evaluate
from pibroch.train.loop import Trainer, evaluation_record, has_finished, total_steps
from pibroch.train.lost_ids import log_of
from pibroch.train.memory_cuts import MemoryCuts, has_state
from pibroch.train.meter import Stopwatch, hit_rate, spared
from pibroch.train.metrics import Evaluation, finite_or_none, reported
from pibroch.train.publishing import Publishing, check_publishing
from pibroch.train.replanning import Replanner
from pibroch.train.roles import helper_processes
from pibroch.train.run_directory import DATA, VERSIONS, RunDirectory, Summary, surroundings
from pibroch.train.sameness import check_same_run
from pibroch.train.saver import Saver
from pibroch.train.session import Session, build_session
from pibroch.train.stream import ended_by_signals, open_stream
from pibroch.train.timed_checkpoints import TimedCheckpoints

logger = logging.getLogger(__name__)
MakeSink = Callable[[int | None], Sink]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run ends with; ``best_possible_auc`` is known for generated data only."""

    summary: Summary
    best_possible_auc: float | None


def run_training(
    config: RunConfig,
    dataset: EncodedDataset,
    run: RunDirectory,
    make_sink: MakeSink,
    world: World | None = None,
    traces: bool = False,
) -> RunResult:
    """Train in a run directory, and evaluate the best model.

    Training begins at the directory's latest checkpoint when there is one.

    Args:
        config: the resolved configuration.
        dataset: the data to train on.
        run: a directory that was created for this configuration.
        make_sink: given the number of steps, if there is one, what shows progress; metrics are kept
            in any case.
        world: the ranks that train together, each of which calls this; one process when absent.
        traces: whether to write a trace of some steps, see :class:`StepTrace`.

    Raises:
        ConfigError: when ranks have other data, code, versions or settings than rank 0, or for
            settings that need a split that is not there.
        DataError: when there are no training samples.
        CheckpointError: when all checkpoints are damaged, or the latest belongs to other settings
            or data.
        NonFiniteLossError: when training diverges.
        StorageError: when the disk refuses.
        RankFailedError: when another rank failed or was lost.
        TrainingError: when an embedding server, the oracle or a data processor was lost.
    """
    world = world or World.alone()
    check_splits(config, dataset)
    check_publishing(config, run)
    check_same_run(world.control, config, dataset)
    with helper_processes(config, world, run) as helpers:
        session = build_session(
            config,
            dataset,
            world,
            helpers,
            has_rows=not on_first(world.control, lambda: goes_on(run)),
        )
        return _train(session, run, make_sink, traces)


def _train(session: Session, run: RunDirectory, make_sink: MakeSink, traces: bool) -> RunResult:
    settings = session.config.train
    channel = session.world.control
    how = settings.keep, settings.full_checkpoint_every, channel, run.recovery_path
    checkpoints = CheckpointFolder(run.checkpoints_path, *how)
    cuts = MemoryCuts(session)
    progress, saver = _go_on(session, run, checkpoints, cuts)
    on_first(
        channel,
        lambda: _note_surroundings(session, run, checkpoints.latest() is not None, progress.step),
    )
    finished = on_first(channel, lambda: _summary_of_finished(session, run, progress))
    if finished is not None:
        summary = Summary(**finished)
        logger.info(
            "the run is finished (%d steps): its summary stays as it is; --set train.epochs=N with"
            " --resume prolongs it",
            summary.steps,
        )
        return RunResult(summary, _best_possible_auc(session.dataset))
    saver = replace(saver, lost_ids=log_of(session, run, progress.step))
    stopwatch = Stopwatch(run.truncate_metrics(progress.step))
    steps = total_steps(session)
    sink = FanOut([JsonLines(run.metrics_path), make_sink(steps)])
    tracing: AbstractContextManager[StepTrace | None] = nullcontext()
    if traces:
        left = STEPS_BEFORE + STEPS if steps is None else steps - progress.step
        tracing = StepTrace(run.trace_path, f"rank {run.rank}", left)
    stream = open_stream(session, run)
    replanner = (
        None if settings.replan_above is None else Replanner(session, run, settings.replan_above)
    )
    try:
        with tracing as trace:
            trainer = Trainer(session, saver, sink, progress, stopwatch, trace, replanner, stream)
            with ended_by_signals(stream):
                trainer.fit()
        checkpoints.restore_best(session)
        return _conclude(session, run, trainer, sink)
    finally:
        if replanner is not None:
            replanner.close()
        if stream is not None:
            stream.close()
        sink.close()


def goes_on(run: RunDirectory) -> bool:
    """Whether there may be rows of an earlier process, in memory or on the disk."""
    return (
        has_state()
        or any(run.checkpoints_path.glob("step-*"))
        or any(run.recovery_path.glob("step-*"))
    )


def _go_on(
    session: Session, run: RunDirectory, checkpoints: CheckpointFolder, cuts: MemoryCuts
) -> tuple[Progress, Saver]:
    """Bring a fresh session to where the run is, and begin to mark rows for what it writes.

    To the newest cut in memory, else to the newest checkpoint.
    """
    settings = session.config.train
    seconds = settings.checkpoint_every_seconds
    step = cuts.newest(checkpoints.newest_step())
    if step is None:
        progress = checkpoints.resume(session)
        session.fill_rows()
        timed = TimedCheckpoints(run.recovery_path, seconds, session, checkpoints.resumed)
        publishing = _publishing(session, run, progress.step)
        cuts.begin(progress, timed.base_step)
        return progress, Saver(checkpoints, timed, cuts, publishing)
    if settings.full_checkpoint_every > 1:
        session.embeddings.start_marks(SAVED)
    state = cuts.state_of(step)
    base = checkpoints.newest_before(step)
    timed = TimedCheckpoints(run.recovery_path, seconds, session, base)
    publishing = _publishing(session, run, None)
    cuts.restore(step, state)
    if state.base_step is not None and (timed.base_step or 0) < state.base_step:
        timed.mark_all()
    checkpoints.pass_by(state.progress)
    logger.info("resumed from memory, step %d", step)
    return state.progress, Saver(checkpoints, timed, cuts, publishing)


def _publishing(session: Session, run: RunDirectory, since: int | None) -> Publishing | None:
    if session.config.train.publish_to is None:
        return None
    return Publishing(session, run, since)


def _note_surroundings(session: Session, run: RunDirectory, goes_on: bool, step: int) -> None:
    """Keep what the run began with; where it goes on with something else, say so."""
    here = surroundings(threads=torch.get_num_threads(), ranks=session.world.ranks.world_size)
    before = (run.read_json(VERSIONS) if goes_on else None) or {}
    warn_of_surroundings(before, here)
    run.note_json(VERSIONS, here | before)
    data = session.dataset
    run.note_json(
        DATA,
        {
            "digest": data.digest,
            "fingerprint": data.fingerprint,
            "samples": data.samples,
        },
    )
    run.note_ranks(session.world.ranks.world_size, step)


def _summary_of_finished(
    session: Session, run: RunDirectory, progress: Progress
) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do.

    ``None`` for one that goes on, or whose end was cut off.
    """
    if not has_finished(session, progress.step, progress.monitor):
        return None
    summary = run.read_json("summary.json")
    if summary is None or summary.get("steps") != progress.step:
        return None
    return {field.name: summary.get(field.name) for field in fields(Summary)}


def _conclude(session: Session, run: RunDirectory, trainer: Trainer, sink: Sink) -> RunResult:
    tested: dict[str, Any] = {}
    evaluation = None
    by_link = session.world.control.gather(trainer.bytes_sent_to_each)
    if session.config.train.evaluate_test and session.dataset.samples["test"]:
        evaluation = evaluate(session, "test")
        step = trainer.monitor.best_step or trainer.step
        record = evaluation_record(step, "test", evaluation, True)
        sink.evaluation(record)
        tested = {**asdict(record), "curves": asdict(evaluation.curves)}
    summary = _summary(session, trainer, evaluation, by_link, run.num_restarts)
    best_possible_auc = _best_possible_auc(session.dataset)
    if session.world.is_first:
        skew = asdict(access_skew(session.dataset))
        run.write_json(
            "evaluation.json",
            {**tested, "best_possible_auc": best_possible_auc, "access_skew": skew},
        )
        run.write_summary(summary)
    return RunResult(summary, best_possible_auc)


def _best_possible_auc(dataset: EncodedDataset) -> float | None:
    """Of the test split, where it is known."""
    return (dataset.best_possible_auc or {}).get("test") if dataset.samples["test"] else None


def _summary(
    session: Session,
    trainer: Trainer,
    evaluation: Evaluation | None,
    by_link: list[list[float] | None],
    num_restarts: int,
) -> Summary:
    """The run in figures, the same on all ranks but for the time that each has measured."""
    world = session.world
    metrics = None if evaluation is None else evaluation.metrics
    traffic = session.world.ranks.traffic
    seconds, own_samples = trainer.stopwatch.read()
    report = session.embeddings.exchange.report()
    publishing = trainer.saver.publishing
    figures = [
        own_samples,
        traffic.sent,
        traffic.received,
        peak_rss_bytes(),
        report.rows_read,
        report.rows_fetched,
    ]
    purposes_here = dict(report.bytes_by_purpose)
    if session.processors is not None:
        purposes_here["data"] = session.processors.num_bytes
    totals = world.control.gather([*figures, purposes_here])
    samples, sent, received, peaks, read, fetched, purposes = zip(*totals, strict=True)
    return Summary(
        steps=trainer.step,
        samples=trainer.samples_trained,
        seconds=round(trainer.stopwatch.seconds_before + seconds, 3),
        samples_per_second=round(sum(samples) / seconds, 1) if seconds else 0.0,
        auc=None if metrics is None else finite_or_none(metrics.auc),
        logloss=None if metrics is None else finite_or_none(metrics.logloss),
        normalized_entropy=None if metrics is None else finite_or_none(metrics.normalized_entropy),
        exchange=session.config.embedding.exchange.for_ranks(world.ranks.world_size).name,
        world_size=world.ranks.world_size,
        bytes_sent=sum(sent),
        bytes_received=sum(received),
        cache_hit_rate=hit_rate(sum(read), sum(fetched)),
        lookahead=round(report.lookahead_sum / report.num_steps, 1) if report.num_steps else None,
        bytes_by_purpose=_by_purpose(sum(sent), purposes)
        if report.num_steps or session.processors
        else None,
        bytes_by_link=None if None in by_link else by_link,
        peak_rss_bytes=max(peaks),
        restarts=num_restarts,
        timed_checkpoints=trainer.saver.timed.count,
        timed_checkpoint_seconds=round(trainer.saver.timed.seconds_taken, 3),
        versions_published=0 if publishing is None else publishing.count,
        publishing_seconds=0.0 if publishing is None else round(publishing.seconds_taken, 3),
        memory_cuts=trainer.saver.cuts.count,
        memory_cut_seconds=round(trainer.saver.cuts.seconds_taken, 3),
        tasks=None if evaluation is None else reported(evaluation),
        raw_ids=trainer.raw_ids or None,
        transfers_spared=spared(session.embeddings.transfers, session.embeddings.transfers_given),
    )


def _by_purpose(num_bytes: int, purposes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """All ranks' bytes by purpose.

    ``other`` is the rest: dense gradients, evaluation, what training agrees on.
    """
    bytes_by_purpose: Counter[str] = Counter()
    for purpose in purposes:
        bytes_by_purpose.update(purpose)
    return {**dict(sorted(bytes_by_purpose.items())), "other": num_bytes - bytes_by_purpose.total()}
