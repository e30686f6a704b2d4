"""Figures in pages, from the committed measurements.

A figure has a name behind it, in a comment that no reader sees. A comment at the end of the page
says where it comes from::

    A step takes 98<!--step--> ms, .94<!--gain--> of `alltoall`'s time.

    <!-- figures
    from lookahead/step_time p50_ms ids=zipf dim=16 rate=1gbit
    step contender=lookahead
    gain contender=lookahead / contender=alltoall
    -->

``from`` names a folder of ``benchmarks/results`` and what holds for the lines below it. A line's
words:

- ``column=value`` selects rows, and so do ``column=a|b``, ``column>=1``, ``"column=two words"``
- ``min``, ``max``, ``mean``, ``median``, ``sum``, ``num_rows``: of all rows that are selected; else
  it must be one
- ``/`` divides by the same cells with the words behind it in place of those before
- ``*100`` scales, ``abs`` leaves signs out
- any other word is the column to read

A figure keeps its form: decimals, leading zero, commas, plus.

``python -m benchmarks.figures`` names the figures that differ from their file, and the ``table.md``
that differ from their measurements. With ``--fill`` it writes them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from benchmarks.provenance import CHECKOUT
from benchmarks.registry import topics
from benchmarks.results import Row, joined, read_measurements, rebuilt
from pibroch.errors import ConfigError

RESULTS = CHECKOUT / "benchmarks" / "results"
FIGURE = re.compile(
    r"(?P<text>(?<![\w.,])(?=[-+.]*\d)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)"
    r"(?P<close>[*`]*)<!--(?P<name>[\w.-]+)-->"
)
SOURCES = re.compile(r"^<!-- figures\n(.*?)^-->", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
WITH_COMMAS_FROM = 10_000
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": sum,
    "num_rows": len,
}


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one column of a result.

    Attributes:
        folder: of ``benchmarks/results``.
        column: to read.
        selected: column to value, or values with ``|`` between them; a column that ends with ``>``
            or ``<`` to the least or largest value.
        aggregate: a name of :data:`AGGREGATES`; there must be one row where it is empty.
        scale: what the value is multiplied by.
        is_absolute: values count without their sign.
    """

    folder: str
    column: str = ""
    selected: dict[str, str] = field(default_factory=dict)
    aggregate: str = ""
    scale: float = 1.0
    is_absolute: bool = False

    def narrowed(self, words: Sequence[str]) -> Cells:
        """The same cells but for what the words say."""
        cells = self
        for word in words:
            column, equals, value = word.partition("=")
            if equals:
                cells = replace(cells, selected={**cells.selected, column: value})
            elif word in AGGREGATES:
                cells = replace(cells, aggregate=word)
            elif word == "abs":
                cells = replace(cells, is_absolute=True)
            elif word.startswith("*"):
                cells = replace(cells, scale=float(word[1:]))
            else:
                cells = replace(cells, column=word)
        return cells

    def value(self) -> float:
        """What the file says.

        Raises:
            ConfigError: for a file, column or row that is not there, and for several rows.
        """
        rows = measurements(self.folder)
        columns = [column.rstrip("<>") for column in self.selected]
        for column in (*columns, *([self.column] if self.aggregate != "num_rows" else [])):
            if column not in rows[0]:
                raise ConfigError(
                    f"column {column!r} of {self.folder}", f"one of {', '.join(rows[0])}"
                )
        rows = [row for row in rows if self._selects(row)]
        if self.aggregate == "num_rows":
            return len(rows)
        values = [row[self.column] for row in rows if row[self.column] is not None]
        if not values or (len(values) > 1 and not self.aggregate):
            raise ConfigError(
                f"{len(values)} values of {self.column} of {self.folder} where {self.selected}",
                "one, or several and an aggregate",
            )
        if self.is_absolute:
            values = [abs(value) for value in values]
        return self.scale * AGGREGATES[self.aggregate or "max"](values)

    def _selects(self, row: Row) -> bool:
        return all(_has(row, column, value) for column, value in self.selected.items())


def _has(row: Row, column: str, wanted: str) -> bool:
    cell = row[column.rstrip("<>")]
    if not isinstance(cell, int | float):
        return (cell or "") in wanted.split("|")
    if column.endswith(">"):
        return cell >= float(wanted)
    if column.endswith("<"):
        return cell <= float(wanted)
    return any(_is_number(each, cell) for each in wanted.split("|"))


def _is_number(text: str, number: float) -> bool:
    try:
        return float(text) == number
    except ValueError:
        return False


@cache
def measurements(folder: str) -> list[Row]:
    """The rows of a result.

    Raises:
        ConfigError: when it has none.
    """
    path = RESULTS / folder / "measurements.csv"
    if not path.is_file():
        raise ConfigError(f"no {path.relative_to(CHECKOUT)}", "the folder of a committed result")
    return read_measurements(path)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from.

    Attributes:
        text: its line.
        cells: its value.
        divisor: what they are divided by.
    """

    text: str
    cells: Cells
    divisor: Cells | None = None

    def value(self) -> float:
        """See :meth:`Cells.value`."""
        return self.cells.value() / (self.divisor.value() if self.divisor else 1.0)


def sources_of(page: str) -> dict[str, Source]:
    """The sources of a page by the names of their figures.

    Raises:
        ConfigError: for a line that comes before any ``from``, and for two of one name.
    """
    sources: dict[str, Source] = {}
    shared: Cells | None = None
    for block in SOURCES.findall(page):
        for line in filter(None, block.splitlines()):
            name, *words = shlex.split(line)
            if name == "from":
                shared = Cells(words[0]).narrowed(words[1:])
                continue
            if shared is None or name in sources:
                problem = "before any `from`" if shared is None else f"a second {name!r}"
                raise ConfigError(f"{problem}: {line}", "`from FOLDER`, then a line a figure")
            cut = words.index("/") if "/" in words else len(words)
            cells = shared.narrowed(words[:cut])
            divisor = replace(cells, scale=1.0).narrowed(words[cut + 1 :]) if words[cut:] else None
            sources[name] = Source(f"{shared.folder}: {line}", cells, divisor)
    return sources


def written_like(text: str, value: float) -> str:
    """A value in the form of the figure that is there.

    >>> written_like(".98", 1.2345), written_like("+.5", 0.26), written_like("1,367", 999.6)
    ('1.23', '+.3', '1,000')
    """
    decimals = len(text.partition(".")[2])
    commas = "," if "," in text or abs(value) >= WITH_COMMAS_FROM else ""
    sign = "+" if text.startswith("+") else ""
    new = f"{value:{sign}{commas}.{decimals}f}"
    has_no_zero = text.lstrip("+-").startswith(".")
    return re.sub(r"^([+-]?)0\.", r"\1.", new) if has_no_zero else new


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that is not what its file says."""

    line: int
    name: str
    text: str
    need: str
    source: str

    def __str__(self) -> str:
        return (
            f"line {self.line}: got {self.text} for {self.name}, need {self.need} ({self.source})"
        )


def filled(page: str) -> tuple[str, list[Difference]]:
    """A page with the figures of their files, and what was different.

    Raises:
        ConfigError: for a figure without a source, and a source without a figure.
    """
    sources = sources_of(page)
    named = {match["name"] for match in FIGURE.finditer(page)}
    if named != sources.keys():
        raise ConfigError(
            f"figures {sorted(named - sources.keys())} without a source, sources"
            f" {sorted(sources.keys() - named)} without a figure",
            "a line in `<!-- figures` for each name in the text, and the other way round",
        )
    differences = []

    def fill(match: re.Match[str]) -> str:
        source = sources[match["name"]]
        text = match["text"]
        need = written_like(text, source.value())
        if text != need:
            line = 1 + page.count("\n", 0, match.start())
            differences.append(Difference(line, match["name"], text, need, source.text))
        return f"{need}{match['close']}<!--{match['name']}-->"

    return FIGURE.sub(fill, page), differences


def pages() -> list[Path]:
    """README and all pages below ``docs``."""
    built = CHECKOUT / "docs" / "_build"
    guides = [path for path in (CHECKOUT / "docs").rglob("*.md") if built not in path.parents]
    return [CHECKOUT / "README.md", *sorted(guides)]


def tables() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Each ``table.md`` of the results, and what gives it from its measurements.

    In the order in which they have to be written: a topic's follows its sections'.
    """
    for name, topic in topics().items():
        folder = RESULTS / name
        for section in topic.sections or ("",):
            if (folder / section / "measurements.csv").is_file():
                yield folder / section / "table.md", partial(rebuilt, folder / section)
        if topic.sections and folder.is_dir():
            title = f"{name}: {topic.summary}"
            yield folder / "table.md", partial(joined, folder, title, topic.sections)


def check(fill: bool) -> list[str]:
    """Compare all tables and pages with the measurements, or write them.

    Returns:
        What differs, or differed.
    """
    problems = []
    for path, rebuild in tables():
        text = rebuild()
        if text != path.read_text("utf-8"):
            problems.append(f"{path.relative_to(CHECKOUT)}: not what its measurements give")
            if fill:
                path.write_text(text, "utf-8")
    for path in pages():
        text = path.read_text("utf-8")
        try:
            new, differences = filled(text)
        except ConfigError as error:
            problems.append(f"{path.relative_to(CHECKOUT)}: {error}")
            continue
        problems += [f"{path.relative_to(CHECKOUT)}, {each}" for each in differences]
        if fill and differences:
            path.write_text(new, "utf-8")
    return problems


def main() -> None:
    """Say what differs; exit with 1 unless it was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fill", action="store_true", help="write what the measurements give")
    fill = parser.parse_args().fill
    problems = check(fill)
    for problem in problems:
        print(problem)
    sys.exit(1 if problems and not fill else 0)


if __name__ == "__main__":
    main()
