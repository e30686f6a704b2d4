"""Bad records, set aside in a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pibroch.data.storage import read_json_lines
from pibroch.data.streams.base import BadRecord
from pibroch.errors import DataError
from pibroch.storage import new_file, storage_errors

_COUNTED_AT_LEAST = 10_000
SHOWN = 3


class SetAside:
    """A line for each bad record, with the step that it would have been in.

    Args:
        path: of the file, of this rank alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def go_on_after(self, step: int) -> None:
        """Drop the lines of later steps, which were not written down and are read again."""
        lines = read_json_lines(self._path)
        kept = [line for line in lines if line["step"] <= step]
        if len(kept) < len(lines):
            with new_file(self._path) as path:
                path.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")

    def add(self, step: int, bad: Sequence[BadRecord]) -> None:
        """Write some down.

        Raises:
            StorageError: when the disk refuses.
        """
        if not bad:
            return
        lines = [json.dumps({"step": step, **asdict(each)}) + "\n" for each in bad]
        with storage_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def check_share(num_bad: int, num_records: int, most_share: float, latest: Sequence[str]) -> None:
    """Refuse a stream with too many bad records; a share of 10,000 is always allowed.

    Raises:
        DataError: names the latest.
    """
    if num_bad <= most_share * max(num_records, _COUNTED_AT_LEAST):
        return
    shown = "; ".join(latest[:SHOWN])
    raise DataError(
        f"{num_bad:,} bad of {num_records:,} records of the stream{': ' if shown else ''}{shown}",
        f"at most a share of {most_share:g}",
        "look at what was set aside, correct the schema, or allow more by `most_bad_share`",
    )
