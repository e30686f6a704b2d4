"""``pibroch train`` and ``pibroch evaluate``."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pibroch.cli.console import console, leave_with, results, say
from pibroch.launch.child import (
    die_with_launcher,
    is_rank,
    redirect_output,
    show_launcher,
    show_rank,
)
from pibroch.observability.records import figure, has_more_than_clicks, task_figures
from pibroch.overlap import refuse_overlap
from pibroch.process import tune_process
from pibroch.title import RUN_NAME

if TYPE_CHECKING:
    from pibroch.collectives.world import World
    from pibroch.config import RunConfig
    from pibroch.data import EncodedDataset
    from pibroch.observability.records import Sink
    from pibroch.train.run import RunResult
    from pibroch.train.run_directory import RunDirectory

DEFAULT_RECIPE = "synthetic_small"
DEFAULT_RESTARTS = 10
"""Of several ranks."""
logger = logging.getLogger(__name__)


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's file or name; `synthetic_small` when absent.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="An encoded dataset, instead of the recipe's.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; `runs/<recipe>-<time>` when absent.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --run-dir, if any.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Of a stream: wait for more when all is trained, until a signal comes."
        ),
    ] = False,
    until_idle: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Follow, and end when nothing has come for so long."
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes on this machine that train together; on several machines use torchrun.",
        ),
    ] = 1,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Write what each rank did in some steps, for Perfetto, to RUN_DIR/trace/.",
        ),
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="Who starts processes: local (with --ranks), torchrun, ray, or an installed one.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of the cluster that `--launcher ray` runs on."),
    ] = None,
    by_role: Annotated[
        bool,
        typer.Option(
            "--by-role",
            help="Under torchrun: the last ranks take the recipe's other roles, the others train.",
        ),
    ] = False,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="Only show which processes the run would have, and what each would do."
        ),
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts within an hour of lost processes: 10 with --ranks, 0 for one process.",
        ),
    ] = None,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer GET /metrics there with the run's newest figures, for Prometheus.",
        ),
    ] = None,
    least_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With how many ranks to go on where more die at one place; always all if absent.",
        ),
    ] = None,
) -> None:
    """Train a model and evaluate it. Without arguments: a small run on generated data."""
    changes = [*(overrides or []), *([f"data.dir={str(data)!r}"] if data else [])]
    changes += ["data.stream.follow=true"] if follow or until_idle is not None else []
    changes += [] if until_idle is None else [f"data.stream.until_idle={until_idle}"]
    if roles:
        if os.environ.get("RANK", "0") == "0":
            _show_roles(recipe, changes, ranks, by_role, is_kept=ranks > 1 or bool(restarts))
        return
    os.environ[RUN_NAME] = Path(recipe or (run_dir if resume else None) or DEFAULT_RECIPE).stem
    die_with_launcher()
    tune_process(is_alone=False if ranks > 1 else None)
    from pibroch.launch.base import LOCAL, TORCHRUN, find_launcher

    begin = partial(_begin, recipe, changes, run_dir, resume)
    train_here = partial(
        _join_and_train,
        resume=resume,
        trace=trace,
        make_sink=partial(_sink, tensorboard, metrics_address),
    )
    if launcher is None and (ranks > 1 or restarts):
        launcher = LOCAL.name
    if by_role:
        launcher = TORCHRUN.name
    if launcher is None or (is_rank() and launcher != TORCHRUN.name):
        configured = None if is_rank() else begin()  # before what takes seconds to import
        train_here(begin if configured is None else lambda: configured)
        return
    from pibroch.launch.job import Restarts
    from pibroch.train.job import TrainingRun

    if launcher != TORCHRUN.name:
        show_launcher(ranks, "trainer")
    run = TrainingRun(
        begin,
        train_here,
        sys.argv[1:],
        ranks,
        Restarts(DEFAULT_RESTARTS if restarts is None else restarts),
        least_ranks,
        say,
        context.find_root().obj,
    )
    spec = find_launcher(launcher, may_import=True)
    if address is not None and "address" not in spec.section.model_fields:
        from pibroch.errors import ConfigError

        raise ConfigError(
            f"--address with --launcher {launcher}", "a launcher on a cluster, such as ray"
        )
    settings = {} if address is None else {"address": address}
    raise typer.Exit(spec.build(spec.section(**settings)).run(run))


def _show_roles(
    recipe: str | None, changes: list[str], ranks: int, by_role: bool, is_kept: bool
) -> None:
    from pibroch.cli.roles import layout, memory
    from pibroch.config import load_recipe
    from pibroch.forkserver import can_fork

    config = load_recipe(recipe or DEFAULT_RECIPE, changes)
    results.print(layout(config, ranks, by_role))
    estimate = memory(config, ranks, is_kept and can_fork())
    if estimate is not None:
        results.print(estimate)


def _join_and_train(
    begin: Callable[[], tuple[RunConfig, Path]],
    resume: bool,
    trace: bool,
    make_sink: Callable[[RunDirectory, int], Sink],
) -> None:
    """What a rank does once it knows that it is one; rank 0 shows it."""
    from pibroch.collectives.world import world_of_environment
    from pibroch.train.run import run_training
    from pibroch.train.run_directory import RunDirectory

    show_rank("trainer")
    with world_of_environment(leave_with) as world:
        console.quiet = not world.is_first  # until it has a log
        config, folder = begin() if world.ranks.world_size == 1 else _agree(world, begin)
        run = RunDirectory(folder, world.ranks.rank)
        dataset = _open(config, run, world, resume)
        if not world.is_first:
            redirect_output(run.log_path(world.ranks.rank))
            console.quiet = False
        with suppress(OSError):  # the disk under a rank's log is full
            say(f"run directory: {run.path}")
        result = run_training(config, dataset, run, partial(make_sink, run), world, trace)
        if world.is_first:
            not_tested = "" if config.train.evaluate_test else "test split not read"
            _show(result, not_tested if dataset.samples["test"] else "no test samples")


def _show(result: RunResult, not_tested: str) -> None:
    """Print a line of figures, or why there are none."""
    summary = result.summary
    throughput = f"{summary.samples_per_second:,.0f} samples/s"
    if not_tested:
        results.print(f"{not_tested}  {throughput}")
        return
    known = result.best_possible_auc
    best = "" if known is None else f"  best possible AUC {known:.4f}"
    if summary.tasks is not None and has_more_than_clicks(summary.tasks):
        line = f"test {task_figures(summary.tasks)}  {throughput}"
        results.print(line, markup=False, soft_wrap=True)
        return
    results.print(
        f"test AUC {figure(summary.auc)}  logloss {figure(summary.logloss)}  NE"
        f" {figure(summary.normalized_entropy)}  {throughput}{best}"
    )


def evaluate(
    checkpoint: Annotated[
        Path, typer.Option(help="A checkpoint, or a run directory for its best one.")
    ],
    data: Annotated[Path, typer.Option(help="An encoded dataset.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    predictions: Annotated[
        Path | None, typer.Option(help="A file for the scores, as `pibroch predict` writes it.")
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help="All items, a row each, among which `all_hr@k` looks (Parquet, CSV)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures, by label, as JSON.")
    ] = False,
) -> None:
    """Evaluate a checkpoint: AUC, log loss, normalised entropy, calibration.

    Of several labels, of numbers and of samples in groups, all figures by label.
    """
    tune_process()
    from pibroch.data import EncodedDataset
    from pibroch.score.checkpoint import evaluate_checkpoint
    from pibroch.state.checkpoint_folder import find_checkpoint
    from pibroch.train.metrics import reported

    if predictions is not None:
        refuse_overlap(predictions, [find_checkpoint(checkpoint), data], "--predictions")
    dataset = EncodedDataset.open(data)
    evaluation = evaluate_checkpoint(checkpoint, dataset, split, predictions, items)
    metrics = evaluation.metrics
    tasks = reported(evaluation)
    if as_json:
        content = {"split": split, "num_samples": metrics.num_samples, "tasks": tasks}
        typer.echo(json.dumps(content, indent=1))
        return
    if has_more_than_clicks(tasks):
        line = f"{split} {task_figures(tasks)}  {metrics.num_samples:,} samples"
        results.print(line, markup=False, soft_wrap=True)
        return
    results.print(
        f"{split} AUC {figure(metrics.auc)}  logloss {figure(metrics.logloss)}"
        f"  NE {figure(metrics.normalized_entropy)}  calibration {figure(metrics.calibration)}"
        f"  {metrics.num_samples:,} samples"
    )


def _begin(
    recipe: str | None, changes: list[str], run_dir: Path | None, resume: bool
) -> tuple[RunConfig, Path]:
    """The configuration and the folder of a run that begins or goes on."""
    from pibroch.config import load_recipe
    from pibroch.config.differences import differences, spelled
    from pibroch.config.recipes import change_config
    from pibroch.config.secret import hand_on
    from pibroch.errors import ConfigError
    from pibroch.train.run_directory import RunDirectory

    if resume and run_dir is None:
        raise ConfigError(
            "--resume without --run-dir",
            "the directory of the run to go on with",
            "add --run-dir DIR",
        )
    name = recipe or DEFAULT_RECIPE
    run = RunDirectory(
        run_dir or Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    begun = _begun(run) if resume else None
    if begun is None:
        if resume and recipe is None:
            _say_which_begins(run, name, changes)
        config = load_recipe(name, changes)
        hand_on(config)
        return config, run.must_be_new().path
    config = change_config(begun, changes)
    asked = config if recipe is None else load_recipe(recipe, changes)
    differing = differences(config, asked)
    if differing:
        raise ConfigError(
            f"recipe {recipe} with {spelled({key: new for key, (_, new) in differing.items()})}",
            f"{spelled({key: old for key, (old, _) in differing.items()})}, with which the run in"
            f" {run.path} began",
            "leave the recipe out, or start anew in another --run-dir",
        )
    hand_on(asked)  # may give in full what the run's own does not have
    return config, run.path


def _say_which_begins(run: RunDirectory, recipe: str, changes: list[str]) -> None:
    """Say that nothing is there to go on with; refuse where nothing says what is to begin."""
    from pibroch.errors import ConfigError

    if not changes:
        raise ConfigError(
            f"--resume with {run.path}, in which no run was begun",
            "the directory of a run, or the recipe of one that begins",
            "correct --run-dir, or name a recipe",
        )
    logger.warning("no run in %s: a new one of the recipe %s begins", run.path, recipe)


def _begun(run: RunDirectory) -> RunConfig | None:
    """The configuration of the run that was begun in a directory, if one was."""
    from pibroch.errors import ConfigError

    if run.exists():
        return run.config()
    if not run.path.exists():
        return None
    from pibroch.state.checkpoint_folder import newest_config

    config = newest_config(run.checkpoints_path)
    if config is not None:
        logger.warning(
            "no config.toml in %s: going on with the configuration in its newest checkpoint",
            run.path,
        )
        return config
    try:
        run.must_be_new()
    except ConfigError as error:
        raise ConfigError(
            f"run directory {run.path} with neither config.toml nor an undamaged checkpoint, which"
            " is not empty",
            "the directory of a run, or a new or empty folder for one that begins",
            "put its config.toml back, or pass another --run-dir",
        ) from error
    return None


def _agree(world: World, begin: Callable[[], tuple[RunConfig, Path]]) -> tuple[RunConfig, Path]:
    """What `begin` says on rank 0, on all ranks.

    Names may hold the time, and recipes may lie on rank 0's machine only.
    """
    from pibroch.collectives.agreement import on_first
    from pibroch.config.recipes import check_config

    def plain() -> list[Any]:
        config, folder = begin()
        return [config.model_dump(mode="json"), str(folder)]

    config, folder = on_first(world.control, plain)
    return check_config(config, "rank 0's configuration"), Path(folder)


def _open(config: RunConfig, run: RunDirectory, world: World, resume: bool) -> EncodedDataset:
    """The data, and the run's folder on the disk, which is this run's from now on.

    Both may have to be made, by rank 0.
    """
    from pibroch.collectives.agreement import on_first
    from pibroch.train.data_source import open_dataset
    from pibroch.train.stream import check_stream

    def make() -> None:
        open_dataset(config.data)
        check_stream(config.data.stream)
        run.claim()
        if not run.exists():
            run.create(config)
        elif not resume:  # another run began here since this one looked
            run.must_be_new()

    on_first(world.control, make)
    return open_dataset(config.data)


def _sink(
    tensorboard: bool, metrics_address: str | None, run: RunDirectory, total_steps: int | None
) -> Sink:
    from pibroch.observability.exposition import Exposition
    from pibroch.observability.progress import progress_sink
    from pibroch.observability.records import FanOut
    from pibroch.observability.sinks import TensorBoard as TensorBoardSink

    sinks: list[Sink] = (
        [TensorBoardSink(run.path / "tensorboard")] if tensorboard and run.rank == 0 else []
    )
    if metrics_address is not None and run.rank == 0:
        exposition = Exposition(metrics_address)
        sinks.append(exposition)
        logger.info("metrics at %s", exposition.url)
    return FanOut([*sinks, progress_sink(console, total_steps)])
