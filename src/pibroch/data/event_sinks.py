"""Where a generated stream goes: a folder of files, or Kafka; and what is known of its truth.

The truth lies in a folder of its own: ``schema.toml``, ``stream.json`` with the options, a file
``truth/part-N.parquet`` for each part of the stream, and ``windows.jsonl``, a line for each window
of event time when it is over. A generator that was killed goes on behind the last part there.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from pibroch.data.event_stream import ID, BestWindows, EventStream, StreamOptions
from pibroch.data.event_windows import WindowRule
from pibroch.data.storage import write_json
from pibroch.errors import ConfigError, MissingDependencyError, StorageError
from pibroch.storage import new_file, storage_errors

_ROOM = "a folder with room", "free some space; the same command goes on where it was"
_KAFKA_S = 60.0
"""Until Kafka must have taken a part."""


class EventFormat(StrEnum):
    """Of files of events."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


class EventSink(Protocol):
    """Takes the parts of a stream."""

    def write(self, part: int, events: pl.DataFrame) -> None:
        """Write a part; it is there whole or not at all.

        Raises:
            StorageError: when it cannot be written.
        """


@dataclass(frozen=True, slots=True)
class EventFolder:
    """A file for each part, written under another name first.

    Attributes:
        folder: of the files.
        format: of them.
    """

    folder: Path
    format: EventFormat

    def write(self, part: int, events: pl.DataFrame) -> None:
        """See :meth:`EventSink.write`; a part that is there is left alone."""
        path = self.folder / f"part-{part:08d}.{self.format}"
        if path.exists():
            return
        with new_file(path, *_ROOM, flush=False) as file:
            file.parent.mkdir(parents=True, exist_ok=True)
            if self.format is EventFormat.CSV:
                events.write_csv(file)
            elif self.format is EventFormat.JSONL:
                events.write_ndjson(file)
            else:
                events.write_parquet(file, compression="zstd")


class KafkaTopic:
    """A message for each event, a JSON object whose key is the event's id.

    Messages of a part may be there twice where the generator was killed meanwhile.

    Args:
        brokers: ``HOST:PORT``, several with commas between them.
        topic: to write to.

    Raises:
        MissingDependencyError: without confluent-kafka.
    """

    def __init__(self, brokers: str, topic: str) -> None:
        if find_spec("confluent_kafka") is None:
            raise MissingDependencyError(
                "Kafka without confluent-kafka",
                "the extra `kafka`",
                "pip install 'pibroch[kafka]'",
            )
        settings = {
            "bootstrap.servers": brokers,
            "enable.idempotence": True,
            "linger.ms": 5,
            "log_level": 0,
        }
        self._topic = topic
        self._brokers = brokers
        self._producer: Any = import_module("confluent_kafka").Producer(settings)
        self._problem: object = None

    def write(self, part: int, events: pl.DataFrame) -> None:
        """See :meth:`EventSink.write`."""
        text = io.BytesIO()
        events.write_ndjson(text)
        for key, line in zip(events[ID].to_list(), text.getvalue().splitlines(), strict=True):
            while True:
                try:
                    self._producer.produce(
                        self._topic, line, str(key).encode(), on_delivery=self._delivered
                    )
                    break
                except BufferError:  # its queue is full
                    self._producer.poll(0.1)
            self._producer.poll(0)
        left = self._producer.flush(_KAFKA_S)
        if left or self._problem is not None:
            self._producer.purge()
            why = self._problem or f"{left} messages not taken after {_KAFKA_S:g} s"
            raise StorageError(
                f"Kafka at {self._brokers}, topic {self._topic}: {why}",
                "a broker that takes messages",
                "look at the broker; the same command goes on where it was",
            )

    def _delivered(self, problem: object, _: object) -> None:
        self._problem = self._problem or problem


@dataclass(frozen=True, slots=True)
class Pace:
    """How parts follow each other.

    Attributes:
        part_s: event time in a part.
        window_s: event time in a window of what is best.
        in_real_time: whether a part comes when its last event's time has come; else as fast as
            possible.
    """

    part_s: float = 1.0
    window_s: float = 60.0
    in_real_time: bool = True


class TruthFolder:
    """What is known of a stream; also how far it was written.

    Args:
        folder: which may hold that of a stream that was begun with the same options.
        options: of the stream.
        pace: of its parts.

    Attributes:
        options: with the start at which the stream began.

    Raises:
        ConfigError: when the folder is another stream's.
        StorageError: when the disk refuses.
    """

    def __init__(self, folder: Path, options: StreamOptions, pace: Pace) -> None:
        self._folder = folder
        wanted = {**asdict(options), "part_s": pace.part_s, "window_s": pace.window_s}
        about = folder / "stream.json"
        begun = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else None
        if begun is None:
            with storage_errors(folder, *_ROOM):
                (folder / "truth").mkdir(parents=True, exist_ok=True)
                write_json(about, wanted)
            begun = wanted
        for key, value in wanted.items():
            if key != "start_ms" and begun.get(key) != value:
                raise ConfigError(
                    f"{key} = {value} for a stream that was begun with {begun.get(key)}",
                    f"the options in {about}, or another folder",
                    "name another --truth and another folder of events",
                )
        self.options = StreamOptions(**{key: begun[key] for key in asdict(options)})
        width_ms = round(1000 * pace.window_s)
        lateness_ms = round(1000 * options.late_by_s) if options.late else 0
        self._windows = BestWindows(WindowRule(width_ms, lateness_ms))
        self._lines: list[str] = []

    def begin(self, stream: EventStream) -> int:
        """Write the schema, and count again what is there; the number of parts.

        Raises:
            StorageError: when the disk refuses.
        """
        with new_file(self._folder / "schema.toml", *_ROOM) as file:
            file.write_text(stream.schema.to_toml(), encoding="utf-8")
        number = 0
        while (path := self._path(number)).is_file():
            self._count(pl.read_parquet(path), stream)
            number += 1
        self._write_windows()
        return number

    def add(self, part: int, truth: pl.DataFrame, stream: EventStream) -> None:
        """Keep the truth of a part, and write the windows that are over.

        Raises:
            StorageError: when the disk refuses.
        """
        with new_file(self._path(part), *_ROOM, flush=False) as file:
            truth.write_parquet(file, compression="zstd")
        if self._count(truth, stream):
            self._write_windows()

    def finish(self) -> None:
        """Write the windows that are left.

        Raises:
            StorageError: when the disk refuses.
        """
        self._lines += map(json.dumps, self._windows.finish())
        self._write_windows()

    def _path(self, part: int) -> Path:
        return self._folder / "truth" / f"part-{part:08d}.parquet"

    def _count(self, truth: pl.DataFrame, stream: EventStream) -> bool:
        assert stream.schema.label is not None, "it has one"
        over = self._windows.add(truth, stream.schema.label)
        self._lines += map(json.dumps, over)
        return bool(over)

    def _write_windows(self) -> None:
        with new_file(self._folder / "windows.jsonl", *_ROOM) as file:
            file.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")


def generate(
    options: StreamOptions,
    sink: EventSink,
    truth: Path,
    pace: Pace = Pace(),
    progress: Callable[[float], None] = lambda _: None,
) -> int:
    """Write a stream to its end, or go on with one that was begun; blocks.

    Args:
        options: of the stream; one that goes on keeps the start of the first time.
        sink: where events go.
        truth: folder for what is known of them.
        pace: how parts follow each other.
        progress: told which share is written.

    Returns:
        How many events this call has written.

    Raises:
        ConfigError: for options that make no sense, or that are not those of the stream that was
            begun.
        StorageError: when events or truth cannot be written.
    """
    per_part = round(pace.part_s * options.rate)
    if per_part < 1:
        raise ConfigError(
            f"parts of {pace.part_s:g} s at {options.rate:g} events a second",
            "at least one event a part",
            "raise --part-seconds",
        )
    known = TruthFolder(truth, options, pace)
    options = known.options
    stream = EventStream(options)
    total = options.num_events
    part = known.begin(stream)
    num_written = 0
    for first in range(part * per_part, total, per_part):
        count = min(per_part, total - first)
        events, truths = stream.frames(first, count)
        if pace.in_real_time:
            due_s = options.start_ms / 1000 + (first + count) / options.rate
            time.sleep(max(0.0, due_s - time.time()))
        sink.write(part, events)
        known.add(part, truths, stream)
        part += 1
        num_written += count
        progress((first + count) / total)
    known.finish()
    return num_written
