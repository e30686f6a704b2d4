"""A figure of a paper beside what is predicted for its hardware."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Row


@dataclass(frozen=True, slots=True)
class Point:
    """One number of a paper.

    Attributes:
        paper: its system.
        figure: where the number is.
        setting: machines and data.
        what: the number means.
        in_paper: it; ``None`` where its text has none, and ours stands alone.
        predicted: ours.
    """

    paper: str
    figure: str
    setting: str
    what: str
    in_paper: float | None
    predicted: float

    def row(self) -> Row:
        """As a table's."""
        difference = None if self.in_paper is None else self.predicted / self.in_paper - 1
        return {
            "paper": self.paper,
            "figure": self.figure,
            "setting": self.setting,
            "what": self.what,
            "in_paper": self.in_paper,
            "predicted": self.predicted,
            "difference": difference,
        }
