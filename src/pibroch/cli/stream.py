"""``pibroch stream``: streams of events whose truth is known."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.cli.progress import stages
from pibroch.data.event_sinks import EventFolder, EventFormat, EventSink, KafkaTopic, Pace, generate
from pibroch.data.event_stream import StreamOptions
from pibroch.errors import ConfigError
from pibroch.overlap import refuse_overlap

app = typer.Typer(
    help="Streams of events: generate one whose best AUC is known at each moment.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def _group() -> None:
    """Streams of events: generate one whose best AUC is known at each moment."""


@app.command("generate")
def generate_command(
    seconds: Annotated[float, typer.Option(min=0.001, help="Of event time, in all.")],
    truth: Annotated[
        Path, typer.Option(help="Folder for what is known of the stream, its schema too.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of files of events; or give --kafka.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Events a second of event time.")] = 1000.0,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="As fast as possible; else events come when their time comes."),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The first event time, as 2026-11-26T04:00; else now."),
    ] = None,
    format_: Annotated[
        EventFormat, typer.Option("--format", help="Of files: csv, jsonl or parquet.")
    ] = EventFormat.CSV,
    part_seconds: Annotated[float, typer.Option(min=0.001, help="Event time in a file.")] = 1.0,
    kafka: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Brokers, with commas between them, and --topic."),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Of Kafka.")] = None,
    window: Annotated[
        float, typer.Option(min=0.001, help="Seconds of a window of which the best AUC is written.")
    ] = 60.0,
    drift: Annotated[
        float, typer.Option(min=0, max=1, help="Share of hot ids that is replaced now and then.")
    ] = 0.01,
    drift_every: Annotated[
        float, typer.Option(min=0.001, help="Seconds between two times of --drift.")
    ] = 60.0,
    turn: Annotated[
        float,
        typer.Option(min=0, help="Seconds in which preferences make a quarter turn; 0 for none."),
    ] = 3600.0,
    late: Annotated[
        float, typer.Option(min=0, max=1, help="Share of events that come behind younger ones.")
    ] = 0.0,
    late_by: Annotated[
        float, typer.Option(min=0, help="By at most so many seconds, with --late.")
    ] = 30.0,
    table_rows: Annotated[
        int, typer.Option(min=1, help="Ids of the largest tables at a time.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="The same options give the same events.")] = 0,
) -> None:
    """Generate a stream of events: ids go and come, preferences turn, the truth is known.

    Each event has `event_id`, `time` (milliseconds since 1970), `label`, I1 to I13 and C1 to C26.
    A file has another name until it is whole. The folder --truth gets each event's true
    probability, and for each window of event time the best AUC that any model can reach. A command
    that was killed goes on when it is given again.

    **Examples**

        pibroch stream generate --out events --truth truth --seconds 600 --rate 10000

        pibroch stream generate --out events --truth truth --seconds 86400 --fast --format parquet

        pibroch stream generate --kafka localhost:9092 --topic clicks --truth truth --seconds 600
    """
    options = StreamOptions(
        start_ms=_milliseconds(start),
        seconds=seconds,
        rate=rate,
        seed=seed,
        table_rows=table_rows,
        drift=drift,
        drift_every_s=drift_every,
        turn_s=turn,
        late=late,
        late_by_s=late_by,
    )
    pace = Pace(part_seconds, window, not fast)
    sink = _sink(out, truth, format_, kafka, topic)
    begun = time.monotonic()
    with stages() as progress:
        count = generate(options, sink, truth, pace, lambda share: progress("generate", share))
    elapsed = max(1e-9, time.monotonic() - begun)
    results.print(
        f"{count:,} events in {elapsed:.1f} s, {count / elapsed:,.0f} a second; their truth is in"
        f" {truth}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _sink(
    out: Path | None, truth: Path, format_: EventFormat, kafka: str | None, topic: str | None
) -> EventSink:
    if (out is None) == (kafka is None) or (kafka is None) != (topic is None):
        raise ConfigError(
            "neither or both of --out and --kafka, or one of --kafka and --topic",
            "--out FOLDER, or --kafka HOST:PORT with --topic NAME",
        )
    if kafka is not None and topic is not None:
        return KafkaTopic(kafka, topic)
    assert out is not None, "checked above"
    refuse_overlap(out, [truth])
    return EventFolder(out, format_)


def _milliseconds(start: str | None) -> int:
    if start is None:
        return round(time.time() * 1000)
    try:
        moment = datetime.fromisoformat(start)
    except ValueError as error:
        raise ConfigError(
            f"--start {start}", "a time as 2026-11-26T04:00, in UTC unless it says otherwise"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)
