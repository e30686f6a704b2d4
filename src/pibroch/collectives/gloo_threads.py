"""How the system schedules gloo's threads."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"


def let_senders_finish() -> None:
    """Let gloo's network threads of this process wait for their turn.

    Call it once a process group was made. Linux only.

    A thread that sends holds its connection's lock. If the answer wakes gloo's thread on the same
    core before the lock is free, that thread asks for events again and again until its time is
    over, up to 4 ms in which the sender stands still: two ranks on two cores and a third beside
    them spent a third of their time so. Under ``SCHED_BATCH`` it no longer takes the core from a
    thread that runs. With one core a host, at 1 Gbit/s (topic ``lookahead``, dim 16), a step takes
    109 ms and not 121, one of ``alltoall`` 103 and not 106. Needs no privilege. A policy that
    somebody chose, and threads of a process that may not look or set it, stay as they are.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            _let_wait(int(task))


def _let_wait(thread: int) -> None:
    with suppress(OSError):  # one that has ended meanwhile
        is_gloos = Path(f"/proc/self/task/{thread}/comm").read_text().strip() == _NAME
        if is_gloos and os.sched_getscheduler(thread) == os.SCHED_OTHER:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
