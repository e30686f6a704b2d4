"""A process forked from this one, which goes on as the same program.

Its arguments and its environment are others.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pibroch.title import set_name


class ForkedProcess:
    """A child, as far as it is needed what :class:`subprocess.Popen` is to who started a program.

    Attributes:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What a child is to be.

    Attributes:
        arguments: of the program, without its name.
        environment: all variables.
        name: under which ``ps`` and ``top`` show it until it says what it is; 15 letters at most.
        closed: descriptors of the parent that are none of its business.
        log: descriptor of a file for its output, and then signals of the terminal pass it by; the
            parent's output when absent.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    name: str
    closed: Sequence[int]
    log: int | None = None


def fork(plan: ChildPlan, program: Callable[[], NoReturn]) -> ForkedProcess:
    """Fork; the child calls ``program`` as if it had been started anew, and never comes back.

    This process must have no other thread that holds locks, and must not have computed with OpenMP:
    a child would wait for threads that it does not have.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # the collector would look at each object, and children would then have pages of their own
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        _be(plan, program)
    return ForkedProcess(pid)


def _be(plan: ChildPlan, program: Callable[[], NoReturn]) -> NoReturn:
    code = 1
    try:
        streams = {0: os.open(os.devnull, os.O_RDONLY)}
        if plan.log is not None:
            os.setsid()
            streams |= {1: plan.log, 2: plan.log}
        for asks_to_end in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asks_to_end, signal.SIG_DFL)
        for number, descriptor in streams.items():
            os.dup2(descriptor, number)
        for descriptor in {*plan.closed, *streams.values()} - {0, 1, 2}:
            os.close(descriptor)
        set_name(plan.name)
        os.environ.clear()
        os.environ.update(plan.environment)
        sys.argv = [sys.argv[0], *plan.arguments]
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # shown here and told by the exit code: above is the parent's stack
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but for what it takes down of itself."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
