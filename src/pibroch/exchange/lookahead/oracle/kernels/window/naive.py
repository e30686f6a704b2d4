"""What the window kernels decide, without a thought of speed or of memory.

Every rule of design note 0005 in dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Journey = tuple[int, int, int]
"""A row, where it comes from, where it goes."""


@dataclass
class Moves:
    """What travels in one message, or after one step.

    Attributes:
        records: that move for good.
        weights: that are borrowed for one step.
        gradients: that go to owners.
    """

    records: set[Journey] = field(default_factory=set)
    weights: set[Journey] = field(default_factory=set)
    gradients: set[Journey] = field(default_factory=set)


class NaiveWindow:
    """All steps are known beforehand: ``touches[step][rank]`` are the rows that a rank touches.

    ``bounds`` may name more homes than there are ranks that touch rows: the rest are servers'.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        touches: Sequence[Sequence[set[int]]],
        lookahead: int,
        design: str = "lrpp",
    ) -> None:
        self.bounds = bounds
        self.touches = touches
        self.lookahead = lookahead
        self.design = design
        self.trainers = range(len(touches[0]))
        self.holder: dict[int, int] = {}  # of the rows that are not at home
        self.owner: dict[tuple[int, int], int] = {}

    def home(self, row: int) -> int:
        """The rank whose shard has the row."""
        return next(rank for rank in range(len(self.bounds) - 1) if row < self.bounds[rank + 1])

    def readers(self, step: int, row: int) -> list[int]:
        """Ranks that touch the row in a step."""
        return [rank for rank, rows in enumerate(self.touches[step]) if row in rows]

    def rows(self, step: int) -> set[int]:
        """All rows of a step, none beyond the last one."""
        return set().union(*self.touches[step]) if step < len(self.touches) else set()

    def next_step(self, step: int, row: int) -> int | None:
        """The next step within the lookahead that touches the row."""
        later = range(step + 1, min(step + self.lookahead, len(self.touches) - 1) + 1)
        return next((each for each in later if row in self.rows(each)), None)

    def choose(self, row: int, source: int, readers: Sequence[int], then: Sequence[int]) -> int:
        """The owner, by the rule's order among the readers or those that read it in the next step.

        In other designs it is always the home, or a trainer in place of a server.
        """
        # readers of the next step come first: the record is there then without another journey
        home = self.home(row)
        among = [rank for rank in readers if rank in then] or readers
        if self.design == "lrpp":
            return next(rank for rank in (source, home, among[row % len(among)]) if rank in among)
        return home if home in self.trainers else row % len(self.trainers)

    def arrive(self, step: int, rows: set[int], planned: int) -> Moves:
        """Bring rows to their owners and to those that read them in a step.

        No step beyond ``planned + lookahead`` is known.
        """
        is_known = step + 1 < len(self.touches) and step + 1 <= planned + self.lookahead
        moves = Moves()
        for row in rows:
            home = self.home(row)
            readers = self.readers(step, row)
            source = self.holder.get(row, home)
            owner = self.choose(
                row, source, readers, self.readers(step + 1, row) if is_known else []
            )
            self.owner[step, row] = owner
            if owner != source:
                moves.records.add((row, source, owner))
            # replicas are kept equal by giving weights to all, read or not
            borrowers = self.trainers if self.design == "replicated" else readers
            moves.weights |= {
                (row, source, rank) for rank in borrowers if rank not in (owner, source)
            }
            # whoever had it has it no longer; a row at home has no holder
            self.holder.pop(row, None)
            if owner != home:
                self.holder[row] = owner
        return moves

    def early(self, step: int, planned: int) -> Moves:
        """The rows of a step that the one before does not touch."""
        return self.arrive(step, self.rows(step) - self.rows(step - 1), planned)

    def soon(self, step: int) -> Moves:
        """The others, when the step before is planned."""
        return self.arrive(step, self.rows(step) & self.rows(step - 1), step - 1)

    def gradients(self, step: int, critical: bool) -> Moves:
        """Gradients of the rows that the next step touches, or of the others."""
        rows = {row for row in self.rows(step) if (row in self.rows(step + 1)) == critical}
        owner = {row: self.owner[step, row] for row in rows}
        return Moves(
            gradients={
                (row, r, owner[row])
                for row in rows
                for r in self.readers(step, row)
                if r != owner[row]
            }
        )

    def leaving(self, step: int) -> Moves:
        """Records that go home after a step."""
        gone = {
            row
            for row in self.rows(step)
            if self.next_step(step, row) is None and row in self.holder
        }
        return Moves(records={(row, self.holder.pop(row), self.home(row)) for row in gone})
