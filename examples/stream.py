"""From an event to a better answer: a stream, two trainers that follow it, deltas, a server.

Everything on one machine. A generator writes events whose ids go and come and whose preferences
turn. Two trainers follow the folder and publish what changed every second or two; a server follows
them. This program is the client: it has each file of events scored as soon as it is there, before
anybody can have trained on it, and compares with the labels. A model that is frozen after a third
of the time is asked the same.

Run: python examples/stream.py runs/stream --seconds 120 --rate 1000
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure

import pibroch as pb
from pibroch.metrics import StreamingMetrics

T = TypeVar("T")
RECIPE = """
[data.stream]
partitions = 2
path = "{out}/events"
schema_file = "{out}/truth/schema.toml"
wait_seconds = 0.5

[model]
name = "deepfm"
dim = 4
top = [16]

[embedding.init]
name = "normal"

[embedding.rows]
name = "hashed"
capacity = 2000

[embedding.optimizer]
name = "adagrad"
lr = 0.1
initial_accumulator = 0.001

[optimizer]
name = "adam"
lr = 0.003

[train]
batch_size = 256
log_every = 10
publish_to = "{out}/models"
publish_every_seconds = 1.0
publish_keep_seconds = 1e6

[train.windows]
seconds = {window}
lateness_seconds = 1.0
calibration = [0.8, 1.25]
"""


@dataclass
class Answers:
    """What the client was answered, a list item for each file of events.

    Attributes:
        at: when, seconds since 1970.
        model_time: up to which event time the model was trained, seconds since 1970.
        events: with the server's scores.
        frozen: the version that was the newest after a third of the time, and when that was.
    """

    at: list[float] = field(default_factory=list)
    model_time: list[float] = field(default_factory=list)
    events: list[pl.DataFrame] = field(default_factory=list)
    frozen: tuple[Path, float] | None = None


@dataclass
class Parts:
    """What runs beside the client."""

    generator: subprocess.Popen[bytes]
    trainers: subprocess.Popen[bytes]
    url: str


def main(out: Path, seconds: float, rate: float, window: float) -> dict[str, list[float]]:
    """The AUC of each window of event time, by model."""
    events = out / "events"
    models = out / "models"
    with ExitStack() as processes:
        parts = start_all(processes, out, seconds, rate, window)
        answers = ask(f"{parts.url}/score", events, models, parts.generator, seconds)
        parts.trainers.wait(120)
    curves = compare(answers, out / "truth" / "windows.jsonl", window)
    delays = event_to_answer(answers)
    print("event to answer: p50 {:.1f} s, p99 {:.1f} s".format(*np.quantile(delays, [0.5, 0.99])))
    draw(curves, out / "stream.svg")
    return curves


def start_all(
    processes: ExitStack,
    out: Path,
    seconds: float,
    rate: float,
    window: float,
    table_rows: int = 100,
    settings: Sequence[str] = (),
) -> Parts:
    """The generator, the trainers and a server, with settings of the recipe besides."""
    events = out / "events"
    events.mkdir(parents=True)
    (out / "recipe.toml").write_text(RECIPE.format(out=out, window=window))
    generator = start(
        processes, out, "stream generate",
        "--out", events, "--truth", out / "truth", "--seconds", seconds, "--rate", rate,
        "--window", window, "--table-rows", table_rows, "--turn", 2 * seconds,
        "--drift", 0.02, "--drift-every", window,
    )  # fmt: skip
    wait_for(lambda: (out / "truth" / "schema.toml").exists(), generator)
    trainers = start(
        processes, out, "train", out / "recipe.toml", "--run-dir", out / "run",
        "--ranks", 2, "--follow", "--until-idle", 5,
        *(word for setting in settings for word in ("--set", setting)),
    )  # fmt: skip
    wait_for(lambda: (out / "models" / "1").is_dir(), trainers)
    server = start(processes, out, "serve", out / "models", "--port", 0, "--reload-every", 0.1)
    return Parts(generator, trainers, wait_for(lambda: address(out / "serve.log"), server))


def ask(
    url: str, events: Path, models: Path, generator: subprocess.Popen[bytes], seconds: float
) -> Answers:
    """Have each file of events scored as soon as it is there, until no more come.

    Not those that were there before: they were trained on.
    """
    answers = Answers()
    asked = set(events.glob("part-*.csv"))
    begun = time.time()
    while True:
        is_over = generator.poll() is not None
        for path in sorted(set(events.glob("part-*.csv")) - asked):
            asked.add(path)
            headers = {"Content-Type": "text/csv", "Accept": "text/csv"}
            request = urllib.request.Request(url, path.read_bytes(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                model_time = float(answer.headers["x-model-event-time-ms"]) / 1000
                scores = [float(line) for line in answer.read().splitlines()]
            answers.at.append(time.time())
            answers.model_time.append(model_time)
            answers.events.append(pl.read_csv(path).with_columns(served=pl.Series(scores)))
        if answers.frozen is None and time.time() - begun > seconds / 3:
            answers.frozen = newest(models), time.time()
        if is_over:
            return answers
        time.sleep(0.05)


def compare(answers: Answers, truth: Path, window: float) -> dict[str, list[float]]:
    """AUC of the served, the frozen and the best possible model, by window of event time."""
    best = {each["begin_ms"]: each["auc"] for each in map(json.loads, truth.open())}
    width = round(1000 * window)
    asked = with_frozen(pl.concat(answers.events), answers.frozen)
    asked = asked.with_columns(begin=pl.col("time") // width * width)
    asked = asked.filter(pl.col("begin") > pl.col("begin").min())  # the first window is a part
    curves: dict[str, list[float]] = {"begin": [], "best": [], "served": [], "frozen": []}
    print("window  best    served  frozen")
    for (begin,), table in asked.sort("time").group_by("begin", maintain_order=True):
        row = [best[begin], auc(table, "served"), auc(table, "frozen")]
        print(f"{len(curves['begin']):6d}  " + "  ".join(f"{value:.4f}" for value in row))
        for name, value in zip(curves, [begin / 1000, *row], strict=True):
            curves[name].append(value)
    return curves


def with_frozen(events: pl.DataFrame, frozen: tuple[Path, float] | None) -> pl.DataFrame:
    """The same with the scores of the frozen version, of what came after it."""
    assert frozen is not None, "a third of the time has passed"
    path, since = frozen
    predictor = pb.Predictor.open(path)
    columns = {name: events[name].to_list() for name in predictor.columns}
    scores = predictor.score_raw(columns).double()
    scores[(events["time"] < 1000 * since).to_torch()] = torch.nan
    return events.with_columns(frozen=pl.Series(scores.numpy()).fill_nan(None))


def auc(table: pl.DataFrame, name: str) -> float:
    known = table.drop_nulls(name)
    metrics = StreamingMetrics()
    metrics.add(torch.logit(known[name].to_torch()), known["label"].to_torch())
    return metrics.compute()["label"].lifetime.auc


def event_to_answer(answers: Answers) -> list[float]:
    """Seconds from an event to the first answer by a model that was trained on it.

    Of the last event of each file; those behind the last answer have none.
    """
    known = np.maximum.accumulate(answers.model_time)
    last_of_file = [float(table["time"].to_numpy().max()) / 1000 for table in answers.events]
    first = np.searchsorted(known, last_of_file)
    return [
        answers.at[place] - at
        for place, at in zip(first, last_of_file, strict=True)
        if place < len(known)
    ]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds of event time", ylabel="AUC by window")
    at = np.array(curves["begin"]) - curves["begin"][0]
    for name, style in (("best", "k--"), ("served", "C0"), ("frozen", "C1")):
        label = {"best": "best possible"}.get(name, name)
        axes.plot(at, curves[name], style, label=label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def start(processes: ExitStack, out: Path, *line: object) -> subprocess.Popen[bytes]:
    """A command of pibroch as its own process, which ends when this program does."""
    words = [*str(line[0]).split(), *map(str, line[1:])]
    log = processes.enter_context((out / f"{words[0]}.log").open("wb"))
    process = subprocess.Popen(
        [sys.executable, "-m", "pibroch", *words], stdout=log, stderr=subprocess.STDOUT
    )
    processes.callback(end, process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


def wait_for(
    what: Callable[[], T | None], process: subprocess.Popen[bytes], timeout_s: float = 120
) -> T:
    """Until something is there, while a process lives."""
    deadline = time.monotonic() + timeout_s
    while not (result := what()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} ended, or took too long; see its log")
        time.sleep(0.05)
    return result


def address(log: Path) -> str | None:
    """Where a server says that it listens."""
    lines = [line for line in log.read_text().splitlines() if " at http" in line]
    return lines[0].rpartition(" at ")[2] if lines else None


def newest(models: Path) -> Path:
    return max((each for each in models.iterdir() if each.name.isdecimal()), key=number_of)


def number_of(path: Path) -> int:
    return int(path.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--window", type=float, default=10.0)
    given = parser.parse_args()
    main(given.out.resolve(), given.seconds, given.rate, given.window)
