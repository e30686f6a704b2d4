"""``pibroch.data.stream``: a stream in a program of one's own."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pibroch.data.encode import Encoders
from pibroch.data.schema import Schema
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.base import Source
from pibroch.data.streams.batches import Gather, Stream, StreamOptions
from pibroch.data.streams.decode import Decoder
from pibroch.data.streams.directory import Directory, FileFormat
from pibroch.data.streams.journal import Journal
from pibroch.data.streams.records import MakeRecords, RecordsOfProgram
from pibroch.data.vocabularies import Vocabularies
from pibroch.overlap import refuse_inside


def stream(
    source: str | Path | Source | MakeRecords,
    schema: Schema | str | Path,
    *,
    batch_size: int,
    vocabularies: Vocabularies | None = None,
    folder: str | Path | None = None,
    follow: bool = False,
    until_idle: float | None = None,
    wait_seconds: float = 0.5,
    most_bad_share: float = 1e-3,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
    gather: Gather | None = None,
) -> Stream:
    """Batches of events as they come, see ``docs/streams.md``.

    Iterating ends when the stream does. With ``follow`` it also ends when nothing comes for
    ``wait_seconds``, so that what an exchange has read ahead is handed out: iterate again until
    ``has_ended``.

    Args:
        source: a directory; a :class:`~pibroch.data.streams.base.Source`; or a function that gives
            the records from a number on, each by column, and ``None`` when nothing is there for
            now.
        schema: of the records, or its file.
        batch_size: samples a step, over all ranks.
        vocabularies: of a schema that has some; they stay as they are.
        folder: for bad records and the journal of steps; without one bad records are counted, and
            steps may have other records after a death.
        follow: wait for more when all is read.
        until_idle: with ``follow``, end when nothing has come for so many seconds.
        wait_seconds: how long an event waits at most for a batch to fill.
        most_bad_share: of bad records.
        skip: records that are set aside though they look good, ``FILE:LINE``.
        part: ``(rank, world_size)``.
        gather: runs a function on all ranks and gives all answers; for several ranks.

    Raises:
        ConfigError: for a schema that cannot be read, or a ``folder`` in the directory of events.
        DataError: for a source that is not there; when iterating, for what cannot be read.
    """
    if not isinstance(schema, Schema):
        schema = Schema.load(Path(schema))
    if isinstance(source, str | Path):
        if folder is not None:
            refuse_inside(Path(folder), source, "folder")
        source = Directory(Path(source), FileFormat(schema), 8)
    elif callable(source):
        source = RecordsOfProgram(source, schema)
    encoders: Encoders = (vocabularies or Vocabularies(schema, "", {})).encoders()
    idle_seconds = until_idle if follow else 0.0
    options = StreamOptions(batch_size, wait_seconds, idle_seconds, most_bad_share, tuple(skip))
    journal = aside = None
    if folder is not None:
        journal = Journal(Path(folder) / "journal") if part[0] == 0 else None
        aside = SetAside(Path(folder) / "bad" / f"rank-{part[0]}.jsonl")
    return Stream(source, Decoder(schema, encoders), options, part, gather, journal, aside)
