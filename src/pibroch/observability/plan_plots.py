"""The plots of a plan, each an SVG text that needs nothing outside itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import EngFormatter

from pibroch.observability.plots import BLUE, GREEN, MUTED, ORANGE, new_axes, to_svg


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
