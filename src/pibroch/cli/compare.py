"""``pibroch compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import escaped, results, say
from pibroch.overlap import refuse_overlap


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("comparison.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures and settings as JSON, not as tables.")
    ] = False,
) -> None:
    """Write one self-contained HTML page that sets runs side by side.

    Curves of loss and validation figures, final figures, the settings that differ, and what each
    was trained on. Runs that still go on are taken as they are. Where data differ, the page says so
    beside every figure. Final figures and settings that differ are printed, too.

    **Examples**

        pibroch compare runs/dlrm runs/dcnv2 --out both.html

        pibroch compare runs/* --json | jq '.runs[] | [.name, .validation]'
    """
    from pibroch.config.differences import settings
    from pibroch.errors import ConfigError
    from pibroch.observability.compare import (
        ComparedRun,
        figures_and_settings,
        plain_comparison,
        write_comparison,
    )
    from pibroch.observability.run_files import read_run

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
        ComparedRun(name, run, settings(run.settings))
        for name, run in zip(names, records, strict=True)
    ]
    wrote = f"wrote {write_comparison(out, runs)}"
    if as_json:
        typer.echo(json.dumps(plain_comparison(runs), indent=1))
        say(wrote)
        return
    for title, rows in figures_and_settings(runs):
        _print_table([[title, *(run.name for run in runs)], *rows])
    results.print(wrote, markup=False)


def _print_table(rows: list[list[str]]) -> None:
    """Columns side by side: names to the left, cells to the right."""
    rows = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        typer.echo("  ".join([first.ljust(widths[0]), *padded]))
    typer.echo()
