"""A run of a second: generated data, a tiny model, and the command line as its own process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked import Program
from pibroch.config import RunConfig
from pibroch.config.recipes import change_config, check_config
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.observability.records import FanOut
from pibroch.train.data_source import open_dataset
from pibroch.train.run import RunResult, run_training
from pibroch.train.run_directory import RunDirectory

BASE = {
    "seed": 3,
    "model": {
        "name": "dlrm",
        "dim": 4,
        "bottom": [8],
        "top": [16],
        "dropout": 0.2,
        "batch_norm": True,
    },
    "embedding": {"optimizer": {"name": "adam", "lr": 0.01}},
    "optimizer": {"name": "adam", "lr": 0.01},
    "train": {
        "epochs": 2,
        "batch_size": 100,
        "evaluate_every": 10,
        "checkpoint_every": 7,
        "log_every": 1,
        "threads": 1,
    },
}


def make_dataset(folder: Path, *, num_samples: int = 3000, max_table_rows: int = 40) -> Path:
    """Generate 26 small tables; 70 % of the samples train, the rest validate and test."""
    synthesize(SyntheticOptions(num_samples=num_samples, max_table_rows=max_table_rows), folder)
    return folder


def make_config(data: Path, *overrides: str) -> RunConfig:
    """The configuration of a small run."""
    return change_config(
        check_config(BASE | {"data": {"dir": str(data)}}, "the test's base"), overrides
    )


def train_here(config: RunConfig, folder: Path) -> tuple[RunDirectory, RunResult]:
    """Train in this process; goes on when there is a checkpoint."""
    run = RunDirectory(folder)
    if not run.exists():
        run.create(config)
    return run, run_training(config, open_dataset(config.data), run, lambda total_steps: FanOut([]))


def start_command(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> Program:
    """Start pibroch as its own process, forked from one that has loaded torch."""
    variables = {**os.environ, "COLUMNS": "200", **(env or {})}
    return Program("-m", "pibroch.cli.main", *arguments, env=variables, cwd=cwd)


def run_command(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pibroch as its own process to the end, within two minutes."""
    with start_command(*arguments, env=env, cwd=cwd) as program:
        return program.end()


def command(*arguments: object) -> list[str]:
    """The command line that runs what was installed."""
    return [str(Path(sys.executable).with_name("pibroch")), *map(str, arguments)]


def run_installed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``run_command``, without any short cut.

    The installed command, which loads everything itself.
    """
    variables = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, env=variables, **options
    )


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents of all files by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
