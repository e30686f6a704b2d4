"""``pibroch bench``: run a benchmark topic of a checkout."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pibroch.cli.console import console, results, say
from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.storage import storage_errors

app = typer.Typer(
    invoke_without_command=True,
    context_settings={"allow_interspersed_args": True},
    subcommand_metavar="",
)

MARK = Path("benchmarks") / "registry.py"


@app.callback()
def bench(
    name: Annotated[str | None, typer.Argument(help="The topic; lists them when absent.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fewer settings and rounds: under a minute on two quiet cores."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="SECTION",
            help="Measure this section of the topic alone, keep the others' files; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Of CSV, table and plot: benchmarks/results/NAME, runs/bench/NAME if --quick."
        ),
    ] = None,
    committed: Annotated[
        bool,
        typer.Option(
            "--committed",
            help="With all: measure every topic that was not measured at this clean checkout.",
        ),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="TOPIC", help="With all: leave this topic out; repeatable."),
    ] = None,
) -> None:
    """Measure a topic beside its baselines.

    Correctness first, then the table, a CSV file and a plot.
    """
    checkout = find_checkout()
    registry = _load("benchmarks.registry", checkout)
    if name is None:
        _list(registry.topics().values())
        return
    if (name == "all") != committed or (skip and not committed):
        raise ConfigError(
            f"bench {name} {'with' if committed or skip else 'without'} --committed or --skip",
            "both of `all` and --committed, or a topic",
            "pibroch bench all --committed",
        )
    if committed:
        if quick or only or out is not None:
            raise ConfigError(
                "--committed with --quick, --only or --out", "whole results in their place"
            )
        failed = _load("benchmarks.committed", checkout).measure_all(skip or (), say)
        raise typer.Exit(1 if failed else 0)
    topic = registry.find_topic(name)
    sections = topic.chosen(only or (), quick)
    folder = out or checkout / ("runs/bench" if quick else "benchmarks/results") / name
    # before the measurement: minutes should not be lost to a folder that cannot be written
    with storage_errors(folder, "a folder that can be written", "give another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    written = _load("benchmarks.results", checkout)
    with tempfile.TemporaryDirectory(prefix="pibroch-bench-") as scratch, _progress(name) as show:
        options = registry.Options(quick=quick, scratch=Path(scratch), say=show)
        # written one by one: what is measured stays, whatever comes next
        for section in sections or ("",):
            report = topic.run(replace(options, section=section))
            _tell(written, report, written.write(report, folder / section))
            if section:
                written.join(folder, f"{topic.name}: {topic.summary}", topic.sections)


def _tell(written: Any, report: Any, paths: list[Path]) -> None:
    """The table on standard output, the rest beside it."""
    results.print(written.table(report), markup=False)
    for note in report.notes:
        say(f"- {note}")
    say(f"written: {', '.join(str(path) for path in paths)}")


def find_checkout() -> Path:
    """The checkout that holds ``benchmarks``.

    The one this package runs from, else the one around the working directory.

    Raises:
        MissingDependencyError: when there is none; benchmarks are no part of the installed package.
    """
    here = Path.cwd()
    for candidate in (Path(__file__).resolve().parents[3], here, *here.parents):
        if (candidate / MARK).is_file():
            return candidate
    raise MissingDependencyError(
        f"no {MARK} around {here}",
        "a checkout of pibroch: benchmarks are not part of the installed package",
        "clone the repository and run `pibroch bench` inside it",
    )


def _load(module: str, checkout: Path) -> Any:
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(module)


def _list(topics: Any) -> None:
    table = Table("topic", "measures", box=None, pad_edge=False)
    for topic in topics:
        table.add_row(topic.name, topic.summary)
        if topic.sections:
            table.add_row("", f"--only {', '.join(topic.sections)}")
    results.print(table)
    results.print(
        "run one with `pibroch bench NAME`, or `pibroch bench NAME --quick` for a first look; all"
        " with `pibroch bench all --committed`",
        markup=False,
    )


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(f"{name}: {text}", markup=False, highlight=False)
        return
    with console.status(name) as status:
        yield lambda text: status.update(f"{name}: {text}")
