"""A job, from the start of its processes to their end.

One of them that may be started again alone is; what else is lost ends this life of the job.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlparse

from pibroch.launch.child import LOST, signal_of
from pibroch.launch.job import BEGUN, Group, Job, Place, Restarts, variables
from pibroch.launch.machines import Here, Machines, Process
from pibroch.process import LAST_WORDS
from pibroch.title import TITLE

logger = logging.getLogger(__name__)
STOP_S = 5.0
"""How long processes may take to end when they are told to stop."""
LONGEST_PAUSE_S = 30.0
_POLL_S = 0.02
_PROBE_S = 1.0


@dataclass(slots=True)
class RestartBudget:
    """What is left of the restarts of one process, or of all; later where nothing was gained.

    >>> budget, now = RestartBudget(Restarts(most=3)), 0.0
    >>> [budget.pause(now, step) for step in (5, 5, 5, 9)]
    [0.0, 1.0, 2.0, None]
    >>> budget.pause(now + budget.restarts.within_s + 1, 9)
    1.0
    """

    restarts: Restarts
    vain: int = 0
    """Restarts in turn that brought no new checkpoint or cut."""
    _times: deque[float] = field(default_factory=deque)
    _step: int | None = None

    def pause(self, now: float, step: int | None = None) -> float | None:
        """Seconds to wait before the next start; ``None`` when no more are left.

        Args:
            now: monotonic seconds.
            step: from which a run goes on; ``None`` where nothing is trained again.
        """
        while self._times and now - self._times[0] > self.restarts.within_s:
            self._times.popleft()
        self.vain = self.vain + 1 if step is not None and step == self._step else 0
        self._step = step
        if len(self._times) >= self.restarts.most:
            return None
        self._times.append(now)
        return min(LONGEST_PAUSE_S, 2.0 ** (self.vain - 1)) if self.vain else 0.0


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended before its time.

    Attributes:
        group: its own.
        number: in the group.
        code: its exit code, negative for a signal.
    """

    group: Group
    number: int
    code: int

    @property
    def signal(self) -> str | None:
        """The signal that ended it, or told it to end."""
        return signal_of(self.code)

    @property
    def is_loss(self) -> bool:
        """Whether it, or one that it needs, was lost; else it failed, and would do so again."""
        return self.signal is not None or self.code in (0, LOST)

    @property
    def exit_code(self) -> int:
        """What a launcher ends with because of it."""
        return 1 if self.code == LOST else self.code if self.code > 0 else 128 - self.code

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return f"signal {self.signal}" if self.signal else f"exit code {self.code}"

    def __str__(self) -> str:
        return f"{self.group.title} {self.number} ended with {self.how}"


@dataclass(slots=True)
class _Member:
    group: Group
    number: int
    budget: RestartBudget
    process: Process | None = None
    is_given_up: bool = False

    def death(self) -> Death | None:
        """How it ended, if it did before its time."""
        code = None if self.process is None else self.process.poll()
        if code is None or (code == 0 and self.group.are_ranks):
            return None
        return Death(self.group, self.number, code)

    def has_finished(self) -> bool:
        """Whether it is a rank that is done."""
        return self.group.are_ranks and self.process is not None and self.process.poll() == 0

    def is_restarted(self, death: Death) -> bool:
        """Whether it is started again alone, while restarts are left."""
        restarts = self.group.restarts
        return restarts is not None and (death.is_loss or restarts.after_any_end)


class Life:
    """Processes of a job. Leaving the ``with`` block ends those that still run.

    Args:
        job: which.
        place: where they meet.
        machines: on which they run; this one when absent.
        is_again: whether they go on where others have been before.
        words: a file for the reason of the first rank that ends because something was lost.
        on_restart: is told of each that is started again alone.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        machines: Machines | None = None,
        is_again: bool = False,
        words: Path | None = None,
        on_restart: Callable[[Death], None] = lambda death: None,
    ) -> None:
        self._job = job
        self._place = place
        self._machines = machines or Here()
        self._is_again = is_again
        self._words = words
        self._on_restart = on_restart
        self._is_open = not job.num_ranks  # then whoever starts this has opened the rendezvous
        self._members = [
            _Member(group, number, RestartBudget(group.restarts or Restarts()))
            for group in job.groups
            for number in range(group.count)
        ]

    def __enter__(self) -> Self:
        try:
            self._start_what_can()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(STOP_S if kind is None else self._job.stop_s)

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> Death | None:
        """Wait until all ranks have ended, or something has.

        The first death that ends this life; ``None`` for success.

        Args:
            is_over: asked now and then whether to wait any longer.
        """
        while not is_over():
            self._machines.pause(_POLL_S)
            death = self.look()
            if death is not None or (self._job.num_ranks and not self._running(ranks=True)):
                return death
        return None

    def look(self) -> Death | None:
        """Start what can be started, now or again. The death, if any, that ends this life."""
        self._start_what_can()
        deaths = [
            (each, death)
            for each in self._members
            if not each.is_given_up and (death := each.death()) is not None
        ]
        if any(each.has_finished() for each in self._members):  # others may hear of it first
            deaths = [(each, death) for each, death in deaths if each.group.are_ranks]
        fatal = [(each, death) for each, death in deaths if not each.is_restarted(death)]
        for each, death in [] if fatal else deaths:
            if not self._restart(each, death):
                each.is_given_up = each.budget.restarts.or_without
                fatal += [] if each.is_given_up else [(each, death)]
        if not fatal:
            return None
        # of those found at once one that a signal ended: others end because of it
        member, death = min(fatal, key=lambda each: each[1].signal is None)
        member.is_given_up = True
        return death

    def settle(self, seconds: float) -> list[Death]:
        """After a death: let ranks say what they know of it and end; those who died until then."""
        self._wait(seconds, ranks=True)
        ranks = (each for each in self._members if each.group.are_ranks)
        return [death for each in ranks if (death := each.death()) is not None]

    def kill_one(self, role: str, number: int) -> None:
        """End one that hangs, at once."""
        for each in self._members:
            if (each.group.role, each.number) == (role, number) and each.process is not None:
                each.process.send_signal(signal.SIGKILL)

    def end(self, seconds: float = STOP_S) -> None:
        """End what still runs: ask, wait for ranks for so long, and kill."""
        for process in self._running(ranks=True):
            process.send_signal(signal.SIGTERM)
        self._wait(seconds, ranks=True)  # servers hold rows that ranks may save now
        for process in self._running():
            process.send_signal(signal.SIGTERM)
        self._wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """End what still runs, at once: it hangs, or is stopped."""
        for process in self._running():
            process.send_signal(signal.SIGKILL)
        self._wait(STOP_S)

    def _running(self, ranks: bool = False) -> list[Process]:
        return [
            each.process
            for each in self._members
            if each.process is not None
            and each.process.poll() is None
            and (each.group.are_ranks or not ranks)
        ]

    def _wait(self, seconds: float, ranks: bool = False) -> None:
        """For the end of all, for at most this long; what they ask for meanwhile is done."""
        deadline = time.monotonic() + seconds
        while self._running(ranks) and time.monotonic() < deadline:
            self._machines.pause(_POLL_S)

    def _restart(self, member: _Member, death: Death) -> bool:
        """Start one again, if it may be."""
        if member.budget.pause(time.monotonic()) is None:
            logger.warning("%s: its %d restarts are used up", death, member.budget.restarts.most)
            return False
        logger.warning("%s: it is started again", death)
        member.process = self._start(member)
        self._on_restart(death)
        return True

    def _start_what_can(self) -> None:
        for each in self._members:
            if each.process is None and (not each.group.needs or self._has_rendezvous()):
                each.process = self._start(each)

    def _has_rendezvous(self) -> bool:
        if not self._is_open and (
            self._job.folder is None or Path(self._job.folder, BEGUN).exists()
        ):
            self._is_open = _is_listening(self._job.rendezvous or self._place.rendezvous)
        return self._is_open

    def _start(self, member: _Member) -> Process:
        group = member.group
        beside = self._machines.ranks_beside(self._job, member.number) if group.are_ranks else None
        own = variables(self._job, group, member.number, self._place, beside)
        if group.is_numbered:
            own[TITLE] = f"{group.title} {member.number} of {group.count}"
        if group.are_ranks and self._words is not None:
            own[LAST_WORDS] = str(self._words)
        arguments = group.arguments(member.number, self._is_again)
        return self._machines.start(self._job, group, member.number, arguments, own)


def _is_listening(rendezvous: str) -> bool:
    url = urlparse(rendezvous)
    with suppress(OSError, ValueError):  # a recipe's may be no address: ranks say so
        socket.create_connection((url.hostname or "", url.port or 0), _PROBE_S).close()
        return True
    return False
