"""Losses of two exchanges that take the same steps from the same weights.

Equal to the bit, or there is no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.contender import BenchmarkError
from benchmarks.plots import OURS_COLOUR, PEER_COLOURS, Frame, Row
from benchmarks.team import Team

STEPS_PER_TURN = 10
Curve = tuple[list[float], list[float]]
"""Loss of the global batch, and milliseconds, step by step."""


def train_in_turns(running: list[Team], turns: int, say: Callable[[str], None]) -> dict[str, Curve]:
    """Let teams train in turns of ten steps; they tell losses, see ``Case.reports_parts``."""
    curves: dict[str, Curve] = {team.spec.label: ([], []) for team in running}
    for turn in range(turns):
        say(f"loss: steps {turn * STEPS_PER_TURN + 1} to {(turn + 1) * STEPS_PER_TURN}")
        for team in running:
            timing = team.run("step", turn * STEPS_PER_TURN, STEPS_PER_TURN)
            losses, times_ms = curves[team.spec.label]
            losses += timing.figures["loss"]
            times_ms += timing.step_ms
    return curves


def check_equal(curves: dict[str, Curve]) -> None:
    """Nothing is reported of losses that differ.

    Raises:
        BenchmarkError: names the first step whose loss is not the same on all.
    """
    (first, (expected, _)), *others = curves.items()
    for label, (losses, _) in others:
        for step, (loss, right) in enumerate(zip(losses, expected, strict=True), 1):
            if loss != right:
                raise BenchmarkError(
                    f"loss {loss!r} from {label} but {right!r} from {first} in step {step}",
                    "equal bits",
                    "nothing is reported until the exchanges give the same numbers;"
                    " run the conformance suite first",
                )


def curve_rows(bases: dict[str, Row], curves: dict[str, Curve]) -> list[Row]:
    """A row for each turn of each contender; ``bases`` say by label what it is of.

    ``loss`` is the mean of the turn's ten steps, ``equal_losses`` how many of all losses so far are
    those of the first contender to the bit.
    """
    expected = np.array(next(iter(curves.values()))[0])
    rows = []
    for label, (losses, times_ms) in curves.items():
        seconds = np.cumsum(times_ms) / 1e3
        equal = np.cumsum(np.array(losses) == expected)
        for end in range(STEPS_PER_TURN, len(losses) + 1, STEPS_PER_TURN):
            turn = slice(end - STEPS_PER_TURN, end)
            p20_ms, p50_ms, p80_ms = np.percentile(times_ms[turn], (20, 50, 80)).tolist()
            rows.append(
                bases[label]
                | {
                    "step": end,
                    "loss": float(np.mean(losses[turn])),
                    "last_loss": losses[end - 1],
                    "equal_losses": f"{equal[end - 1]} of {end}",
                    "seconds": float(seconds[end - 1]),
                    "p20_ms": p20_ms,
                    "p50_ms": p50_ms,
                    "p80_ms": p80_ms,
                }
            )
    return rows


@dataclass(frozen=True, slots=True)
class CurvePlot:
    """The loss against steps and against time."""

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """See :class:`benchmarks.plots.Plot`."""
        contenders = list(dict.fromkeys(row["contender"] for row in rows))
        colours = dict(zip(contenders, (OURS_COLOUR, *PEER_COLOURS), strict=False))
        drawn = [row | {"axis": axis} for axis in ("step", "seconds") for row in rows]

        def draw_panel(axes: Axes, members: list[Row]) -> None:
            for place, contender in enumerate(contenders):
                own = [row for row in members if row["contender"] == contender]
                axis = own[0]["axis"]
                axes.plot(
                    [row[axis] for row in own],
                    [row["loss"] for row in own],
                    color=colours[contender],
                    linewidth=3.0 if place == 0 else 1.2,
                    linestyle="-" if place == 0 else "--",
                    zorder=2 + place,
                )
            axes.set_xlabel(axis, fontsize=8)

        Frame(("axis",), "loss, mean of ten steps").draw(drawn, colours, title, path, draw_panel)
