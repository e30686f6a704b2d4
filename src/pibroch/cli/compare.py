"""``pibroch compare``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.overlap import refuse_overlap


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write one self-contained HTML page that sets runs side by side.

    Curves of loss and validation figures, final figures, the settings that differ, and what each
    was trained on. Runs that still go on are taken as they are. Where data differ, the page says so
    beside every figure.
    """
    from pibroch.config.differences import settings
    from pibroch.errors import ConfigError
    from pibroch.observability.compare import ComparedRun, write_comparison
    from pibroch.observability.report import read_run

    if len({folder.resolve() for folder in run_dirs}) < max(2, len(run_dirs)):
        raise ConfigError(
            f"runs {', '.join(map(str, run_dirs))}",
            "two or more, each named once",
            "name another, or see one with pibroch report",
        )
    records = [read_run(folder) for folder in run_dirs]
    refuse_overlap(out, run_dirs)
    names = [run.name for run in records]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in run_dirs]
    runs = [
        ComparedRun(name, run, settings(tomllib.loads(run.config)))
        for name, run in zip(names, records, strict=True)
    ]
    results.print(f"wrote {write_comparison(out, runs)}", markup=False)
