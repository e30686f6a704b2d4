"""Plots in panels, one panel a setting.

Grouped bars: one group a value on the axis, one colour a contender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Row = dict[str, Any]

OURS = "pibroch"
OURS_COLOUR = "#c2410c"
PEER_COLOURS = ("#334155", "#64748b", "#94a3b8", "#0f766e", "#5eead4", "#a8a29e")
PANELS_PER_LINE = 4


class Plot(Protocol):
    """What draws a report's rows."""

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """Write the rows' plot to ``path`` as PNG."""


@dataclass(frozen=True, slots=True)
class PlotSpec:
    """Grouped bars: which columns to draw.

    Attributes:
        value: the bars' height; drawn only where the row has one.
        panel_by: columns whose values make a panel.
        group_by: column along the axis.
        bar_by: column that makes the bars of a group.
        label: of the value's axis.
        low, high: columns of the whiskers' ends, or ``None``.
        decimals: of the figure above a bar.
        ours: the bar in the accent colour.
        shared: whether panels beside each other have one scale.
    """

    value: str
    panel_by: tuple[str, ...]
    group_by: str
    bar_by: str
    label: str
    low: str | None = None
    high: str | None = None
    decimals: int = 0
    ours: str = OURS
    shared: bool = True

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """See :class:`Plot`."""
        rows = [row for row in rows if row.get(self.value) is not None]
        bars = list(dict.fromkeys(row[self.bar_by] for row in rows))
        colours = colours_of(bars, self.ours)
        frame = Frame(self.panel_by, self.label, self.shared)
        frame.draw(
            rows,
            colours,
            title,
            path,
            lambda axes, members: _draw_panel(axes, self, members, colours),
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """Panels, their headings and one legend; what is in a panel is drawn by somebody else.

    Attributes:
        panel_by: columns whose values make a panel.
        label: of the value's axis.
        shared: whether panels beside each other have one scale.
        legend_columns: at most.
    """

    panel_by: tuple[str, ...]
    label: str
    shared: bool = False
    legend_columns: int = 5

    def draw(
        self,
        rows: list[Row],
        colours: dict[str, str],
        title: str,
        path: Path,
        draw_panel: Callable[[Axes, list[Row]], None],
    ) -> None:
        """Write the plot to ``path`` as PNG."""
        panels: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            panels.setdefault(tuple(row[column] for column in self.panel_by), []).append(row)
        across = min(PANELS_PER_LINE, max(1, len(panels)))
        down = -(-max(1, len(panels)) // across)
        figure = Figure(figsize=(max(6.4, 4.4 * across), 3.4 * down + 1.1), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(down, across, squeeze=False, sharey="row" if self.shared else "none")
        for axes, (key, members) in zip(grid.flat, panels.items(), strict=False):
            draw_panel(axes, members)
            named = [f"{name} {value}" for name, value in zip(self.panel_by, key, strict=True)]
            heading = ", ".join(named) if len(key) > 1 else str(key[0])
            axes.set_title(heading, fontsize=9, loc="left", color="#475569")
            axes.tick_params(axis="both", length=0, labelsize=8)
            axes.grid(axis="y", color="#e2e8f0", linewidth=0.8, zorder=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(self.label, fontsize=9)
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
        figure.legend(
            handles,
            list(colours),
            loc="outside lower center",
            ncols=min(self.legend_columns, len(colours)),
            frameon=False,
            fontsize=9,
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(path, dpi=150, format="png")


def _draw_panel(axes: Axes, spec: PlotSpec, rows: list[Row], colours: dict[str, str]) -> None:
    groups = list(dict.fromkeys(row[spec.group_by] for row in rows))
    bars = [name for name in colours if any(row[spec.bar_by] == name for row in rows)]
    width = 0.84 / len(bars)
    for row in rows:
        position = (
            groups.index(row[spec.group_by])
            + (bars.index(row[spec.bar_by]) - (len(bars) - 1) / 2) * width
        )
        axes.bar(position, row[spec.value], width * 0.92, color=colours[row[spec.bar_by]], zorder=2)
        if spec.low and spec.high:
            axes.vlines(
                position, row[spec.low], row[spec.high], color="#0f172a", linewidth=0.8, zorder=3
            )
        top = max(row[spec.value], row[spec.high] if spec.high else 0.0)
        axes.annotate(
            f"{row[spec.value]:,.{spec.decimals}f}",
            (position, top),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=6.5,
            color="#334155",
            rotation=90 if len(bars) > 4 else 0,
        )
    names = [group if isinstance(group, str) else f"{spec.group_by} {group}" for group in groups]
    axes.set_xticks(np.arange(len(groups)), names, fontsize=9 if len(groups) < 5 else 7)
    axes.margins(y=0.14)


def colours_of(bars: list[str], ours: str) -> dict[str, str]:
    """Our bar in the accent colour, the peers' in quiet ones."""
    peers = iter(PEER_COLOURS * (len(bars) // len(PEER_COLOURS) + 1))
    return {bar: OURS_COLOUR if bar == ours else next(peers) for bar in bars}
