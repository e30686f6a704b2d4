"""What a process knows that a launcher has started, and what it says by the way it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from pibroch.errors import PibrochError
from pibroch.process import LAST_WORDS, LAUNCHER
from pibroch.title import show_as

LOST = 75
"""What a process says to its launcher by its exit code.

Another one was lost, and the run may go on from its checkpoint.
"""
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a process that was told to end.

Where its launcher was not, nobody wants the run to end: the process is lost.
"""
_PR_SET_PDEATHSIG = 1


def signal_of(code: int) -> str | None:
    """The name of the signal that ended a process, or told it to end.

    ``None`` for one that ended otherwise.
    """
    if code < 0:
        return signal.Signals(-code).name
    return signal.Signals(code - 128).name if code in STOPPED else None


def is_rank() -> bool:
    """Whether this process is a rank, started by a launcher of ours or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def show_rank(title: str) -> None:
    """Show this process as one of the ranks.

    Args:
        title: of a rank that does what this one does.
    """
    rank = os.environ.get("RANK", "0")
    show_as(f"{title} {rank} of {os.environ.get('WORLD_SIZE', '1')}", f"rank {rank}")


def show_launcher(num_ranks: int, title: str) -> None:
    """Show this process as the one that starts the ranks."""
    show_as(f"launcher of {num_ranks} {title}{'s' * (num_ranks > 1)}", "launcher")


def has_launcher() -> bool:
    """Whether a launcher on this machine started this process, and reports its end."""
    return LAUNCHER in os.environ


def tell_launcher(error: PibrochError) -> int:
    """The exit code of a process that ends with an error.

    Its launcher, if it has one, learns that something was lost.
    """
    if not error.is_loss or not has_launcher():
        return error.exit_code
    path = os.environ.get(LAST_WORDS)
    if path is not None:
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(error.got)
    return LOST


def die_with_launcher() -> None:
    """Have the system kill this process when the launcher that started it, torchrun too, is gone.

    Without one do nothing.
    """
    if not has_launcher() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":  # when the thread ends that started this process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if is_orphan():
        os._exit(1)


def is_orphan() -> bool:
    """Whether the launcher that started this process is gone."""
    return has_launcher() and os.getppid() != int(os.environ[LAUNCHER])


def redirect_output(path: Path) -> None:
    """Append this process's standard output and standard error to a file from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
