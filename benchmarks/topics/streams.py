"""What following a stream costs beside a prepared dataset, and how soon an event is answered with.

Correctness first. Both forms of the same samples are trained in full, and give each table the same
lookups and the same ids. Each event of the stream stands in exactly one step that was decided.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import polars as pl
from examples.stream import Parts, start_all

from benchmarks.contender import BenchmarkError
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.served_drift import measure as drift
from benchmarks.small_runs import BATCH, RECIPE, pibroch, settings
from pibroch.data.streams.base import Range
from pibroch.serve.from_delta import open_exported
from pibroch.state.delta_format import is_delta, read_delta

PREPARED = "prepared dataset"
FOLLOWED = "Parquet, --follow"
WARM_STEPS = 30
GENERATED_PER_FILE = 10_000
HASHED = settings(
    "embedding.rows.name=hashed",
    "embedding.rows.capacity=20_000",
    "train.log_every=10",
    "train.checkpoint_every=1_000_000",
)
ASKED_EVERY_S = 0.05
ASKED_ROWS = 24
PARTS = {
    "its file is whole": "the rest of the second that a file holds, and writing it",
    "a step has it": "`wait_seconds` at most, and steps before",
    "the step is trained, a version begun": "its steps, and `publish_every_seconds`",
    "the version is published": "writing it; of full versions this is in the line before",
    "an answer by it": "the server looks every 0.1 s; the client asks every 0.05 s",
}
Times = npt.NDArray[np.float64]


@topic(
    "streams",
    "following a directory beside a prepared dataset; seconds from an event to the first answer;"
    " what the served model is worth while preferences turn",
    sections=["throughput", "freshness", "drift"],
    quick_sections=["throughput", "freshness", "drift"],
)
def run(options: Options) -> Report:
    """Measure a section."""
    sections = {"throughput": throughput, "freshness": freshness, "drift": drift}
    return sections[options.section](options)


def throughput(options: Options) -> Report:
    """Both forms of the same samples in turn, one process."""
    num_events, rounds = (400_000, 1) if options.quick else (1_000_000, 3)
    options.say("generating events")
    folder = options.scratch
    pibroch(
        "stream", "generate", "--out", folder / "events", "--truth", folder / "truth", "--fast",
        "--format", "parquet", "--rate", GENERATED_PER_FILE,
        "--seconds", num_events // GENERATED_PER_FILE,
    )  # fmt: skip
    schema = folder / "truth" / "schema.toml"
    files = sorted((folder / "events").glob("*.parquet"))
    pibroch(
        "data", "prepare", "parquet", *files, "--schema", schema, "--out", folder / "data",
        "--split", "train",
    )  # fmt: skip
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    stream = settings(f"data.stream.path={folder / 'events'}", f"data.stream.schema_file={schema}")
    words = {
        PREPARED: ["--data", folder / "data", *settings("train.epochs=1")],
        FOLLOWED: ["--follow", "--until-idle", 1, *stream],
    }
    rates: dict[str, list[float]] = {name: [] for name in words}
    for number in range(rounds):
        work = {}
        for name, given in words.items():
            options.say(f"{name}, round {number + 1}")
            run_dir = folder / f"run-{len(name)}-{number}"
            pibroch("train", recipe, *given, *HASHED, "--run-dir", run_dir)
            rates[name].append(_rate(run_dir))
            work[name] = _work(run_dir)
        if work[PREPARED] != work[FOLLOWED] or work[PREPARED][0] != num_events:
            raise BenchmarkError(f"two forms of the same samples that differ: {work}")
    ratios = [one / other for one, other in zip(rates[FOLLOWED], rates[PREPARED], strict=True)]
    rows: list[Row] = [
        {
            "events": num_events,
            "contender": name,
            "samples_per_second": statistics.median(values),
            "of_prepared": statistics.median(ratios) if name == FOLLOWED else 1.0,
        }
        for name, values in rates.items()
    ]
    notes = [
        f"**{statistics.median(ratios):.2f} of the prepared dataset's throughput** (median over"
        f" {rounds} rounds, from {min(ratios):.2f} to {max(ratios):.2f}; wanted 0.8)",
        f"{num_events:,} generated events in files of {GENERATED_PER_FILE:,}, 26 tables of raw ids,"
        f" dim 16, batch {BATCH}; one process",
        "both were trained in full, with the same lookups and ids in each table; the prepared one"
        " is shuffled",
        f"steps behind {WARM_STEPS} and full ones alone: not the wait of the last batch for more",
    ]
    columns = ["contender", "samples_per_second", "of_prepared"]
    plot = PlotSpec(
        "samples_per_second", ("events",), "contender", "contender", "samples/s", ours=FOLLOWED
    )
    return Report(
        "streams", "Following a directory of Parquet", rows, columns, plot, notes, provenance()
    )


def freshness(options: Options) -> Report:
    """A generator, two trainers, a server and a client, all on this machine."""
    rate, seconds, settle_s = (1_000, 40, 10) if options.quick else (10_000, 600, 30)
    batch_size = max(256, round(0.4 * rate))
    settings = [f"train.batch_size={batch_size}", "embedding.rows.capacity=20_000"]
    folder = options.scratch / "stream"
    with ExitStack() as processes:
        options.say("starting everything")
        parts = start_all(processes, folder, seconds, rate, 10.0, 10_000, settings)
        options.say(f"{rate:,} events a second for {seconds} s")
        client = _Client(folder, parts)
        client.ask_until_over()
        parts.trainers.wait(120)
    client.read_journal()
    waits = client.waits(settle_s)
    total = waits.sum(1)
    whole = np.quantile(total, [0.5, 0.99])
    figures = dict(zip(PARTS, waits.T, strict=True)) | {"in all": total}
    rows: list[Row] = [
        {
            "events_per_second": rate,
            "until": name,
            "p50_s": float(np.quantile(values, 0.5)),
            "p99_s": float(np.quantile(values, 0.99)),
            "mean_s": float(values.mean()),
            "what": PARTS.get(name, ""),
        }
        for name, values in figures.items()
    ]
    notes = [
        f"**event to answer: p50 {whole[0]:.1f} s, p99 {whole[1]:.1f} s at {rate:,} events/s**"
        " (wanted: 5 s and 10 s at 10,000)",
        f"{len(total):,} events in {seconds} s, each until the first answer by a version whose step"
        f" is not before its own; without those of the first {settle_s} s after the first answer,"
        f" and {client.num_unanswered:,} that came last and that nothing was asked after",
        f"generator, two trainers (batch {batch_size}), server and client on the same cores;"
        f" a version every second, {len(client.first)} were answered with; a request of"
        f" {ASKED_ROWS} rows every {1000 * ASKED_EVERY_S:g} ms",
        f"each of the {client.num_trained:,} events stands in exactly one step",
    ]
    plot = PlotSpec(
        "p50_s", ("events_per_second",), "until", "until", "s (p50)", decimals=2, ours="in all"
    )
    columns = ["until", "p50_s", "p99_s", "mean_s", "what"]
    return Report("streams", "From an event to an answer", rows, columns, plot, notes, provenance())


@dataclass(slots=True)
class _Client:
    """Asks all the time, and sees which steps are decided meanwhile.

    Attributes:
        first: when a version was first answered with, by its step.
        num_unanswered, num_trained: of events, see :meth:`waits`.
    """

    folder: Path
    parts: Parts
    first: dict[int, float] = field(default_factory=dict)
    num_unanswered: int = 0
    num_trained: int = 0
    _decided: dict[int, tuple[float, list[Range]]] = field(default_factory=dict)
    _read_bytes: dict[Path, int] = field(default_factory=dict)

    def ask_until_over(self) -> None:
        """Until the trainers have ended; requests are rows of what came a moment ago."""
        place = urlsplit(self.parts.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        headers = {"Content-Type": "text/csv", "Accept": "text/csv"}
        body = b""
        at = 0
        while self.parts.trainers.poll() is None:
            start = time.monotonic()
            path = self.folder / "events" / f"part-{at:08d}.csv"
            if path.exists():
                at += 1
                with path.open("rb") as file:
                    body = b"".join(file.readline() for _ in range(1 + ASKED_ROWS))
            connection.request("POST", "/score", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise BenchmarkError(f"{self.parts.url}: {answer.status} {text[:500]!r}")
            step = _step(answer.headers["x-model-version"])
            self.first.setdefault(step, time.time())
            self.read_journal()
            time.sleep(max(0.0, start + ASKED_EVERY_S - time.monotonic()))

    def read_journal(self) -> None:
        """Take down what was decided since, and when that was seen."""
        now = time.time()
        for path in sorted((self.folder / "run" / "stream" / "journal").glob("*.jsonl"))[-2:]:
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
            for line in map(json.loads, whole.splitlines()):
                ranges = [Range.of_plain(each) for each in line["ranges"]]
                self._decided.setdefault(line["step"], (now, ranges))

    def waits(self, settle_s: float) -> Times:
        """Seconds of each event by part, [events, parts].

        Raises:
            BenchmarkError: unless each event is in exactly one step.
        """
        versions = self._versions()
        version_steps = np.array(sorted(versions))
        answered_steps = np.array(sorted(self.first))
        since = min(self.first.values()) + settle_s
        rows_taken: dict[str, int] = {}
        times: dict[str, Times] = {}
        results = []
        for step, (seen, ranges) in sorted(self._decided.items()):
            place = np.searchsorted(answered_steps, step)
            for each in ranges:
                if each.file not in times:
                    times[each.file] = self._event_times(each.file)
                first = rows_taken.get(each.file, 0)
                rows_taken[each.file] = first + each.records
                events = times[each.file][first : first + each.records]
                events = events[events >= since]
                if place == len(answered_steps):
                    self.num_unanswered += len(events)
                    continue
                version = versions[int(version_steps[np.searchsorted(version_steps, step)])]
                answered = self.first[int(answered_steps[place])]
                whole = (self.folder / "events" / each.file).stat().st_ctime
                moments = [whole, max(seen, whole), *version, answered]
                rising = np.maximum.accumulate(moments)
                results.append(
                    np.diff(np.column_stack([events, *(np.full(len(events), m) for m in rising)]))
                )
        if rows_taken != {name: len(each) for name, each in times.items()} or len(times) != len(
            list((self.folder / "events").glob("part-*.csv"))
        ):
            raise BenchmarkError("events that are not in exactly one step")
        self.num_trained = sum(rows_taken.values())
        return np.concatenate(results)

    def _event_times(self, file: str) -> Times:
        table = pl.read_csv(self.folder / "events" / file, columns=["time"])
        return table["time"].to_numpy() / 1000

    def _versions(self) -> dict[int, tuple[float, float]]:
        """When each was begun, and when it was there, by its step."""
        results = {}
        for path in (self.folder / "models").iterdir():
            if path.name.isdecimal():
                there = path.stat().st_ctime
                if is_delta(path):
                    manifest = read_delta(path)[0]
                    results[_step(manifest.version)] = (manifest.time or there, there)
                else:
                    results[_step(open_exported(path).version)] = (there, there)
        return results


def _step(version: str) -> int:
    return int(version.partition("-")[0])


def _rate(run_dir: Path) -> float:
    """Samples a second over full steps, without the first."""
    records = map(json.loads, (run_dir / "metrics.jsonl").open())
    at = {each["step"]: each["seconds"] for each in records if each["kind"] == "training"}
    last = max(step for step in at if step % 10 == 0)
    return BATCH * (last - WARM_STEPS) / (at[last] - at[WARM_STEPS])


def _work(run_dir: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Samples, and by table the lookups and the ids that have rows."""
    summary = json.loads((run_dir / "summary.json").read_text())
    raw_ids = summary["raw_ids"]
    return summary["samples"], {
        name: (each["lookups"], each["used"]) for name, each in raw_ids.items()
    }
