"""``pibroch train`` and ``pibroch evaluate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pibroch.cli.console import console, results
from pibroch.process import tune_process

if TYPE_CHECKING:
    from pibroch.config import RunConfig
    from pibroch.observability.records import Sink
    from pibroch.train.run_directory import RunDirectory

DEFAULT_RECIPE = "synthetic_small"

Recipe = Annotated[str | None, typer.Argument(help="A recipe's file or name; `synthetic_small` when absent.")]
Data = Annotated[Path | None, typer.Option(help="An encoded dataset, instead of the recipe's.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value.")]
RunDir = Annotated[Path | None, typer.Option(help="Where the run is kept; `runs/<recipe>-<time>` when absent.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --run-dir, if any.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")]


def train(
    recipe: Recipe = None,
    data: Data = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Train a model and evaluate it. Without arguments: a small run on generated data."""
    changes = [*(overrides or []), *([f"data.dir={str(data)!r}"] if data else [])]
    tune_process()
    config, run = _begin(recipe, changes, run_dir, resume)  # before what takes seconds to import

    from pibroch.train.data_source import open_dataset
    from pibroch.train.run import run_training

    dataset = open_dataset(config.data)
    if not run.exists():
        run.create(config)
    console.print(f"run directory: {run.path}", highlight=False, soft_wrap=True)
    result = run_training(config, dataset, run, lambda total_steps: _sink(run, total_steps, tensorboard))
    summary = result.summary
    best = "" if result.best_possible_auc is None else f"  best possible AUC {result.best_possible_auc:.4f}"
    results.print(
        f"test AUC {_number(summary.auc)}  logloss {_number(summary.logloss)}  NE {_number(summary.normalized_entropy)}"
        f"  {summary.samples_per_second:,.0f} samples/s{best}"
    )


def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run directory for its best one.")],
    data: Annotated[Path, typer.Option(help="An encoded dataset.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
) -> None:
    """Evaluate a checkpoint: AUC, log loss, normalised entropy, calibration."""
    tune_process()
    from pibroch.data import EncodedDataset
    from pibroch.train.run import evaluate_checkpoint

    metrics = evaluate_checkpoint(checkpoint, EncodedDataset.open(data), split)
    results.print(
        f"{split} AUC {_number(metrics.auc)}  logloss {_number(metrics.logloss)}"
        f"  NE {_number(metrics.normalized_entropy)}  calibration {_number(metrics.calibration)}"
        f"  {metrics.num_samples:,} samples"
    )


def _begin(
    recipe: str | None, changes: list[str], run_dir: Path | None, resume: bool
) -> tuple[RunConfig, RunDirectory]:
    """The configuration and the directory of a run that begins or goes on."""
    from pibroch.config import load_recipe
    from pibroch.config.recipes import change_config
    from pibroch.errors import ConfigError
    from pibroch.train.run_directory import RunDirectory

    if resume and run_dir is None:
        raise ConfigError("--resume without --run-dir", "the directory of the run to go on with", "add --run-dir DIR")
    name = recipe or DEFAULT_RECIPE
    run = RunDirectory(run_dir or Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    if resume and run.exists():
        config = change_config(run.config(), changes)
        if recipe is not None and load_recipe(recipe, changes) != config:
            raise ConfigError(
                f"recipe {recipe}, which differs from {run.path / 'config.toml'}",
                "the configuration that the run began with",
                "leave the recipe out, or start anew in another --run-dir",
            )
        return config, run
    return load_recipe(name, changes), run.must_be_new()


def _sink(run: RunDirectory, total_steps: int, tensorboard: bool) -> Sink:
    from pibroch.observability.progress import progress_sink
    from pibroch.observability.records import FanOut
    from pibroch.observability.sinks import TensorBoard as TensorBoardSink

    sinks: list[Sink] = [TensorBoardSink(run.path / "tensorboard")] if tensorboard else []
    return FanOut([*sinks, progress_sink(console, total_steps)])


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
