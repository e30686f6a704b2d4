"""A topic's rows and what is written of them: CSV, a Markdown table, a plot, and where the numbers come from."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plots import PlotSpec, draw

Row = dict[str, Any]


@dataclass(slots=True)
class Report:
    """What a topic hands back.

    Attributes:
        topic: its name; also the name of its folder.
        title: one line.
        rows: flat records with the same columns; the CSV holds them as they are.
        columns: the ones that the Markdown table shows.
        plot: how to draw the rows.
        notes: lines that belong under the table: what was checked, what was left out, how noisy it was.
        origin: where the numbers come from, see ``provenance`` and the contenders' versions.
        table_by: column by whose value the rows are told apart, a Markdown table each; one table when absent.
    """

    topic: str
    title: str
    rows: list[Row]
    columns: list[str]
    plot: PlotSpec
    notes: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    table_by: str | None = None


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``measurements.csv``, ``table.md``, ``plot.png`` and ``origin.json``; each replaces its predecessor whole."""
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], None]] = {
        "measurements.csv": lambda path: _write_csv(report.rows, path),
        "table.md": lambda path: _write_text(path, markdown(report)),
        "plot.png": lambda path: draw(report.plot, report.rows, report.title, path),
        "origin.json": lambda path: _write_text(path, json.dumps(report.origin, indent=2) + "\n"),
    }
    for name, writer in writers.items():
        temporary = folder / f".{name}"
        writer(temporary)
        os.replace(temporary, folder / name)
    return [folder / name for name in writers]


def markdown(report: Report) -> str:
    """The report as a page."""
    origin = "\n".join(f"- {name}: {_code(name, value)}" for name, value in report.origin.items())
    notes = "\n".join(f"- {note}" for note in report.notes)
    return f"# {report.title}\n\n{table(report)}\n\n{notes}\n\n## Where this comes from\n\n{origin}\n"


def table(report: Report) -> str:
    """The report's columns as a Markdown table, or as one under a heading for each value of ``table_by``.

    Of several tables each shows the columns that have a value in it.

    >>> report = Report("t", "T", [{"name": "a", "p50_ms": 1.26}], ["name", "p50_ms"], PlotSpec("", (), "", "", ""))
    >>> print(table(report))
    | name | p50_ms |
    |---|--:|
    | a | 1.3 |
    """
    if report.table_by is None:
        return _table(report.rows, report.columns)
    parts = []
    for value in dict.fromkeys(row[report.table_by] for row in report.rows):
        rows = [row for row in report.rows if row[report.table_by] == value]
        shown = [column for column in report.columns if any(row.get(column) is not None for row in rows)]
        parts.append(f"## {value}\n\n{_table(rows, [column for column in shown if column != report.table_by])}")
    return "\n\n".join(parts)


def _table(rows: list[Row], columns: list[str]) -> str:
    numeric = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    lines = [_line(columns), "|" + "|".join("--:" if number else "---" for number in numeric) + "|"]
    lines += [_line([_cell(column, row.get(column)) for column in columns]) for row in rows]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    return f"{value:,.0f}" if "per_second" in column or column.endswith("_mb") else _short(column, value)


def _short(column: str, value: float) -> str:
    return f"{value:.1f}" if column.endswith("_ms") else f"{value:.2f}"


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
