"""What has become of another process: gone, stopped, or alive."""

from __future__ import annotations

import select
import socket
from pathlib import Path

from pibroch.wire.admit import credentials


def state_behind(link: socket.socket) -> str:
    """The state of the process at the other end of a socket, as :func:`state_of` says it.

    Empty when it has hung up; ``?`` of one that does not say so and is on another host.
    """
    if has_hung_up(link):
        return ""
    return state_of(credentials(link)[0]) if link.family == socket.AF_UNIX else "?"


def state_of(process: int) -> str:
    """The state of a process as the system has it: ``T`` when stopped, empty when gone or ended.

    Of 0, a process that cannot be seen from here, it says nothing: ``?``.
    """
    if process == 0:
        return "?"
    try:
        # behind the last bracket: a program's name, which comes before, may hold brackets and
        # blanks
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
    return "" if state in ("Z", "X") else state


def has_hung_up(link: socket.socket) -> bool:
    """Whether the other end of a socket is gone."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return any(
        events & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, events in poll.poll(0)
    )
