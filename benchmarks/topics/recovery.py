"""What a death costs by the role that dies, beside ending the run and resuming it.

And what it costs when nobody dies.

Correctness first: each step that is trained again must have the loss that it had.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from benchmarks.deaths import VICTIMS, Recovery, WatchedRun
from benchmarks.environments import our_python, peers_python
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.small_runs import RECIPE, pibroch, settings
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import MissingDependencyError

FROM_MEMORY = "pibroch, from memory"
FROM_DISK = "pibroch, from disk"
BY_HAND = "ended and resumed"
RANKS_ALONE = "pibroch, two ranks alone"
TORCHREC = "TorchRec, torchrun"
ROWS = {"1 M": 38_500, "10 M": 385_000, "33.8 M": 1_300_000}
"""All tables' rows, by those of each of 26."""
INTERVAL_S = 5.0
OWN_EVERY = 400
TORCHREC_SAVES_EVERY_S = 20.0
KILL_EVERY_S = 60.0
WATCHED_S = 180.0
CALM_STEPS = 40
STARTED_WITHIN = ("oracle", "data processor")
"""Roles whose processes are started again within the run, whoever watches."""
ALL_ROLES = [
    "embedding.exchange=lookahead",
    "embedding.exchange.servers=2",
    "embedding.exchange.oracle=central",
    "data.processors=2",
]
COLUMNS = {
    "deaths": ["rows", "role", "contender", "seconds", "steps_again"],
    "cost": [
        "rows",
        "contender",
        "samples_per_second",
        "of_without",
        "cuts",
        "share_of_cuts",
        "checkpoints",
        "share_of_checkpoints",
    ],
    "goodput": ["rows", "contender", "steps_per_second", "of_calm", "deaths"],
}
PLOTS = {
    "deaths": PlotSpec(
        "seconds",
        ("rows",),
        "role",
        "contender",
        "s from death to the next new step",
        decimals=1,
        ours=FROM_MEMORY,
    ),
    "cost": PlotSpec(
        "samples_per_second", ("rows",), "contender", "contender", "samples/s", ours="with both"
    ),
    "goodput": PlotSpec(
        "of_calm",
        ("rows",),
        "contender",
        "contender",
        "new steps of those without deaths",
        ours=FROM_MEMORY,
    ),
}


@topic(
    "recovery",
    "seconds from a death to the next new step, by role; goodput; what cuts and checkpoints by time"
    " cost",
    sections=["deaths", "cost", "goodput"],
    quick_sections=["deaths", "cost"],
)
def run(options: Options) -> Report:
    """Measure a section."""
    measure, title = {
        "deaths": (deaths, "What a death costs"),
        "cost": (cost, "What it costs when nobody dies"),
        "goodput": (goodput, "New steps with a death a minute"),
    }[options.section]
    sizes = ROWS if options.section == "deaths" else dict([list(ROWS.items())[-1]])
    chosen = {"0.1 M": 3_850} if options.quick else sizes
    rows: list[Row] = []
    for label, table_rows in chosen.items():
        data = options.scratch / f"data-{table_rows}"
        if not data.exists():
            options.say(f"{label} rows: generating data")
            synthesize(
                SyntheticOptions(
                    num_samples=400_000 if options.quick else 1_500_000, table_rows=table_rows
                ),
                data,
            )
        recipe = options.scratch / "recipe.toml"
        recipe.write_text(RECIPE)
        rows += measure(label, recipe, data, options)
    notes = [*headlines(options.section, rows), *MEANINGS[options.section]]
    return Report(
        "recovery",
        title,
        rows,
        COLUMNS[options.section],
        PLOTS[options.section],
        notes,
        provenance(),
    )


MEANINGS = {
    "deaths": [
        (
            "two ranks, two embedding servers, a central oracle, two data processors; batch 2048,"
            f" dim 16; `{FROM_MEMORY}` with all defaults, `{FROM_DISK}` without cuts in memory and"
            f" with checkpoints by time every {INTERVAL_S:g} s"
        ),
        (
            f"`{RANKS_ALONE}`: two ranks with alltoall and half of all rows each, which one takes"
            " along; all defaults"
        ),
        (
            f"`{BY_HAND}`: no supervisor, cuts, or checkpoints by time, those of the run's own"
            f" every {OWN_EVERY} steps; the same command with --resume as soon as all have ended"
        ),
        "each step that was trained again had the loss that it had before",
        (
            f"{' and '.join(STARTED_WITHIN)}: started again within the run, which they do not end;"
            " the new oracle makes all plans since the run last began or went on once more"
        ),
        (
            f"`{TORCHREC}`: two ranks with DistributedModelParallel and the same model, tables and"
            " batch size on generated ids, started again by torchrun, which looks every 0.1 s;"
            f" distributed checkpoints of everything every {TORCHREC_SAVES_EVERY_S:g} s, beside"
            " which nothing is trained; left out where its environment is missing"
        ),
    ],
    "cost": [
        (
            "two ranks, alltoall, batch 2048, dim 16; runs in turn, medians over the rounds; all"
            " steps of a run but the first"
        ),
        "`with both`: cuts in memory and checkpoints by time, as often as they are made by default",
        (
            "`share_of_...`: of the time of all steps, what they took from the thread that trains,"
            " the first ones included, which touch memory that nobody has touched"
        ),
    ],
    "goodput": [
        (
            "all roles as in `deaths`; a trainer, a server, the oracle in turn are killed, one"
            f" every {KILL_EVERY_S:g} s, for {WATCHED_S:g} s; `of_calm`: new steps a second over"
            " those of the same run before the first death"
        ),
    ],
}


HOW = {
    FROM_MEMORY: (["--restarts", "1000"], ["train.checkpoint_every=1000000"]),
    FROM_DISK: (
        ["--restarts", "1000"],
        [
            "train.cut_every_seconds=0",
            f"train.checkpoint_every_seconds={INTERVAL_S}",
            "train.checkpoint_every=1000000",
        ],
    ),
    RANKS_ALONE: (["--restarts", "1000"], ["train.checkpoint_every=1000000"]),
    BY_HAND: (
        ["--restarts", "0"],
        [
            "train.cut_every_seconds=0",
            "train.checkpoint_every_seconds=0",
            f"train.checkpoint_every={OWN_EVERY}",
        ],
    ),
}
"""Arguments and settings of each contender."""


def watched_run(contender: str, recipe: Path, data: Path, options: Options) -> WatchedRun:
    """A run of all roles, or of ranks alone."""
    arguments, how = HOW[contender]
    given = settings(*([] if contender == RANKS_ALONE else ALL_ROLES), "train.steps=1000000", *how)
    folder = options.scratch / f"run-{options.section}-{len(contender)}-{data.name}"
    command = [
        str(our_python()),
        "-m",
        "pibroch",
        "train",
        str(recipe),
        "--run-dir",
        str(folder),
        "--data",
        str(data),
    ]
    return WatchedRun(folder, [*command, "--ranks", "2", *arguments, *given], contender != BY_HAND)


def torchrec_run(table_rows: int, python: Path, options: Options) -> WatchedRun:
    """Two ranks that train with TorchRec, watched by torchrun."""
    folder = options.scratch / f"run-torchrec-{table_rows}"
    (folder / "checkpoints").mkdir(parents=True)
    program = [
        "benchmarks.workers.torchrec_restarts",
        str(folder),
        str(table_rows),
        str(TORCHREC_SAVES_EVERY_S),
    ]
    return WatchedRun(
        folder,
        [
            str(python),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1000",
            "--monitor-interval",
            "0.1",
            "-m",
            *program,
        ],
        goes_on_by_itself=True,
        environment={
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            # else ranks that torchrun starts again find in its store where those before them
            # listened (torch 2.13)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


def deaths(label: str, recipe: Path, data: Path, options: Options) -> list[Row]:
    """Each role dies once in a run of each contender; more often when there is time."""
    rows: list[Row] = []
    for contender in HOW:
        with watched_run(contender, recipe, data, options) as watched:
            for role in VICTIMS:
                is_there = role == "trainer" or contender != RANKS_ALONE
                if not is_there or (contender == BY_HAND and role in STARTED_WITHIN):
                    continue
                options.say(f"{label} rows, {contender}: {role}")
                rows.append(_deaths_of(watched, label, role, contender, options))
    try:
        python = peers_python()
    except MissingDependencyError as error:
        options.say(f"{TORCHREC} is left out: {error}")
        return rows
    options.say(f"{label} rows, {TORCHREC}: trainer")
    with torchrec_run(int(data.name.removeprefix("data-")), python, options) as watched:
        rows.append(_deaths_of(watched, label, "trainer", TORCHREC, options))
    return rows


def _deaths_of(watched: WatchedRun, label: str, role: str, contender: str, options: Options) -> Row:
    result = [_lose(watched, role, contender) for _ in range(1 if options.quick else 2)]
    return {
        "rows": label,
        "role": role,
        "contender": contender,
        "seconds": statistics.median(each.seconds for each in result),
        "steps_again": statistics.median(each.steps_again for each in result),
    }


def _lose(watched: WatchedRun, role: str, contender: str) -> Recovery:
    """Wait for some steps after the last death, then lose a process of ``role``.

    Where runs go on from a checkpoint, also for a new one.
    """
    saved = watched.saved_step()
    begin = watched.step()
    if contender in (FROM_MEMORY, RANKS_ALONE):
        watched.wait_for(lambda: watched.step() >= begin + 3 * CALM_STEPS)
    else:
        watched.wait_for(
            lambda: (
                watched.saved_step() > saved
                and watched.step() >= max(begin, watched.saved_step()) + CALM_STEPS
            )
        )
    return watched.lose(role)


def goodput(label: str, recipe: Path, data: Path, options: Options) -> list[Row]:
    """New steps a second while somebody dies again and again."""
    rows: list[Row] = []
    for contender in (FROM_MEMORY, FROM_DISK):
        with watched_run(contender, recipe, data, options) as watched:
            options.say(f"{label} rows, {contender}: goodput")
            watched.wait_for(lambda: watched.step() >= 2 * CALM_STEPS)
            calm = watched.rate(KILL_EVERY_S)
            victims = list(VICTIMS)[: int(WATCHED_S / KILL_EVERY_S)]
            begin = watched.step()
            start = time.monotonic()
            for number, role in enumerate(victims, 1):
                watched.lose(role)
                time.sleep(max(0.0, start + number * KILL_EVERY_S - time.monotonic()))
            rate = (watched.step() - begin) / (time.monotonic() - start)
            rows.append(
                {
                    "rows": label,
                    "contender": contender,
                    "steps_per_second": rate,
                    "of_calm": rate / calm,
                    "deaths": len(victims),
                }
            )
    return rows


def cost(label: str, recipe: Path, data: Path, options: Options) -> list[Row]:
    """Runs with cuts and checkpoints, as they are by default, and without, in turn."""
    steps, rounds = (150, 1) if options.quick else (4000, 2)
    contenders = {
        "without": ["train.checkpoint_every_seconds=0", "train.cut_every_seconds=0"],
        "with both": ["train.checkpoint_every_seconds=2"] if options.quick else [],
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, settings_of in contenders.items():
            options.say(f"{label} rows, {name}, round {number + 1}")
            folder = (
                options.scratch / f"cost-{label.replace(' ', '')}-{name.replace(' ', '')}-{number}"
            )
            how = [
                f"train.steps={steps}",
                "train.log_every=100",
                "train.checkpoint_every=1000000",
                *settings_of,
            ]
            given = [recipe, "--data", data, "--run-dir", folder, "--ranks", 2]
            pibroch("train", *given, *settings(*how))
            results[name].append(json.loads((folder / "summary.json").read_text()))
    rates = [
        [each["samples_per_second"] for each in summaries]
        for summaries in (results["without"], results["with both"])
    ]
    ratio = statistics.median(one / other for other, one in zip(*rates, strict=True))
    return [
        {
            "rows": label,
            "contender": name,
            "samples_per_second": _median(summaries, "samples_per_second"),
            "of_without": ratio if name == "with both" else 1.0,
            "cuts": _median(summaries, "memory_cuts"),
            "share_of_cuts": _median(summaries, "memory_cut_seconds")
            / _median(summaries, "seconds"),
            "checkpoints": _median(summaries, "timed_checkpoints"),
            "share_of_checkpoints": _median(summaries, "timed_checkpoint_seconds")
            / _median(summaries, "seconds"),
        }
        for name, summaries in results.items()
    ]


def _median(summaries: list[dict[str, float]], field: str) -> float:
    return statistics.median(each[field] for each in summaries)


def headlines(section: str, rows: list[Row]) -> list[str]:
    """One line a case."""
    if section == "goodput":
        return [
            f"**{row['rows']} rows, {row['contender']}: {row['of_calm']:.2f} of the steps without"
            " deaths**"
            for row in rows
        ]
    if section == "cost":
        return [
            f"**{row['rows']} rows, {row['contender']}: {row['of_without']:.3f} of the throughput"
            f" without, {row['share_of_cuts'] + row['share_of_checkpoints']:.1%}"
            " of the training thread's time**"
            for row in rows
            if row["contender"] != "without"
        ]
    others = {
        contender: {
            (row["rows"], row["role"]): row["seconds"]
            for row in rows
            if row["contender"] == contender
        }
        for contender in (BY_HAND, TORCHREC)
    }
    lines = []
    for row in rows:
        case = (row["rows"], row["role"])
        if row["contender"] not in (BY_HAND, TORCHREC):
            ratios = [
                f"; {seconds[case] / row['seconds']:.1f}x quicker than {other}"
                for other, seconds in others.items()
                if case in seconds
            ]
            took = f"{row['seconds']:.1f} s, {row['steps_again']:g} steps again"
            lines.append(
                f"**{row['rows']} rows, {row['role']}, {row['contender']}:"
                f" {took}{''.join(ratios)}**"
            )
    return lines
