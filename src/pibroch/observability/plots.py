"""The plots of reports and plans, each an SVG text that needs nothing outside itself.

Points and bars say their values where a pointer rests on them, as titles of SVG do: no script.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

INK = "#1f2933"
GRID = "#e4e7eb"
MUTED = "#9aa5b1"
BLUE = "#2563eb"
ORANGE = "#ea7317"
GREEN = "#15803d"
_OF_RUNS = (BLUE, ORANGE, GREEN, "#9333ea", "#be123c", "#0891b2", "#a16207", INK)
_OF_DATA = ("-", "--", ":", "-.")
_STYLE: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "pibroch",
    "text.parse_math": False,  # names are as they are, with dollars and backslashes
}
_DOTS: Any = {"color": ORANGE, "marker": "o", "markersize": 4}
_GREATEST = 1e100  # beyond it matplotlib's axes overflow
MOST_POINTS = 200
"""Of a line that say their values; of a longer one every n-th does."""
_POINTS_PER_INCH = 72  # an SVG's units
_HOVERED = "<style>.values > *:hover {fill-opacity: 0.25}</style>"
Records = Sequence[dict[str, Any]]


def loss_plot(training: Records, evaluations: Records) -> str:
    """Training and validation log loss over steps."""
    figure, axes = new_axes("step", "log loss")
    steps, losses = _series(training, "loss")
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=0.9)
    axes.plot(steps, _smoothed(losses), color=BLUE, label="training, smoothed")
    axes.plot(*_series(evaluations, "logloss"), label="validation", **_DOTS)
    return to_svg(figure, axes)


def auc_plot(evaluations: Records, best_possible: float | None) -> str:
    """Validation AUC over steps, below the best possible one where that is known."""
    figure, axes = new_axes("step", "AUC")
    axes.plot(*_series(evaluations, "auc"), label="validation", **_DOTS)
    best = [record for record in evaluations if record["is_best"] and record["auc"] is not None]
    if best:
        ring: Any = {"color": GREEN, "markersize": 9, "fillstyle": "none", "label": "kept"}
        axes.plot(best[-1]["step"], best[-1]["auc"], "o", **ring)
    if best_possible is not None:
        label = f"best possible on test, {best_possible:.4f}"
        axes.axhline(best_possible, color=MUTED, linestyle="--", label=label)
    return to_svg(figure, axes)


def runs_plot(
    names: Sequence[str],
    series: Sequence[Sequence[tuple[int, float]]],
    data: Sequence[int],
    label: str,
    *,
    is_noisy: bool = False,
) -> str:
    """A figure of several runs over steps: a colour each, and a line style for each data set.

    Args:
        names: of the runs.
        series: steps and values of each; one without any is left out.
        data: the number of its data set, from 1 on.
        label: of the values.
        is_noisy: show running means.
    """
    figure, axes = new_axes("step", label)
    for index, (name, points, number) in enumerate(zip(names, series, data, strict=True)):
        if points:
            values = [value for _, value in points]
            axes.plot(
                [step for step, _ in points],
                _smoothed(values) if is_noisy else values,
                color=_OF_RUNS[index % len(_OF_RUNS)],
                linestyle=_OF_DATA[(number - 1) % len(_OF_DATA)],
                marker="" if is_noisy else "o",
                markersize=3.5,
                label=f" {name}",  # names that begin with _ would be hidden
            )
    return to_svg(figure, axes)


def trials_plot(
    points: Sequence[tuple[float, float]], x_label: str, label: str, *, is_log: bool = False
) -> str:
    """A figure of trials: a point each, ``(x, worth)``."""
    figure, axes = new_axes(x_label, label)
    axes.plot([x for x, _ in points], [y for _, y in points], "o", color=_OF_RUNS[0], markersize=4)
    if is_log:
        axes.set_xscale("log")
    return to_svg(figure, axes)


def windows_plot(windows: Records) -> str:
    """AUC and calibration of windows of event time, over minutes since the first."""
    figure, axes = new_axes("minutes of event time", "AUC")
    minutes = [(each["end_ms"] - windows[0]["begin_ms"]) / 60_000 for each in windows]
    other = axes.twinx()
    other.set_ylabel("calibration")
    other.spines[["top"]].set_visible(False)
    for place, name, color in ((axes, "auc", BLUE), (other, "calibration", ORANGE)):
        points = [(at, each[name]) for at, each in zip(minutes, windows, strict=True)]
        shown = [(at, value) for at, value in points if is_plotted(value)]
        place.plot([at for at, _ in shown], [value for _, value in shown], color=color)
        axes.plot([], [], color=color, label={"auc": "AUC"}.get(name, name))
    return to_svg(figure, axes)


def throughput_plot(training: Records) -> str:
    """Samples per second over steps."""
    figure, axes = new_axes("step", "thousand samples/s")
    steps, rates = _series(training[1:] if len(training) > 2 else training, "samples_per_second")
    axes.plot(steps, [rate / 1e3 for rate in rates], color=GREEN)
    axes.set_ylim(bottom=0)
    return to_svg(figure, axes)


def raw_ids_plot(training: Records) -> str:
    """Rows in use of all tables of raw ids, and ids that lost theirs a step, over steps."""
    figure, axes = new_axes("step", "rows used, per cent")
    records = [(each["step"], each["raw_ids"].values()) for each in training if each.get("raw_ids")]
    steps = [step for step, _ in records]
    fill = [
        100
        * sum(table["used"] for table in tables)
        / max(1, sum(table["capacity"] for table in tables))
        for _, tables in records
    ]
    axes.plot(steps, fill, color=BLUE, label="rows used")
    axes.set_ylim(0, 105)
    lost = axes.twinx()
    lost.set_ylabel("ids a step")
    lost.spines[["top"]].set_visible(False)
    for name, color in (("evictions", ORANGE), ("expiries", GREEN)):
        counts = [sum(table[name] for table in tables) for _, tables in records]
        if any(counts):
            a_step = np.array(counts) / np.diff(steps, prepend=0)
            lost.plot(steps, a_step, color=color, drawstyle="steps")
            axes.plot([], [], color=color, label=name)
    lost.set_ylim(bottom=0)
    return to_svg(figure, axes)


def roc_plot(curves: dict[str, list[float]], auc: float | None) -> str:
    """The ROC curve on the test split."""
    figure, axes = new_axes("false positive rate", "true positive rate")
    label = "test" if auc is None else f"test, AUC {auc:.4f}"
    rates = curves["false_positive_rate"], curves["true_positive_rate"]
    axes.fill_between(*rates, color=BLUE, alpha=0.08, linewidth=0)
    axes.plot(*rates, color=BLUE, label=label)
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", label="chance")
    return to_svg(figure, axes)


def calibration_plot(curves: dict[str, list[float]]) -> str:
    """Observed click rate against prediction, in bins of equally many test samples."""
    figure, axes = new_axes("predicted click rate", "observed click rate")
    predicted = curves["predicted"]
    observed = curves["observed"]
    limit = max([*predicted, *observed, 1e-3]) * 1.05
    axes.plot([0, limit], [0, limit], color=MUTED, linestyle="--", label="perfect")
    axes.plot(predicted, observed, label="test, equal bins", **_DOTS)
    return to_svg(figure, axes)


def access_skew_plot(skew: dict[str, list[float]]) -> str:
    """Share of accesses that the most accessed rows take."""
    figure, axes = new_axes("share of accessed rows, most accessed first", "share of accesses")
    axes.fill_between(skew["row_share"], skew["access_share"], color=BLUE, alpha=0.08, linewidth=0)
    axes.plot(skew["row_share"], skew["access_share"], color=BLUE)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    for share in (0.001, 0.01, 0.1):
        reached = [
            a for r, a in zip(skew["row_share"], skew["access_share"], strict=True) if r <= share
        ]
        if reached:
            note = f"{share:.1%} of rows: {reached[-1]:.0%}".replace(".0%", "%")
            place: Any = {"textcoords": "offset points", "ha": "right", "fontsize": 8.5}
            axes.annotate(note, (share, reached[-1]), (-6, 4), **place)
            axes.plot(share, reached[-1], "o", color=BLUE, markersize=4)
    return to_svg(figure, axes)


def map_plot(points: Sequence[Sequence[float]], names: Sequence[str], groups: Sequence[int]) -> str:
    """Named points of a plane, in the colours of their groups."""
    figure, axes = new_axes("", "")
    for group in sorted(set(groups)):
        members = [point for point, number in zip(points, groups, strict=True) if number == group]
        axes.scatter([x for x, _ in members], [y for _, y in members], s=28, label=f"tower {group}")
    for (x, y), name in zip(points, names, strict=True):
        place: Any = {"textcoords": "offset points", "fontsize": 7.5, "parse_math": False}
        axes.annotate(name, (x, y), (3, 3), **place)
    axes.set_aspect("equal")
    return to_svg(figure, axes)


def new_axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with one pair of axes in the reports' style."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def to_svg(figure: Figure, axes: Axes) -> str:
    """The figure as SVG text, with a legend if anything in it has a label."""
    text = io.StringIO()
    with rc_context(_STYLE):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8.5)
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
        )
    # metadata only link to vocabularies on the web
    svg = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    values = "".join(mark for each in figure.axes for mark in _values(figure, each))
    end = f'{_HOVERED}<g class="values" fill="{INK}" fill-opacity="0">{values}</g></svg>'
    return svg[svg.index("<svg") : svg.rindex("</svg>")] + end + "\n"


def _values(figure: Figure, axes: Axes) -> Iterator[str]:
    """Marks that nobody sees, with titles: over points of lines, and over bars."""
    height = figure.get_figheight() * _POINTS_PER_INCH

    def places(points: Any) -> Any:
        """Of points ``[N, 2]`` in the SVG, whose second axis goes down."""
        found = axes.transData.transform(points) * _POINTS_PER_INCH / figure.dpi
        return np.stack([found[:, 0], height - found[:, 1]], axis=1)

    for line in axes.get_lines():
        points = np.column_stack([np.asarray(line.get_xdata(), float), line.get_ydata()])
        points = points[np.isfinite(points).all(1)]
        if line.get_transform() is not axes.transData or not len(points):
            continue  # across the whole figure
        points = points[:: -(-len(points) // MOST_POINTS)]
        name = _name(str(line.get_label()), axes)
        for (x, y), (left, top) in zip(points, places(points), strict=True):
            title = escape(f"{name}: {y:.6g} at {axes.get_xlabel() or 'x'} {x:.6g}")
            yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{title}</title></circle>'
    for bars in axes.containers:
        for bar in bars if isinstance(bars, BarContainer) else ():
            (left, top), (right, bottom) = places(
                [
                    (bar.get_x(), bar.get_y() + bar.get_height()),
                    (bar.get_x() + bar.get_width(), bar.get_y()),
                ]
            )
            title = escape(f"{_name(str(bars.get_label()), axes)}: {bar.get_height():.6g}")
            yield (
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}"'
                f' height="{bottom - top:.1f}"><title>{title}</title></rect>'
            )


def _name(label: str, axes: Axes) -> str:
    """Of a line or bars, without the space that keeps a label from being hidden."""
    hides = not label or label.startswith("_")
    return axes.get_ylabel() if hides else label.strip()


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in records if is_plotted(record[name])]
    return [step for step, _ in points], [value for _, value in points]


def is_plotted(value: float | None) -> bool:
    """Whether a figure can be drawn: it is defined, and no axis overflows."""
    return value is not None and abs(value) < _GREATEST


def _smoothed(values: Sequence[float], share: float = 0.1) -> list[float]:
    """Running mean over a share of the series, centred."""
    half = max(1, int(len(values) * share / 2))
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def shard_bars(values: Sequence[float], limits: Sequence[float] | None = None) -> str:
    """Bytes of each shard, from 0, with their budget where there is one."""
    figure, axes = new_axes("shard", "bytes")
    places = np.arange(len(values))
    axes.bar(places, values, color=BLUE, width=0.7)
    if limits is not None and np.isfinite(limits).all():
        axes.hlines(
            limits, places - 0.42, places + 0.42, color=ORANGE, linestyle=":", label="budget"
        )
    axes.set_xticks(places if len(places) <= 16 else places[:: len(places) // 8])
    axes.set_ylim(0, max([*values, 1e-9]) * 1.18)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    return to_svg(figure, axes)


def heat_map(matrix: Sequence[Sequence[float]]) -> str:
    """What row i gets from column j; figures inside where there is room for them."""
    figure, axes = new_axes("from shard", "to shard")
    values = np.asarray(matrix, float)
    axes.grid(False)
    image = axes.imshow(
        values, cmap="Blues", vmin=0.0, vmax=max(float(values.max(initial=0.0)), 1e-9)
    )
    places = range(0, len(values), max(1, len(values) // 8))
    axes.set_xticks(places)
    axes.set_yticks(places)
    write = EngFormatter(places=1, sep="")
    if len(values) <= 8:
        dark = 0.6 * values.max(initial=0.0)
        for (i, j), value in np.ndenumerate(values):
            if i != j:
                colour = "white" if value > dark else "black"
                axes.text(j, i, write(value), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, format=EngFormatter())
    return to_svg(figure, axes)


def access_curve(curve: Sequence[tuple[float, float]], hot_share: float) -> str:
    """Share of accesses that the rows read most take, and up to where rows have copies."""
    figure, axes = new_axes("share of rows, most read first", "share of accesses")
    rows = [row for row, _ in curve]
    accesses = [share for _, share in curve]
    axes.plot(rows, accesses, color=BLUE)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    if hot_share > 0:
        covered = float(np.interp(hot_share, rows, accesses))
        axes.axvline(
            hot_share,
            color=ORANGE,
            linestyle="--",
            label=f"copied: {hot_share:.2%} of rows, {covered:.0%} of reads",
        )
        copied = [place <= hot_share for place in rows]
        axes.fill_between(rows, accesses, where=copied, color=ORANGE, alpha=0.15, linewidth=0)
    return to_svg(figure, axes)


def budget_curve(steps: Sequence[tuple[float, float, float]], chosen: float) -> str:
    """Mean and worst link by extra memory."""
    figure, axes = new_axes("extra memory, per cent of the tables", "cost of a link a step")
    extra = [100 * step[0] for step in steps]
    axes.plot(
        extra, [step[1] for step in steps], color=GREEN, marker="o", markersize=4, label="mean"
    )
    axes.plot(
        extra, [step[2] for step in steps], color=ORANGE, marker="o", markersize=4, label="worst"
    )
    axes.axvline(100 * chosen, color=MUTED, linestyle="--", label="this plan")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    return to_svg(figure, axes)
