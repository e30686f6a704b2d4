"""A topic's rows and what is written of them.

CSV, a Markdown table, a plot, and where the numbers come from.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plots import Plot

Row = dict[str, Any]
ORIGIN_HEADING = "## Where this comes from\n\n"


@dataclass(slots=True)
class Report:
    """What a topic hands back.

    Attributes:
        topic: its name; also the name of its folder.
        title: one line.
        rows: flat records with the same columns; the CSV holds them as they are.
        columns: the ones that the Markdown table shows.
        plot: how to draw the rows.
        notes: lines that belong under the table: what was checked, what was left out, how noisy it
            was.
        origin: where the numbers come from, see ``provenance`` and the contenders' versions.
    """

    topic: str
    title: str
    rows: list[Row]
    columns: list[str]
    plot: Plot
    notes: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``measurements.csv``, ``table.md``, ``plot.png`` and ``origin.json``.

    Each replaces its predecessor whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], None]] = {
        "measurements.csv": lambda path: _write_csv(report.rows, path),
        "table.md": lambda path: _write_text(path, markdown(report)),
        "plot.png": lambda path: report.plot.draw(report.rows, report.title, path),
        "origin.json": lambda path: _write_text(path, json.dumps(report.origin, indent=2) + "\n"),
    }
    for name, writer in writers.items():
        temporary = folder / f".{name}"
        writer(temporary)
        os.replace(temporary, folder / name)
    return [folder / name for name in writers]


def join(folder: Path, title: str, sections: Sequence[str]) -> Path:
    """Write ``table.md`` of a topic with sections."""
    temporary = folder / ".table.md"
    _write_text(temporary, joined(folder, title, sections))
    return temporary.replace(folder / "table.md")


def joined(folder: Path, title: str, sections: Sequence[str]) -> str:
    """The page of a topic with sections: the pages that are in ``folder``, with their plots."""
    pages = [f"# {title}"]
    for section in sections:
        page = folder / section / "table.md"
        if page.is_file():
            heading, _, rest = page.read_text("utf-8").strip().partition("\n")
            lines = [f"#{line}" if line.startswith("#") else line for line in rest.splitlines()]
            pages.append(
                "\n".join([f"#{heading}", "", f"![{section}]({section}/plot.png)", *lines])
            )
    return "\n\n".join(pages) + "\n"


def rebuilt(folder: Path) -> str:
    """The page of a section as its ``measurements.csv`` and ``origin.json`` give it.

    Its title, columns and notes are those of the ``table.md`` that is there.
    """
    page = (folder / "table.md").read_text("utf-8")
    body, heading, _ = page.partition(ORIGIN_HEADING)
    lines = body.splitlines()
    in_table = [number for number, line in enumerate(lines) if line.startswith("|")]
    begin, end = in_table[0] + 2, in_table[-1] + 1  # below the names and how they are aligned
    columns = lines[begin - 2].removeprefix("| ").removesuffix(" |").split(" | ")
    rows = read_measurements(folder / "measurements.csv")
    lines[begin:end] = [_line([_cell(column, row[column]) for column in columns]) for row in rows]
    origin = json.loads((folder / "origin.json").read_text("utf-8"))
    return "\n".join(lines) + f"\n{heading}{_listed(origin)}\n"


def read_measurements(path: Path) -> list[Row]:
    """The rows of a ``measurements.csv``: numbers where they are numbers, ``None`` where empty."""
    with path.open(newline="") as file:
        return [
            {column: _parsed(text) for column, text in row.items()} for row in csv.DictReader(file)
        ]


def _parsed(text: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def markdown(report: Report) -> str:
    """The report as a page."""
    notes = "\n".join(f"- {note}" for note in report.notes)
    origin = f"{ORIGIN_HEADING}{_listed(report.origin)}"
    return f"# {report.title}\n\n{table(report)}\n\n{notes}\n\n{origin}\n"


def _listed(origin: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {_code(name, value)}" for name, value in origin.items())


def table(report: Report) -> str:
    """The report's columns as a Markdown table.

    >>> from benchmarks.plots import PlotSpec
    >>> rows, plot = [{"name": "a", "p50_ms": 1.26}], PlotSpec("", (), "", "", "")
    >>> report = Report("t", "T", rows, ["name", "p50_ms"], plot)
    >>> print(table(report))
    | name | p50_ms |
    |---|--:|
    | a | 1.3 |
    """
    rows = report.rows
    columns = report.columns
    numeric = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    lines = [_line(columns), "|" + "|".join("--:" if number else "---" for number in numeric) + "|"]
    lines += [_line([_cell(column, row.get(column)) for column in columns]) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(column: str, value: Any) -> str:
    if value is None or value == "":
        return "–"  # noqa: RUF001
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    return (
        f"{value:,.0f}"
        if "per_second" in column or column.endswith("_mb")
        else _short(column, value)
    )


def _short(column: str, value: float) -> str:
    decimals = (
        1 if column.endswith("_ms") else 6 if "loss" in column or column.startswith("p_") else 2
    )
    if column.startswith("auc") or column in ("std", "of_parent"):
        decimals = 4
    return f"{value:.{decimals}f}"


def _code(name: str, value: str) -> str:
    return f"`{value}`" if name in ("command", "commit") else value


def _write_csv(rows: list[Row], path: Path) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
