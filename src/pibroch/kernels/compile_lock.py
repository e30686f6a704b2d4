"""A lock on a file, by which of several processes one compiles a kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

COMPILE_TIMEOUT_S = 120.0
"""How long a process waits for another one that compiles.

Then it compiles, too, which costs time alone.
"""
_POLL_S = 0.02


@contextmanager
def locked(path: str, compiler: AbstractContextManager[object]) -> Iterator[None]:
    """Hold this process's compiler, and a file's lock, which ends with the process.

    A thread that waits for the file holds neither, so that others compile other kernels meanwhile.
    Goes on without the file where it is not to be had.
    """
    file = _open(path)
    try:
        deadline = time.monotonic() + COMPILE_TIMEOUT_S
        while True:
            # the compiler first: in the other order one thread could hold the file, and another
            # what it waits for
            with compiler:
                if file is None or _take(file) or time.monotonic() > deadline:
                    yield
                    return
            time.sleep(_POLL_S)
    finally:
        if file is not None:
            _give_back(file)


def _open(path: str) -> int | None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _take(file: int) -> bool:
    """Lock a file unless another process has; always done where files have no locks."""
    if fcntl is None:
        return True
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _give_back(file: int) -> None:
    """Unlock, as a process that was forked meanwhile has the file, too; and close."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
