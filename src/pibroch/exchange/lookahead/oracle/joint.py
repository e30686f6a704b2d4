"""The oracles of all lanes of an exchange, which plan the same steps together."""

from __future__ import annotations

from collections.abc import Sequence

from pibroch.exchange.lookahead.oracle.oracle import Opening, Oracle, RowsOfRanks, StepPlan
from pibroch.kernels.arrays import RowIds


class JointOracle:
    """One rank's oracles, a lane each.

    Each has a cache of its own and shrinks its lookahead by itself.

    Args:
        oracles: in the order of the lanes.
    """

    def __init__(self, oracles: Sequence[Oracle]) -> None:
        self._oracles = oracles

    @property
    def num_lanes(self) -> int:
        """Number of oracles."""
        return len(self._oracles)

    def restart(self) -> None:
        """See :meth:`Oracle.restart`."""
        for oracle in self._oracles:
            oracle.restart()

    def add(self, rows: Sequence[Sequence[RowIds]]) -> None:
        """The addresses that each rank touches in one more step, by lane and rank.

        Raises:
            ConfigError: when they fit into no cache; then no oracle knows the step.
        """
        of_lanes = [RowsOfRanks.of(rows_of_rank) for rows_of_rank in rows]
        for oracle, of_ranks in zip(self._oracles, of_lanes, strict=True):
            oracle.check_fits(of_ranks)
        for oracle, of_ranks in zip(self._oracles, of_lanes, strict=True):
            oracle.add(of_ranks)

    def open(self) -> list[Opening]:
        """See :meth:`Oracle.open`."""
        return [oracle.open() for oracle in self._oracles]

    def plan(self) -> list[StepPlan]:
        """See :meth:`Oracle.plan`."""
        return [oracle.plan() for oracle in self._oracles]
