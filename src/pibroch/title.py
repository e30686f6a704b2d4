"""What ``ps`` and ``top`` show a process as: its whole command line, and a short name.

The command line is changed by setproctitle, the extra ``titles``; without it the short name alone
tells processes apart.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec

TITLE = "PIBROCH_TITLE"
"""What a process that was started by another one is, in words: ``embedding server 0 of 2``."""
RUN_NAME = "PIBROCH_RUN_NAME"
"""The recipe of the run that this process is part of."""
_LEAVES_ENVIRONMENT = "SPT_NOENV"
"""setproctitle then leaves what ``/proc/PID/environ`` shows.

A title longer than the command line is cut off.
"""
_PR_SET_NAME = 15
_NAME_BYTES = 15


def show_as(title: str, name: str) -> None:
    """Show this process as ``pibroch: <title> (<run>)``.

    Args:
        title: what it is.
        name: the short form of it; 15 bytes at most are shown.
    """
    run = os.environ.get(RUN_NAME)
    _change_command_line(f"pibroch: {title} ({run})" if run else f"pibroch: {title}")
    set_name(name)  # setproctitle has changed it


def set_name(name: str) -> None:
    """The short name of this process, of at most 15 bytes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def name_of_role(command: str, number: int | str) -> str:
    """The short name of a process of a role.

    >>> name_of_role("embedding-server", 1)
    'embedding-se 1'
    """
    return f"{command:.12} {number}"


def _change_command_line(title: str) -> None:
    if find_spec("setproctitle") is None:
        return
    is_set = _LEAVES_ENVIRONMENT in os.environ
    os.environ.setdefault(_LEAVES_ENVIRONMENT, "1")  # read when the first title is set
    try:
        import_module("setproctitle").setproctitle(title)
    finally:
        if not is_set:
            del os.environ[_LEAVES_ENVIRONMENT]
