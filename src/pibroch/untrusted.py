"""Files that a stranger may have written: how they are opened, and how JSON in them is read.

Checkpoints, exports, deltas, plans, profiles and data sets all come through here. A file is a
regular one inside its folder, its size is known to be within bounds before it is read, and whatever
is wrong with it is said in words.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from pibroch.errors import ConfigError, PibrochError

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 100
NO_FILES = {"reads_files": False}
"""Context of validation: no field may name a file that is then read."""
CHECKSUM = "sha256"
"""Where a manifest has the checksum of the rest of it."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """How files of a kind are refused.

    Attributes:
        error: its type.
        do: what the user can do.
    """

    error: type[PibrochError]
    do: str

    def __call__(self, got: str, need: str) -> PibrochError:
        """The error, to be raised."""
        return self.error(got, need, self.do)


def _inside(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("a path inside the folder, relative and without `..`")
    return name


InnerPath = Annotated[str, AfterValidator(_inside)]
"""Of a file, inside the folder whose manifest names it."""


def open_file(folder: Path, name: str, refusal: Refusal) -> BufferedReader:
    """A regular file of a folder, to be read.

    Args:
        folder: may itself be a link.
        name: of the file, inside the folder; links that lead out of it are not followed.
        refusal: of what cannot be taken.

    Raises:
        PibrochError: the refusal, when the file is missing, unreadable, elsewhere, or no regular
            one.
    """
    path = folder / name
    try:
        _inside(name)
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device have no end
            raise refusal(f"{path}, which is no regular file", "a regular file")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise refusal(f"{path}, a link that leads out of {folder}", "a file in that folder")
        return path.open("rb")
    except FileNotFoundError as error:
        raise refusal(f"no {path}", "this file") from error
    except OSError as error:
        raise refusal(f"{path}, unreadable: {error.strerror}", "a readable file") from error
    except ValueError as error:
        raise refusal(f"a file named {name[:_SHOWN]!r} in {folder}", str(error)) from error


def read_json(folder: Path, name: str, refusal: Refusal) -> Any:
    """What a JSON file of a folder holds.

    Of at most :data:`MAX_JSON_BYTES` and :data:`MAX_JSON_DEPTH`.

    Raises:
        PibrochError: the refusal, as :func:`open_file`, or when it is larger, deeper, or no JSON.
    """
    with open_file(folder, name, refusal) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
            need = f"at most {MAX_JSON_BYTES:,} bytes"
            raise refusal(f"{folder / name} of {size:,} bytes", need)
        return parse_json(file.read(MAX_JSON_BYTES), str(folder / name), refusal)


def parse_json(data: bytes, source: str, refusal: Refusal) -> Any:
    """What some bytes of UTF-8 JSON say.

    Args:
        data: of a size that the caller has bounded.
        source: where they come from, for messages.
        refusal: of what is none.

    Raises:
        PibrochError: the refusal, when they are no JSON, or nested deeper than
            :data:`MAX_JSON_DEPTH`.
    """
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise refusal(f"{source}, damaged: it is no JSON ({reason})", "UTF-8 JSON") from error
    level: list[Any] = [content]
    for _ in range(MAX_JSON_DEPTH):
        groups = [each for each in level if isinstance(each, dict | list)]
        level = [
            item for each in groups for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return content
    raise refusal(f"{source}, nested deeper than {MAX_JSON_DEPTH} levels", "fewer levels")


def checked(kind: Any, content: object, source: str, refusal: Refusal) -> Any:
    """A value of a type that pydantic knows, from what a file holds.

    Args:
        kind: the type, such as a configuration section.
        content: plain values.
        source: the file, for messages.
        refusal: of what does not fit.

    Raises:
        PibrochError: the refusal, which names the first field that does not fit.
    """
    try:
        return _adapter(kind).validate_python(content, context=NO_FILES)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "content"
        need = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        got = f"{source}, damaged: `{field[:200]}` is {_short(problem['input'])}"
        if problem["type"] == "missing":
            got = f"{source}, damaged: it has no `{field[:200]}`"
        raise refusal(got, need) from error


_adapter = lru_cache(64)(TypeAdapter)  # to make one takes milliseconds


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest as JSON, with a checksum of its content in it.

    Raises:
        ConfigError: for one that :func:`read_manifest` would refuse.
        OSError: when the disk refuses.
    """
    text = json.dumps({**content, CHECKSUM: checksum(content)}, indent=1) + "\n"
    refusal = Refusal(ConfigError, "keep less in it, large values as tensors")
    if len(text) > MAX_JSON_BYTES:
        raise refusal(f"a manifest of {len(text):,} bytes", f"at most {MAX_JSON_BYTES:,}")
    parse_json(text.encode(), f"{path}, to be written", refusal)
    path.write_text(text, encoding="utf-8")


def read_manifest(folder: Path, name: str, refusal: Refusal) -> tuple[dict[str, Any], str]:
    """The content of what :func:`write_manifest` wrote, and its checksum.

    Raises:
        PibrochError: the refusal, as :func:`read_json`, or when the checksum is not that of the
            content.
    """
    content = read_json(folder, name, refusal)
    source = folder / name
    if not isinstance(content, dict) or not isinstance(content.get(CHECKSUM), str):
        raise refusal(f"{source}, damaged: it has no `{CHECKSUM}`", "an object with its checksum")
    expected = content.pop(CHECKSUM)
    if expected != checksum(content):
        raise refusal(
            f"{source}, damaged: its checksum does not match its content", "an undamaged file"
        )
    return content, expected


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
