"""Bars on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pibroch.cli.console import console


@contextmanager
def stages() -> Iterator[Callable[[str, float], None]]:
    """A bar a stage: ``update(stage, fraction)``."""
    columns = TextColumn("{task.description:>14}"), BarColumn(), TaskProgressColumn()
    with _bars(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield update


@contextmanager
def counted(total: int, what: str, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over so many things, such as ``rows`` or ``bytes``: ``advance(count)``."""
    numbers = [DownloadColumn()] if what == "bytes" else [MofNCompleteColumn(), TextColumn(what)]
    with _bars(BarColumn(), *numbers, TimeRemainingColumn(), is_shown=is_shown) as bars:
        task = bars.add_task("", total=total)
        yield lambda count: bars.advance(task, count)


def _bars(*columns: ProgressColumn, is_shown: bool = True) -> Progress:
    is_shown = is_shown and console.is_terminal and not console.quiet
    return Progress(*columns, console=console, disable=not is_shown)
