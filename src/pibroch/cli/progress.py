"""A bar a stage on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from pibroch.cli.console import console


@contextmanager
def stages() -> Iterator[Callable[[str, float], None]]:
    """``update(stage, fraction)``."""
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=fraction)

        yield update
