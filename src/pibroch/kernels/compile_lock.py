"""A lock on a file, by which of several processes one compiles a kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

COMPILE_TIMEOUT_S = 120.0
"""How long a process waits for another one that compiles.

Then it compiles, too, which costs time alone.
"""
_POLL_S = 0.02


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a file's lock, which ends with the process.

    Go on without it where there is none, or it is not to be had.
    """
    try:
        import fcntl

        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        yield
        return
    try:
        deadline = time.monotonic() + COMPILE_TIMEOUT_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)
