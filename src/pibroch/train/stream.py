"""The stream of a run: its source, and what of it lies in the run's directory."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pibroch.collectives import Channel
from pibroch.collectives.agreement import together
from pibroch.config.data import StreamConfig
from pibroch.data import Schema
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.base import Source
from pibroch.data.streams.batches import Stream, StreamOptions
from pibroch.data.streams.decode import Decoder
from pibroch.data.streams.directory import Directory, FileFormat
from pibroch.data.streams.journal import Journal
from pibroch.data.streams.kafka import Kafka
from pibroch.data.streams.kafka_consumer import SharedConsumer
from pibroch.overlap import refuse_inside
from pibroch.state.files import saved_steps
from pibroch.train.data_source import stream_schema
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import Session

logger = logging.getLogger(__name__)
_SOON_S = 2.0
_KEPT = 2
"""Newest checkpoints from which a run may have to go on."""


def open_stream(session: Session, run: RunDirectory) -> Stream | None:
    """The stream of a run that has one; every rank calls it.

    Raises:
        DataError: (on all ranks) when the source is not there.
    """
    config = session.config.data.stream
    if config is None:
        return None
    channel = session.world.control
    ranks = channel.ranks
    schema = stream_schema(session.dataset.schema, config)
    opened: list[tuple[Source, Journal | None]] = []
    bad = Path(config.bad_records) if config.bad_records is not None else run.stream_path / "bad"

    def open_here() -> None:
        refuse_inside(run.path, config.path, "--run-dir")
        refuse_inside(bad, config.path, "data.stream.bad_records")
        journal = None
        if ranks.rank == 0:
            journal = Journal(run.stream_path / "journal", lambda: _oldest_needed(run))
        opened.append((open_source(config, schema), journal))

    together(channel, open_here)
    source, journal = opened[0]
    settings = session.config.train
    return Stream(
        source,
        Decoder(schema, session.dataset.encoders),
        StreamOptions(
            settings.samples_per_step,
            config.wait_seconds,
            config.idle_seconds,
            config.most_bad_share,
            config.skip,
        ),
        (ranks.rank, ranks.world_size),
        _gather(channel),
        journal,
        SetAside(bad / f"rank-{ranks.rank}.jsonl"),
    )


@contextmanager
def ended_by_signals(stream: Stream | None) -> Iterator[None]:
    """While a stream is trained, what interrupts or ends a process ends the stream instead.

    All that was trained is saved then. A further signal ends the process, unless it comes soon: a
    terminal and a launcher both send one.
    """
    if stream is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked_at: list[float] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        asked_at.append(time.monotonic())
        if asked_at[-1] - asked_at[0] > _SOON_S:
            restore()
            signal.raise_signal(number)
        stream.end()

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()
    if asked_at:
        logger.info("the run has ended, as it was asked to; --resume goes on")


def open_source(config: StreamConfig, schema: Schema) -> Source:
    """The source that a recipe names.

    Raises:
        DataError: when it is not there.
    """
    most = config.most_record_bytes
    if config.kind == "kafka":
        assert config.brokers is not None and config.topic is not None, "it was checked"
        messages = config.format or "jsonl"
        return Kafka(config.brokers, config.topic, schema, messages, most, config.kafka)
    assert config.path is not None, "it was checked"
    format = FileFormat(schema, config.format, most)
    return Directory(Path(config.path), format, config.partitions)


def check_stream(config: StreamConfig | None) -> None:
    """Look at settings that Kafka's library alone knows, before anything of a run is there.

    Raises:
        ConfigError: for those that it does not take.
    """
    if config is not None and config.kind == "kafka":
        assert config.brokers is not None and config.topic is not None, "it was checked"
        SharedConsumer(config.brokers, config.topic, config.kafka).close()


def _gather(channel: Channel) -> Callable[[Callable[[], Any]], list[Any]]:
    def gather(work: Callable[[], Any]) -> list[Any]:
        return together(channel, work)

    return gather


def _oldest_needed(run: RunDirectory) -> int:
    """The step after which the run may have to go on."""
    steps = [*saved_steps(run.checkpoints_path), *saved_steps(run.recovery_path)]
    return min(sorted(steps)[-_KEPT:], default=0) if len(steps) >= _KEPT else 0
