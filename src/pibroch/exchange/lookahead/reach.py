"""How far ahead of the step that is trained batches are read."""

from __future__ import annotations

AHEAD_BYTES = 2 << 30
"""Of the batches that a rank reads ahead, each counted as large as the largest of any rank."""
FIRST = 8
"""Batches that are read before a feed's first step, which is not to wait for all of them."""
MORE_A_STEP = 2
"""How many batches further it is read with each step, until it is as far as wanted."""


class Reach:
    """How many batches to read ahead; all ranks compute the same number.

    Args:
        most: batches to read ahead at most.

    Example:
        >>> reach = Reach(9)
        >>> reach.steps
        8
        >>> reach.step_begins()
        >>> reach.steps
        9
        >>> reach.batch_takes(AHEAD_BYTES // 3)
        >>> reach.steps
        3
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.steps = min(FIRST, most)

    def step_begins(self) -> None:
        """A batch was handed out."""
        self.steps = min(self.steps + MORE_A_STEP, self._most)

    def batch_takes(self, num_bytes: int) -> None:
        """Some rank's batch takes ``num_bytes``: read only as many as fit, but at least one."""
        self._most = min(self._most, max(1, AHEAD_BYTES // max(1, num_bytes)))
        self.steps = min(self.steps, self._most)
