"""How far ahead of the step that is trained batches are read."""

from __future__ import annotations

AHEAD_BYTES = 2 << 30
"""Of the batches that a rank has read ahead, where each is as large as the largest so far on any rank."""
FIRST = 8
MORE_A_STEP = 2
"""Batches before a feed's first step, which is not to wait for all of them, and how many further with each step."""


class Reach:
    """The same on all ranks, as it follows from what all know.

    Args:
        most: batches.

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
        """A batch is so large on some rank: all ranks hold as many as fit, at least one."""
        self._most = min(self._most, max(1, AHEAD_BYTES // max(1, num_bytes)))
        self.steps = min(self.steps, self._most)
