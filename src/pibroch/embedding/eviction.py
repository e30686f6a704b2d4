"""Which ids of a hashed table lose their rows when rows are short."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from pibroch.errors import ConfigError
from pibroch.integers import whole_number
from pibroch.kernels.arrays import Ints
from pibroch.kernels.key_table import KeyTable, least


@dataclass(frozen=True, slots=True)
class EvictionPolicy(ABC):
    """Gives each id a score, of which the least leave first; equal ones by rising id.

    A frozen dataclass of plain values, of which checkpoints keep name and fields. Ids of the step
    that is now always stay.
    """

    name: ClassVar[str]
    """Of the policy, for good: it stands in checkpoints."""

    @property
    def decay_steps(self) -> int:
        """All ids' counts are halved at each multiple of so many steps; never at 0."""
        return 0

    @abstractmethod
    def scores(self, ids: Ints, counts: Ints, last_steps: Ints, step: int) -> Ints:
        """Of ids that have rows, int64 ``[U]``: a function of the arguments alone.

        All ranks ask it, each for itself.

        Args:
            ids: ``[U]``, by rising row.
            counts: ``[U]``, how often each was seen since it was first counted, as in its last
                step.
            last_steps: ``[U]``, in which each was seen last.
            step: that is now; the first is 1.
        """

    def victims(self, table: KeyTable, num: int, step: int) -> Ints:
        """The rows of the ``num`` that leave first, rising; fewer when there are fewer."""
        rows = np.flatnonzero(table.entries[:, 1])
        seen = table.entries[rows, 1]
        scores = np.asarray(
            self.scores(table.entries[rows, 0], seen & 0xFFFFFFFF, seen >> 32, step)
        )
        if scores.dtype != np.int64 or scores.shape != rows.shape:
            raise ConfigError(
                f"{scores.dtype} {list(scores.shape)} as scores by the policy {self.name!r}",
                f"int64 {list(rows.shape)}",
            )
        given = np.zeros(len(table.entries), np.int64)
        given[rows] = scores
        return least(table, num, step, given=given)

    def described(self) -> dict[str, Any]:
        """As checkpoints keep it."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, slots=True)
class LeastRecent(EvictionPolicy):
    """Those that were not seen for longest."""

    name = "least_recent"

    def scores(self, ids: Ints, counts: Ints, last_steps: Ints, step: int) -> Ints:
        """See :class:`EvictionPolicy`."""
        return last_steps

    def victims(self, table: KeyTable, num: int, step: int) -> Ints:
        """See :class:`EvictionPolicy`; the same in one pass."""
        return least(table, num, step)


@dataclass(frozen=True, slots=True)
class LeastFrequent(EvictionPolicy):
    """Those that were seen least often; of these the least recent ones.

    Attributes:
        half_life: all counts are halved, and rounded down, at each multiple of so many steps;
            ``None`` for never.
    """

    half_life: int | None = None

    name = "least_frequent"

    def __post_init__(self) -> None:
        if self.half_life is not None:
            number = whole_number(self.half_life, "least_frequent with half_life", 1)
            object.__setattr__(self, "half_life", number)

    @property
    def decay_steps(self) -> int:
        """See :class:`EvictionPolicy`."""
        return self.half_life or 0

    def scores(self, ids: Ints, counts: Ints, last_steps: Ints, step: int) -> Ints:
        """See :class:`EvictionPolicy`."""
        if self.half_life is not None:
            counts = counts >> np.minimum(step // self.half_life - last_steps // self.half_life, 31)
        return (counts << 32) | last_steps

    def victims(self, table: KeyTable, num: int, step: int) -> Ints:
        """See :class:`EvictionPolicy`; the same in one pass."""
        return least(table, num, step, by_count=True, half_life=self.decay_steps)
