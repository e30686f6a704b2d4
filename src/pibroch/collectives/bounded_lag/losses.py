"""How long a rank waits in vain for others that were stopped, are gone, or merely slow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from pibroch.errors import TrainingError

STOPPED_S = 30.0
"""How long a process may be stopped, by a signal, before those who wait for it give up."""
CLOSED = -1
"""What a rank that has closed leaves as its note."""
ENDED = "its process ended, or let go of the group, without a word"
STOPPED = "it was waited for in vain, and its process is stopped"
LOST_HOST = "its host was lost"
LEFT = "it closed the group while others still wait for it"


class WaitPolicy:
    """When one wait for ranks of a group is given up.

    Args:
        members: the ranks of the group by their numbers in the run, for errors.
        timeout_s: how long one that lives may send nothing.
    """

    def __init__(self, members: Sequence[int], timeout_s: float) -> None:
        self._members = members
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._stopped_since: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._since

    def is_stopped_for_long(self, rank: int, is_stopped: bool) -> bool:
        """Told now and then whether a rank is stopped; whether it has been for long."""
        if not is_stopped:
            self._stopped_since.pop(rank, None)
            return False
        # a debugger, or a shell, stops processes for a moment
        return time.monotonic() - self._stopped_since.setdefault(rank, time.monotonic()) > STOPPED_S

    def check(self, missing: Iterable[int], number: int) -> None:
        """Raise TrainingError when the ranks that are missing have had their time."""
        if self.seconds > self._timeout_s:
            names = [self._members[rank] for rank in missing]
            raise TrainingError(
                f"nothing of ranks {names} for exchange {number} in {self._timeout_s:g} s",
                "all ranks at the same exchange",
                "look at their logs; a longer timeout helps where they are only slow",
            )
