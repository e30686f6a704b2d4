"""Whether what a command writes would take the place of what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pibroch.errors import ConfigError


def refuse_overlap(out: Path, inputs: Iterable[Path | str | None], option: str = "--out") -> None:
    """Raise ConfigError where an output is one of the inputs, contains one, or lies in one.

    Args:
        out: a file or a folder that is to be written.
        inputs: files and folders that are read for it; those that are ``None``, or not there, are
            left out.
        option: that names the output.
    """
    target = out.resolve()
    for each in inputs:
        if each is None or not Path(each).exists():
            continue
        source = Path(each).resolve()
        if target == source:
            how = "is"
        elif source.is_relative_to(target):
            how = "contains"
        elif target.is_relative_to(source):
            how = "lies in"
        else:
            continue
        raise ConfigError(
            f"{option} {out}, which {how} {each}, from which it is to be made",
            "a place of its own",
            f"choose another {option}",
        )


def refuse_inside(out: Path, folder: Path | str | None, option: str) -> None:
    """Raise ConfigError where an output lies in a folder all of whose files are read.

    Args:
        out: a folder that is to be written.
        folder: that is read; ``None`` for none.
        option: that names the output.
    """
    if folder is not None and out.resolve().is_relative_to(Path(folder).resolve()):
        raise ConfigError(
            f"{option} {out}, which lies in {folder}, whose files and sub-folders are read",
            "a place outside it",
            f"choose another {option}",
        )
