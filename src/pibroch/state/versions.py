"""A folder of numbered versions, exports and deltas: which one servers take, and what it stands on.

The highest number, unless somebody has rolled the folder back: then ``rollback.json`` in it names
another one, at which servers stay whatever is published meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pibroch import untrusted
from pibroch.config.base import Section
from pibroch.errors import CheckpointError, ConfigError
from pibroch.state.delta_format import DeltaManifest, checksum_in, is_delta, is_exported, read_delta
from pibroch.state.export_format import EXPORT, MANIFEST, read_checked, write_checked
from pibroch.storage import new_file, storage_errors

ROLLBACK = "rollback.json"
MOST_LINKS = 256
"""Deltas in a chain; each costs a lookup a kernel call."""
_ROOM = "a folder that this process may write to", "free some space, or ask its owner"


class Rollback(Section):
    """At which version servers stay.

    Attributes:
        number: of it.
    """

    format: Literal["pibroch-rollback"] = "pibroch-rollback"
    format_version: Literal[1] = 1
    number: int = Field(ge=0)


def numbered(folder: Path) -> list[int]:
    """The numbers in a folder, rising, whole or not."""
    if not folder.is_dir():
        return []
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdecimal())


def chosen_version(folder: Path) -> Path | None:
    """The version that servers take; ``None`` for a folder without numbered ones.

    Raises:
        CheckpointError: for one that was rolled back to a version that is not there.
    """
    versions = [each for each in folder.glob("*") if each.name.isdecimal() and is_exported(each)]
    if not versions:
        return None
    number = rolled_back_to(folder)
    if number is None:
        return max(versions, key=lambda each: int(each.name))
    chosen = next((each for each in versions if int(each.name) == number), None)
    if chosen is None:
        raise CheckpointError(
            f"{folder}, rolled back to version {number}, which is not there",
            "a version that is there",
            f"name another by `pibroch publish rollback {folder} --to N`, or `--newest`",
        )
    return chosen


def rolled_back_to(folder: Path) -> int | None:
    """The number at which servers stay; ``None`` where they take the newest.

    Raises:
        DamagedCheckpointError: when the file that says so is damaged.
    """
    if not (folder / ROLLBACK).is_file():
        return None
    return read_checked(folder, ROLLBACK, "pibroch-rollback", Rollback, {1: dict})[0].number


def roll_back(folder: Path, number: int) -> None:
    """Have servers go back to a version, and stay there until :func:`go_forward`.

    Raises:
        ConfigError: when the folder has no such version.
        CheckpointError: when what it stands on is not there.
        StorageError: when the disk refuses.
    """
    if number not in numbered(folder) or not is_exported(folder / str(number)):
        raise ConfigError(
            f"version {number} in {folder}",
            f"one that is there: {', '.join(map(str, numbered(folder))) or 'none is'}",
            "look at `pibroch publish list`",
        )
    chain_of(folder / str(number))
    with new_file(folder / ROLLBACK, *_ROOM) as file:
        write_checked(file, Rollback(number=number))
    try:  # a run that publishes there may have removed it before it saw the file
        chain_of(folder / str(number))
    except CheckpointError:
        go_forward(folder)
        raise


def go_forward(folder: Path) -> None:
    """Have servers take the newest version again.

    Raises:
        StorageError: when the disk refuses.
    """
    with storage_errors(folder / ROLLBACK, *_ROOM):
        (folder / ROLLBACK).unlink(missing_ok=True)


def chain_of(folder: Path) -> list[Path]:
    """An export or a delta and all that it stands on, itself first, the whole export last.

    Raises:
        CheckpointError: when something is missing or damaged; files of rows are not read.
    """
    chain = [folder]
    while is_delta(chain[-1]):
        manifest, _ = read_delta(chain[-1])
        chain.append(base_of(chain[-1], manifest))
        must_be_short(len(chain) - 1)
    untrusted.read_manifest(chain[-1], MANIFEST, EXPORT)
    return chain


def base_of(folder: Path, manifest: DeltaManifest) -> Path:
    """What a delta begins at, in the folders beside it.

    Raises:
        CheckpointError: when it is not there.
    """
    for other in sorted(folder.absolute().parent.iterdir()):
        if not other.name.startswith(".") and checksum_in(other) == manifest.base.sha256:
            return other
    raise CheckpointError(
        f"{folder}, a delta since {manifest.base.version}, which is not beside it",
        "what it begins at in the same folder",
        f"put {manifest.base.version} into {folder.absolute().parent}, or export the whole",
    )


def must_be_short(num_deltas: int) -> None:
    """Raise CheckpointError for a chain of too many deltas."""
    if num_deltas > MOST_LINKS:
        raise CheckpointError(
            f"more than {MOST_LINKS} deltas on each other", "fewer", "export the whole"
        )
