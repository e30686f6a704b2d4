"""Section ``papers``: every figure that is compared, in one table."""

from __future__ import annotations

from benchmarks.papers import bagpipe, bls, dmt, oper
from benchmarks.papers.points import Point
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options
from benchmarks.results import Report

SECTION = "papers"
COLUMNS = ["number", "paper", "figure", "setting", "what", "in_paper", "predicted", "difference"]
PLOT = PlotSpec("difference", ("paper",), "number", "paper", "predicted over the paper's, less 1")
NEAR = 0.15
MEANINGS = (
    "`in_paper`: what the paper's text says; no number where its figure alone has one",
    "`difference`: predicted over the paper's, less 1",
    (
        "DMT and BagPipe: steps by files of data sheets and the papers' links; OPER: bytes of"
        " plans; BLS: the recursion of waiting on drawn delays; why numbers differ: design note"
        " 0040"
    ),
)


def run(options: Options) -> Report:
    """Predict all of them; needs no root and no lab."""
    points: list[Point] = [*bls.points(), *dmt.points(options)]
    points += [*bagpipe.points(options), *oper.points(options)]
    rows = [{"number": number, **point.row()} for number, point in enumerate(points, 1)]
    compared = [row["difference"] for row in rows if row["difference"] is not None]
    near = sum(abs(difference) <= NEAR for difference in compared)
    headline = f"**{near} of {len(compared)} numbers of the papers within {NEAR:.0%}**"
    notes = [headline, *MEANINGS]
    title = "Figures of the papers, predicted for their hardware"
    return Report("simulate", title, rows, COLUMNS, PLOT, notes, provenance())
