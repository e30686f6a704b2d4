"""``pibroch publish``: look at what a run publishes, and have servers go back to an earlier one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pibroch.cli.console import results
from pibroch.errors import CheckpointError, ConfigError
from pibroch.observability.records import shown_time
from pibroch.state.delta_format import DeltaManifest, is_delta, is_exported, read_delta
from pibroch.state.event_time import age_of, event_time_of
from pibroch.state.export_format import ExportManifest, read_export
from pibroch.state.versions import (
    chosen_version,
    go_forward,
    numbered,
    roll_back,
    rolled_back_to,
)

app = typer.Typer(
    help="Versions that a run publishes: list them, have servers go back to an earlier one.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder of numbered versions, as servers follow it.")
]


@app.command("list")
def list_command(folder: Folder) -> None:
    """Show the versions in a folder: what each is, how old, and which one servers take."""
    chosen = chosen_version(_of_versions(folder))
    table = Table("number", "version", "kind", "step", "trained until", "age", "served")
    for number in numbered(folder):
        path = folder / str(number)
        if is_exported(path):
            table.add_row(str(number), *_described(path), "yes" if path == chosen else "")
    Console().print(table)
    pinned = rolled_back_to(folder)
    if pinned is not None:
        results.print(f"rolled back: servers stay at version {pinned}", highlight=False)


@app.command("rollback")
def rollback_command(
    folder: Folder,
    to: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The number that servers go back to.")
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Have servers take the newest version again.")
    ] = False,
) -> None:
    """Have the servers that follow a folder go back to an earlier version, and stay there.

    Training may go on, and goes on publishing. What the version stands on is kept meanwhile.

    **Examples**

        pibroch publish rollback models --to 7

        pibroch publish rollback models --newest
    """
    if (to is None) == (not newest):
        raise ConfigError(
            "neither --to nor --newest" if to is None else "--to with --newest",
            "one of them",
            "pass --to N to go back, --newest to take the newest version again",
        )
    before = chosen_version(_of_versions(folder)) if to is not None else None
    if to is None:
        go_forward(_of_versions(folder))
        chosen = chosen_version(folder)
        assert chosen is not None, "it has versions"
        results.print(f"servers of {folder} take the newest version: {chosen.name}")
        return
    roll_back(folder, to)
    was = "" if before is None or before.name == str(to) else f", after {before.name}"
    results.print(
        f"servers of {folder} stay at version {to}{was}; `pibroch publish rollback {folder}"
        " --newest` ends it",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _of_versions(folder: Path) -> Path:
    if not any(is_exported(folder / str(number)) for number in numbered(folder)):
        raise CheckpointError(
            f"{folder}, which has no numbered versions",
            "a folder that a run with `train.publish_to` writes to",
            "check the path",
        )
    return folder


def _described(path: Path) -> tuple[str, str, str, str, str]:
    """Version, kind, step, event time and age of a folder."""
    manifest: DeltaManifest | ExportManifest
    if is_delta(path):
        manifest, _ = read_delta(path)
        kind = f"delta, {manifest.num_rows:,} rows"
    else:
        manifest = read_export(path)
        kind = "whole"
    event_time = event_time_of(path)
    if event_time is None:
        return manifest.version, kind, f"{manifest.step:,}", "", ""
    age = f"{age_of(event_time, time.time()):,.0f} s"
    return manifest.version, kind, f"{manifest.step:,}", shown_time(event_time), age
