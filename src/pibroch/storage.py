"""Writing to disk: refusals are a StorageError; files and folders are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pibroch.errors import StorageError

RUN_AGAIN = (
    "free space or choose another --out, then run the same command again: finished parts are reused"
)
ROOM = "a writable folder with enough space"
Kinds = tuple[type[Exception], ...]


@contextmanager
def storage_errors(
    path: Path, need: str = ROOM, do: str = RUN_AGAIN, kinds: Kinds = (OSError,)
) -> Iterator[None]:
    """Turn a refusal, an exception of ``kinds``, into a StorageError that names ``path``."""
    try:
        yield
    except kinds as error:
        what = getattr(error, "strerror", None) or error
        raise StorageError(f"{what} while writing {path}", need, do) from error


@contextmanager
def new_file(
    out: Path,
    need: str = ROOM,
    do: str = RUN_AGAIN,
    kinds: Kinds = (OSError,),
    flush: bool = True,
) -> Iterator[Path]:
    """Yields a path to write to; the file gets its name when it is whole and on the disk.

    Nothing is left of one that fails. Without ``flush`` a machine that loses its power may lose
    the file, or have an empty one.

    Raises:
        StorageError: when the disk refuses.
    """
    temporary = out.with_name(temporary_name(out))
    try:
        with storage_errors(out, need, do, kinds):
            yield temporary
            if flush:
                flush_to_disk(temporary)
            temporary.replace(out)
            if flush:
                flush_to_disk(out.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(out: Path, need: str = ROOM, do: str = RUN_AGAIN) -> Iterator[Path]:
    """As :func:`new_file`, for a folder; one that had the name goes."""
    temporary = out.with_name(temporary_name(out))
    try:
        with storage_errors(out, need, do):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for path in [*temporary.rglob("*"), temporary]:
                flush_to_disk(path)
            give_name(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def give_name(temporary: Path, out: Path) -> None:
    """Give a finished folder, whose files are on the disk, its name.

    One that had the name goes; files of it that are mapped stay. A crash in between leaves that
    under :func:`replaced_name`, by which it is found.

    Raises:
        OSError: when the disk refuses.
    """
    replaced = replaced_name(out)
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    temporary.rename(out)
    flush_to_disk(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def temporary_name(out: Path) -> str:
    """The name, beside ``out``, under which this process prepares it."""
    return f".{out.name}.{os.getpid()}.tmp"


def is_temporary(path: Path) -> bool:
    """Whether a file or folder has a name by :func:`temporary_name`."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def replaced_name(out: Path) -> Path:
    """Where a folder is kept while another one takes its name."""
    return out.with_name(f"{out.name}.replaced")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of killed processes inside ``folder``."""
    for path in filter(is_temporary, folder.glob("*")):
        shutil.rmtree(path, ignore_errors=True)


def lines_from_end(file: BinaryIO, block_bytes: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file, the last one first, each behind the place where it begins.

    >>> import io
    >>> list(lines_from_end(io.BytesIO(b"one\n\nthree"), 4))
    [(5, b'three'), (4, b'\n'), (0, b'one\n')]
    """
    begin = file.seek(0, os.SEEK_END)
    rest = b""
    while begin:
        size = min(block_bytes, begin)
        begin -= size
        file.seek(begin)
        rest = file.read(size) + rest
        while (newline := rest.rfind(b"\n", 0, len(rest) - 1)) >= 0:
            yield begin + newline + 1, rest[newline + 1 :]
            rest = rest[: newline + 1]
    if rest:
        yield 0, rest


def append_json_lines(path: Path, *contents: object) -> None:
    """Append a line for each to a file of JSON lines: all of them, or nothing.

    Raises:
        StorageError: when the disk refuses.
    """
    with storage_errors(path), path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), "".join(json.dumps(each) + "\n" for each in contents).encode())


def append_whole(descriptor: int, data: bytes) -> None:
    """Append to a file that nobody else writes: all of ``data``, or nothing.

    ``write`` takes a part of it where the disk is nearly full, and refuses the rest.

    Raises:
        OSError: when the disk refuses.
    """
    size = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file.

    A last line that a killed writer left unfinished is cut off, a missing file has none.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with storage_errors(path):
            os.truncate(path, len(whole))
    return whole.splitlines()


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where the file system takes no links.

    Raises:
        OSError: when the disk refuses.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def flush_to_disk(path: Path) -> None:
    """Block until a file's bytes, or a folder's names, are on the disk.

    Windows has no such thing for folders.
    """
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    # Windows flushes what may be written to
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
