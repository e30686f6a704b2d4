"""Where a dataset is written and how it gets its name: in one step, by one process at a time."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pibroch.data.storage import read_json_lines
from pibroch.data.writer import MANIFEST
from pibroch.errors import DataError
from pibroch.storage import append_json_lines, give_name, storage_errors

log = logging.getLogger(__name__)
_LOCK = "lock"


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise unless ``out`` is free or an older dataset that may be overwritten."""
    if not out.exists():
        return
    if not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            f"--out {out}, which exists and is no dataset", "a new folder", "choose another --out"
        )
    if (out / MANIFEST).exists() and not overwrite:
        raise DataError(
            f"--out {out}, which already holds a dataset",
            "a new folder",
            "pass --overwrite to replace it",
        )


def publish(folder: Path, out: Path) -> None:
    """Give a finished dataset its name; an older one of that name goes."""
    with storage_errors(out):
        give_name(folder, out)


@contextmanager
def work_folder(work: Path, signature: dict[str, Any] | None) -> Iterator[None]:
    """Open ``OUT.partial`` for this process alone.

    What is there is kept only if a run of this signature left it.
    """
    plan = work / "plan.json"
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # who can read it can hold it
    try:
        try:
            _take(lock)
        except OSError as error:
            raise DataError(
                f"{work}, in which another process works", "one at a time", "wait for it"
            ) from error
        if signature is None or read_json_lines(plan) != [signature]:
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            plan.unlink(missing_ok=True)
            append_json_lines(plan, signature)
        else:
            log.info("going on with the interrupted preparation in %s", work)
        for name in ("spool", "dataset", "runs"):
            (work / name).mkdir(exist_ok=True)
        yield
    finally:
        os.close(lock)
        if work.exists() and all(path.name == _LOCK for path in work.iterdir()):
            shutil.rmtree(work, ignore_errors=True)


def clear(work: Path) -> None:
    """Within :func:`work_folder`, remove what a finished preparation leaves, and the folder."""
    with storage_errors(work):
        for path in work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
        # Windows removes no open file: there the folder goes when its lock is closed
        if sys.platform != "win32":
            shutil.rmtree(work)


def _take(lock: int) -> None:
    """Lock a file for this process until it is closed.

    Raises:
        OSError: when another process has it.
    """
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
