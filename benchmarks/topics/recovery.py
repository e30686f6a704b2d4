"""What a death costs by the role that dies, beside ending the run and resuming it; and what it costs when nobody dies.

Correctness first: each step that is trained again must have the loss that it had.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

from benchmarks.deaths import VICTIMS, Recovery, WatchedRun
from benchmarks.environments import our_python
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from pibroch.data.synthetic import SyntheticOptions, synthesize

SUPERVISED, BY_HAND = "pibroch, supervised", "ended and resumed"
ROWS = {"1 M": 150_000, "10 M": 1_600_000, "33.8 M": 11_000_000}
"""All tables' rows, about, by the bound on each of Criteo's tables."""
INTERVAL_S, OWN_EVERY = 5.0, 400
CALM_STEPS = 40
STARTED_WITHIN = ("oracle", "data processor")
"""Roles whose processes are started again within the run, whoever watches."""
ALL_ROLES = [
    "embedding.exchange=lookahead", "embedding.exchange.servers=2", "embedding.exchange.oracle=central", "data.processors=2",
]  # fmt: skip
RECIPE = """
[model]
name = "dlrm"
dim = 16
bottom = [64]
top = [64]
[embedding.optimizer]
name = "rowwise_adagrad"
lr = 0.05
[optimizer]
name = "adam"
lr = 1e-3
[train]
batch_size = 2048
log_every = 1
keep = 1
evaluate_every = 1000000
"""
COLUMNS = {
    "deaths": ["rows", "role", "contender", "seconds", "steps_again"],
    "cost": ["rows", "contender", "samples_per_second", "of_without", "share_of_thread", "checkpoints"],
}
PLOTS = {
    "deaths": PlotSpec(
        "seconds", ("rows",), "role", "contender", "s from death to the next new step", decimals=1, ours=SUPERVISED
    ),
    "cost": PlotSpec("samples_per_second", ("rows",), "contender", "contender", "samples/s", ours="by time"),
}


@topic(
    "recovery", "seconds from a death to the next new step, by role, and what checkpoints by time cost",
    sections=["deaths", "cost"], quick_sections=["deaths", "cost"],
)  # fmt: skip
def run(options: Options) -> Report:
    """Measure a section."""
    chosen = {"0.1 M": 10_000} if options.quick else ROWS
    rows: list[Row] = []
    for label, most in chosen.items():
        data = options.scratch / f"data-{most}"
        if not data.exists():
            options.say(f"{label} rows: generating data")
            synthesize(SyntheticOptions(num_samples=400_000 if options.quick else 4_000_000, max_table_rows=most), data)
        recipe = options.scratch / "recipe.toml"
        recipe.write_text(RECIPE)
        measure = deaths if options.section == "deaths" else cost
        rows += measure(label, recipe, data, options)
    notes = [*headlines(options.section, rows), *MEANINGS[options.section]]
    title = "What a death costs" if options.section == "deaths" else "What checkpoints by time cost"
    return Report("recovery", title, rows, COLUMNS[options.section], PLOTS[options.section], notes, provenance())


MEANINGS = {
    "deaths": [
        f"two ranks, two embedding servers, a central oracle, two data processors; batch 2048, dim 16; checkpoints by time "
        f"every {INTERVAL_S:g} s, those of the run's own every {OWN_EVERY} steps",
        f"`{BY_HAND}`: no supervisor and no checkpoints by time; the same command with --resume as soon as all have ended",
        "each step that was trained again had the loss that it had before",
        f"{' and '.join(STARTED_WITHIN)}: started again within the run, which they do not end; the new oracle makes all plans "
        "since the run last began or went on once more",
        "TorchRec with torchrun's restarts is left out",
    ],
    "cost": [
        "two ranks, alltoall, batch 2048, dim 16; runs in turn, medians over the rounds; all steps of a run but the first",
        "`share_of_thread`: of the time of steps, what checkpoints by time took from the thread that trains",
    ],
}


def settings(*given: str) -> list[str]:
    """As the command line takes them."""
    return [word for each in given for word in ("--set", each)]


def deaths(label: str, recipe: Path, data: Path, options: Options) -> list[Row]:
    """Each role dies once in a run of each contender; more often when there is time."""
    kept = {
        SUPERVISED: (
            ["--restarts", "1000"],
            [f"train.checkpoint_every_seconds={INTERVAL_S}", "train.checkpoint_every=1000000"],
        ),
        BY_HAND: (["--restarts", "0"], ["train.checkpoint_every_seconds=0", f"train.checkpoint_every={OWN_EVERY}"]),
    }
    rows: list[Row] = []
    for contender, (arguments, how) in kept.items():
        given = settings(*ALL_ROLES, "train.steps=1000000", *how)
        folder = options.scratch / f"run-{len(contender)}-{data.name}"
        with WatchedRun(
            recipe, folder, ["--data", str(data), "--ranks", "2", *arguments, *given], contender == SUPERVISED
        ) as watched:
            for role in VICTIMS:
                if contender == BY_HAND and role in STARTED_WITHIN:
                    continue
                options.say(f"{label} rows, {contender}: {role}")
                found = [_lose(watched, role) for _ in range(1 if options.quick else 3)]
                rows.append({
                    "rows": label, "role": role, "contender": contender,
                    "seconds": statistics.median(each.seconds for each in found),
                    "steps_again": statistics.median(each.steps_again for each in found),
                })  # fmt: skip
    return rows


def _lose(watched: WatchedRun, role: str) -> Recovery:
    """After a new checkpoint, and some steps behind it."""
    saved, begin = watched.saved_step(), watched.step()
    watched.wait_for(
        lambda: watched.saved_step() > saved and watched.step() >= max(begin, watched.saved_step()) + CALM_STEPS
    )
    return watched.lose(role)


def cost(label: str, recipe: Path, data: Path, options: Options) -> list[Row]:
    """Runs with checkpoints by time and without, in turn."""
    steps, rounds = (150, 1) if options.quick else (1500, 3)
    contenders = {"without": 0.0, "by time": 2.0 if options.quick else 10.0}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, seconds in contenders.items():
            options.say(f"{label} rows, {name}, round {number + 1}")
            folder = options.scratch / f"cost-{label.replace(' ', '')}-{name.replace(' ', '')}-{number}"
            how = [
                f"train.steps={steps}",
                f"train.checkpoint_every_seconds={seconds}",
                "train.checkpoint_every=1000000",
            ]
            given = [str(recipe), "--data", str(data), "--run-dir", str(folder), "--ranks", "2", *settings(*how)]
            command = [str(our_python()), "-m", "pibroch", "train", *given]
            subprocess.run(command, check=True, capture_output=True, timeout=1800)
            found[name].append(json.loads((folder / "summary.json").read_text()))
    without = statistics.median(each["samples_per_second"] for each in found["without"])
    return [
        {
            "rows": label, "contender": name,
            "samples_per_second": statistics.median(each["samples_per_second"] for each in summaries),
            "of_without": statistics.median(each["samples_per_second"] for each in summaries) / without,
            "share_of_thread": statistics.median(each["timed_checkpoint_seconds"] / each["seconds"] for each in summaries),
            "checkpoints": statistics.median(each["timed_checkpoints"] for each in summaries),
        }
        for name, summaries in found.items()
    ]  # fmt: skip


def headlines(section: str, rows: list[Row]) -> list[str]:
    """One line a case."""
    if section == "cost":
        return [
            f"**{row['rows']} rows: {row['of_without']:.2f} of the throughput without, "
            f"{row['share_of_thread']:.1%} of the training thread's time**"
            for row in rows if row["contender"] == "by time"
        ]  # fmt: skip
    by_hand = {(row["rows"], row["role"]): row["seconds"] for row in rows if row["contender"] == BY_HAND}
    lines = []
    for row in rows:
        other = by_hand.get((row["rows"], row["role"]))
        if row["contender"] == SUPERVISED:
            ratio = "" if other is None else f"; {other / row['seconds']:.1f}x quicker than {BY_HAND}"
            again = f"{row['steps_again']:g} steps again"
            lines.append(f"**{row['rows']} rows, {row['role']}: {row['seconds']:.1f} s, {again}{ratio}**")
    return lines
