"""A stream that drifts for hours of event time, and what each published version is worth in it.

The stream is generated and trained as fast as it goes. All versions are kept, and afterwards each
event is scored by the version that a server would have had when it came: the newest one that was
trained on nothing later. Beside it, by the one an hour before, and by one that is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from matplotlib.axes import Axes

import pibroch as pb
from benchmarks.plots import OURS_COLOUR, PEER_COLOURS, Frame
from benchmarks.provenance import provenance
from benchmarks.registry import Options
from benchmarks.results import Report, Row
from benchmarks.small_runs import pibroch
from pibroch.serve.predictor import Predictor
from pibroch.state.event_time import event_time_of

HOUR_S = 3600
FILE_S = 60
FILES_SCORED = 5
"""Of a window; versions are opened for each."""
MODELS = ("best possible", "served", "an hour old", "frozen")
WITHIN = 0.005
RECIPE = """
[data.stream]
path = "{folder}/events"
schema_file = "{folder}/truth/schema.toml"
partitions = 1
[model]
name = "deepfm"
dim = 4
top = [16]
[embedding.init]
name = "normal"
[embedding.rows]
name = "hashed"
capacity = 4000
[embedding.optimizer]
name = "adagrad"
lr = 0.1
initial_accumulator = 0.001
[optimizer]
name = "adam"
lr = 0.003
[train]
batch_size = 512
log_every = 100
checkpoint_every = 1_000_000
publish_to = "{folder}/models"
publish_every_seconds = 0.25
publish_keep_seconds = 1e6
"""
Floats = npt.NDArray[np.float64]


def measure(options: Options) -> Report:
    """AUC by window of event time: of the best possible model, and of three that were trained."""
    hours, rate, window_s, scored = (3, 60, 1800, 4_000) if options.quick else (5, 150, 1200, 8_000)
    folder = options.scratch
    options.say(f"generating {hours} hours of event time")
    pibroch(
        "stream", "generate", "--out", folder / "events", "--truth", folder / "truth", "--fast",
        "--format", "parquet", "--part-seconds", FILE_S, "--rate", rate,
        "--seconds", hours * HOUR_S, "--table-rows", 100, "--turn", 6 * HOUR_S,
        "--drift", 0.02, "--drift-every", 600, "--window", window_s,
    )  # fmt: skip
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    options.say("training")
    pibroch(
        "train", folder / "recipe.toml", "--run-dir", folder / "run", "--follow",
        "--until-idle", 1,
    )  # fmt: skip
    versions = _Versions(folder / "models")
    files = sorted((folder / "events").glob("*.parquet"))
    truths = sorted((folder / "truth" / "truth").glob("*.parquet"))
    per_window = window_s // FILE_S
    frozen_at = versions.begin_ms + hours * HOUR_S * 1000 // 3
    rows: list[Row] = []
    for first in range(0, len(files), per_window):
        window = slice(first, first + per_window, max(1, per_window // FILES_SCORED))
        minutes = first * FILE_S // 60
        if minutes < max(90, 20 * hours):  # what is an hour old has learned little yet
            continue
        options.say(f"scoring from minute {minutes} on")
        figures = _window(files[window], truths[window], versions, frozen_at, scored)
        rows.append({"from_minute": minutes, **figures})
    gaps = np.array([row["best possible"] - row["served"] for row in rows])
    losses = np.array([row["served"] - row["an hour old"] for row in rows])
    num_held = int((gaps <= losses + WITHIN).sum())
    notes = [
        f"**served: {gaps.mean():.4f} below the best possible on average; a model of an hour before"
        f" loses {losses.mean():.4f} against it; within {WITHIN} of the best less that loss in"
        f" {num_held} of {len(rows)} windows**",
        f"{hours} hours of event time at {rate} events a second, a quarter turn of preferences in 6"
        f" hours, 2 % of hot ids replaced every 10 minutes; {len(versions)} versions, on average"
        f" {np.mean([row['age_s'] for row in rows]):.0f} s of event time old when they score",
        f"by `Predictor` from the published exports and deltas, {scored:,} events a window; no"
        " server in between. The frozen model is that of a third of the time",
        "AUC over all labels that the true probabilities allow: without the noise of labels",
    ]
    columns = ["from_minute", *MODELS, "age_s"]
    title = "What the served model is worth on a stream that drifts"
    return Report("streams", title, rows, columns, DriftPlot(), notes, provenance())


class _Versions:
    """Versions by the last event that they were trained on."""

    def __init__(self, folder: Path) -> None:
        times = {path: event_time_of(path) for path in folder.iterdir() if path.name.isdecimal()}
        known = sorted((time, path) for path, time in times.items() if time is not None)
        self._paths = [path for _, path in known]
        self._times = np.array([time for time, _ in known])
        self._opened: dict[Path, Predictor] = {}

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def begin_ms(self) -> int:
        return int(self._times[0])

    def at(self, time_ms: int) -> tuple[Predictor, int]:
        """The newest of nothing later, and its time."""
        place = int(np.searchsorted(self._times, time_ms, "right")) - 1
        path = self._paths[max(0, place)]
        if path not in self._opened:
            self._opened = dict(list(self._opened.items())[-2:])
            self._opened[path] = pb.Predictor.open(path)
        return self._opened[path], int(self._times[max(0, place)])


def _window(
    files: list[Path],
    truths: list[Path],
    versions: _Versions,
    frozen_at: int,
    scored: int,
) -> Row:
    """The AUC of each model on events of some files."""
    chances: list[Floats] = []
    scores: dict[str, list[Floats]] = {name: [] for name in MODELS}
    ages = []
    for path, truth_path in zip(files, truths, strict=True):
        events = pl.read_parquet(path)
        every = max(1, len(events) * len(files) // scored)
        events = events.gather_every(every)
        truth = pl.read_parquet(truth_path).gather_every(every)
        assert truth["event_id"].equals(events["event_id"]), "one file of each a minute"
        begin = int(events["time"].to_numpy().min())
        chances.append(truth["probability"].to_numpy())
        scores["best possible"].append(chances[-1])
        wanted = {"served": begin, "an hour old": begin - 1000 * HOUR_S, "frozen": frozen_at}
        for name, time_ms in wanted.items():
            predictor, at = versions.at(time_ms)
            columns = {column: events[column].to_list() for column in predictor.columns}
            scores[name].append(predictor.score_raw(columns).double().numpy())
            if name == "served":
                ages.append((begin - at) / 1000)
    chance = np.concatenate(chances)
    aucs = {name: expected_auc(np.concatenate(parts), chance) for name, parts in scores.items()}
    return {**aucs, "age_s": float(np.mean(ages))}


def expected_auc(scores: Floats, chances: Floats) -> float:
    """AUC ``[B]`` where a label is 1 by a chance; ties count half.

    >>> expected_auc(np.array([0.1, 0.7]), np.array([0.0, 1.0]))
    1.0
    """
    _, place = np.unique(scores, return_inverse=True)
    positive = np.bincount(place, chances)
    negative = np.bincount(place, 1 - chances)
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / (positive.sum() * negative.sum()))


@dataclass(frozen=True, slots=True)
class DriftPlot:
    """A line a model over event time."""

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """See :class:`benchmarks.plots.Plot`."""
        colours = dict(zip(MODELS, (PEER_COLOURS[0], OURS_COLOUR, *PEER_COLOURS[2:]), strict=False))

        def draw_panel(axes: Axes, members: list[Row]) -> None:
            for name, colour in colours.items():
                minutes = [row["from_minute"] for row in members]
                axes.plot(minutes, [row[name] for row in members], color=colour, label=name)
            axes.set_xlabel("minutes of event time", fontsize=8)

        drawn = [row | {"axis": "by window"} for row in rows]
        Frame(("axis",), "AUC").draw(drawn, colours, title, path, draw_panel)
