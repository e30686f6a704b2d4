"""Where a step's time goes: the parts that workers record, as rows and as stacked bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.hosts import IDEAL
from benchmarks.plots import Frame, Row
from benchmarks.runner import Times

DENSE = "dense layers"
DENSE_WAIT = "waiting for sums of dense gradients"
LOOKUP = "lookup"
ROWS_WAIT = "waiting for rows"
UPDATE = "gradients and updates of rows"
GRADIENTS_WAIT = "waiting for gradients of rows"
IDS = "ids of later batches"
REST = "rest"
COLOURS = {
    DENSE: "#334155",
    DENSE_WAIT: "#94a3b8",
    LOOKUP: "#c2410c",
    ROWS_WAIT: "#fdba74",
    UPDATE: "#0f766e",
    GRADIENTS_WAIT: "#5eead4",
    IDS: "#a16207",
    REST: "#d6d3d1",
}
LAST = {
    "forward": DENSE,
    "backward": DENSE,
    "dense optimizer": DENSE,
    "lookup": LOOKUP,
    "update": UPDATE,
    "wait gradients": GRADIENTS_WAIT,
    "read": IDS,
    "ids": IDS,
}


def part_of(path: str) -> str:
    """What a part of :mod:`benchmarks.workers.parts` counts as.

    >>> part_of("forward/lookup/wait"), part_of("backward/wait"), part_of("backward/update")
    ('waiting for rows', 'waiting for sums of dense gradients', 'gradients and updates of rows')
    """
    names = path.split("/")
    if names[-1] == "wait":
        return DENSE_WAIT if names[0] == "backward" else ROWS_WAIT
    return LAST[names[-1]]


def parts_ms(times: Times) -> dict[str, np.ndarray]:
    """Milliseconds ``[steps]`` of each part and of the rest; they sum to the steps' times."""
    steps_ms = np.concatenate(times.rounds_ms)
    results = {name: np.zeros_like(steps_ms) for name in COLOURS}
    for path, values in times.figures.items():
        if path != "loss":
            results[part_of(path)] += values
    results[REST] = steps_ms - sum(results.values())
    return results


def breakdown_rows(row: Row, times: Times) -> list[Row]:
    """A row for each part of a contender's steps; ``row`` is what the rows have in common."""
    whole_ms = float(np.concatenate(times.rounds_ms).mean())
    rows = []
    for part, values in parts_ms(times).items():
        if not values.any():
            continue
        p20_ms, p50_ms, p80_ms = (float(np.percentile(values, percent)) for percent in (20, 50, 80))
        mean_ms = float(values.mean())
        rows.append(
            row
            | {
                "part": part,
                "p20_ms": p20_ms,
                "p50_ms": p50_ms,
                "p80_ms": p80_ms,
                "mean_ms": mean_ms,
            }
            | {"share": mean_ms / whole_ms, "height": mean_ms}
        )
    return rows


def beyond_ideal(rows: list[Row]) -> list[str]:
    """One line a panel: the share of its mean step that each contender takes beyond the ideal.

    Where the ideal was measured.
    """
    lines = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        step_ms: dict[str, float] = {}
        for row in rows:
            if row["panel"] == panel:
                step_ms[row["contender"]] = step_ms.get(row["contender"], 0.0) + row["mean_ms"]
        ideal_ms = step_ms.pop(IDEAL, None)
        if ideal_ms is not None:
            shares = ", ".join(
                f"{1 - ideal_ms / ms:.0%} ({contender})" for contender, ms in step_ms.items()
            )
            lines.append(f"**{panel}: share of a step beyond the ideal's: {shares}**")
    return lines


@dataclass(frozen=True, slots=True)
class StackedPlot:
    """A bar a contender, its parts on top of each other.

    Means, so that a bar is as high as the mean step.
    """

    label: str = "ms a step"

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """See :class:`benchmarks.plots.Plot`."""
        Frame(("panel",), self.label, legend_columns=2).draw(
            rows, COLOURS, title, path, self._draw_panel
        )

    def _draw_panel(self, axes: Axes, rows: list[Row]) -> None:
        contenders = list(dict.fromkeys(row["contender"] for row in rows))
        tops = dict.fromkeys(contenders, 0.0)
        for row in rows:
            contender = row["contender"]
            axes.bar(
                contenders.index(contender),
                row["height"],
                0.62,
                bottom=tops[contender],
                color=COLOURS[row["part"]],
                zorder=2,
            )
            tops[contender] += row["height"]
        for place, contender in enumerate(contenders):
            axes.annotate(
                f"{tops[contender]:,.0f}",
                (place, tops[contender]),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
        axes.set_xticks(np.arange(len(contenders)), contenders, fontsize=7)
        axes.margins(y=0.1)
